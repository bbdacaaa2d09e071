"""(f) Long answers, where the paper's band comes near drift and noise: does the picture of short ones turn?

Answers of 336 to 840 tokens (additions written out) on a tiny dense model and a tiny mixture of experts, at a
healthy and a stressed learning rate.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from experiments.common import Arm, Experiment, Results, main
from experiments.measure import train
from experiments.tables import collapsed, expert_change, final, largest, late, moved

RATES = {"healthy": 1e-4, "stressed": 1e-3}
KINDS: dict[str, dict[str, Any]] = {
    "gspo": {"algorithm.objective": "gspo"},
    "gspo-r2": {"algorithm.objective": "gspo", "algorithm.routing_replay": "old"},
    "grpo": {"algorithm.objective": "grpo"},
    "grpo-r2": {"algorithm.objective": "grpo", "algorithm.routing_replay": "old"},
}


def arms() -> dict[str, Arm]:
    found: dict[str, Arm] = {}
    for model, base in (("moe", "long_moe"), ("dense", "long_dense")):
        for rate_name, rate in RATES.items():
            for kind, values in KINDS.items():
                if model == "moe" or "r2" not in kind:
                    found[f"{model} {kind} {rate_name}"] = Arm(base, {"optimizer.learning_rate": rate} | values)
    return found


def draw(results: Results, path: Path) -> None:
    from experiments import figures  # matplotlib

    columns = [(f"{model} ", f" {rate}") for model in ("moe", "dense") for rate in RATES]
    figure, axes = figures.grid(4, len(columns), "Answers of 336 to 840 tokens")
    metrics = ("reward", "clip_tokens", "std_log_s", "grad_norm_max")
    figures.panels(axes, results, columns, metrics, lambda arm: arm.split()[1])
    figures.save(figure, path)


COLUMNS = {
    "held-out accuracy, sampled": final("sampled_accuracy"),
    "greedy": final("greedy_accuracy"),
    "reward, last five iterations": late("reward", 5),
    "collapsed": collapsed,
    "largest gradient norm": largest("grad_norm_max"),
    "tokens clipped, %": moved("clip_tokens", 100),
    "sd log s": moved("std_log_s"),
    "experts changed by the last update, %": expert_change,
}

EXPERIMENT = Experiment(
    "long_answers", arms(), range(3), train, draw, COLUMNS, ["moe gspo healthy", "dense grpo healthy"]
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
