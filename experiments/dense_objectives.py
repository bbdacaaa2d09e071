"""(a) Does GSPO train better than GRPO at the same cost? On a dense model; and does a vLLM server change anything?

GSPO, GSPO-token and GRPO with the paper's bands, equal prompts, answers and updates; GSPO once more with answers from
a vLLM server instead of the engine in the process (its runs need the environment .venv-vllm, docs/vllm.md).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from experiments.common import Arm, Experiment, Results, main
from experiments.measure import train
from experiments.tables import final, late, moved, seconds

VLLM = {"engine.kind": "vllm", "engine.python": ".venv-vllm/bin/python"}
ARMS: Mapping[str, Arm] = {
    "gspo": Arm("addition", {"algorithm.objective": "gspo"}),
    "gspo_token": Arm("addition", {"algorithm.objective": "gspo_token"}),
    "grpo": Arm("addition", {"algorithm.objective": "grpo"}),
    "gspo, vllm": Arm("addition", {"algorithm.objective": "gspo"} | VLLM),
}


def draw(results: Results, path: Path) -> None:
    from experiments import figures  # matplotlib

    figure, axes = figures.grid(1, 3, "SmolLM2-135M on two-digit addition")
    for number, (arm, records) in enumerate(results.items()):
        for axis, metric in zip(axes[0], ("reward", "clip_tokens"), strict=False):
            figures.curves(axis, records, metric, arm, figures.COLOURS[number])
            axis.set_title(metric, fontsize=9)
            axis.set_xlabel("iteration", fontsize=8)
    axes[0][0].legend(fontsize=7)
    final = {arm: [record["final"]["greedy_accuracy"] for record in records] for arm, records in results.items()}
    figures.points(axes[0][2], final, figures.COLOURS)
    axes[0][2].set_title("held-out accuracy, greedy", fontsize=9)
    figures.save(figure, path)


COLUMNS = {
    "held-out accuracy, greedy": final("greedy_accuracy"),
    "sampled": final("sampled_accuracy"),
    "reward, last five iterations": late("reward", 5),
    "tokens clipped, %": moved("clip_tokens", 100),
    "sd log s": moved("std_log_s"),
    **{f"{part}, s": seconds(part) for part in ("rollout", "old_logprobs", "update", "publish")},
}

EXPERIMENT = Experiment("dense_objectives", ARMS, range(3), train, draw, COLUMNS, ["gspo", "grpo"])

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
