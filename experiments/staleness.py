"""(e) How old may the data be? Rollouts sampled 0, 1, 2, 4 and 8 updates before the update that uses them.

One update a rollout batch of 32 answers, so that the age is the same for all of it; old log-probs are those of the
weights that sampled. GSPO with the paper's band and with one a hundred times as wide, and GRPO.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from experiments.common import Arm, Experiment, Results, main
from experiments.measure import train
from experiments.moe_stability import SCALED
from experiments.tables import collapsed, expert_change, final, late, moved

AGES = (0, 1, 2, 4, 8)
KINDS: dict[str, dict[str, Any]] = {
    "gspo": {"algorithm.objective": "gspo"},
    "gspo-wide": {"algorithm.objective": "gspo"} | SCALED,
    "grpo": {"algorithm.objective": "grpo"},
}
SETTING = {
    "algorithm.updates_per_rollout": 1,
    "rollout.prompts_per_iteration": 4,
    "run.iterations": 120,
    "optimizer.learning_rate": 2e-4,
}


def arms() -> dict[str, Arm]:
    return {
        f"{kind} {age}": Arm("sort_moe", SETTING | values, {"lag": age})
        for age in AGES
        for kind, values in KINDS.items()
    }


def draw(results: Results, path: Path) -> None:
    from experiments import figures  # matplotlib

    figure, axes = figures.grid(2, 3, "Data some updates old, tiny mixture of experts")
    columns = [(f"{kind} ", "") for kind in KINDS]
    figures.panels(axes, results, columns, ["reward"], lambda arm: f"{arm.split()[1]} updates old")
    for axis, metric in zip(axes[1], ("std_log_s", "clip_tokens", "expert_change"), strict=True):
        for number, kind in enumerate(KINDS):
            by_age = {age: results[f"{kind} {age}"] for age in AGES if f"{kind} {age}" in results}
            figures.against(axis, by_age, metric, kind, figures.COLOURS[number])
        axis.set_title(f"{metric} by age of the data", fontsize=9)
        axis.legend(fontsize=6)
    figures.save(figure, path)


COLUMNS = {
    "held-out accuracy, sampled": final("sampled_accuracy"),
    "greedy": final("greedy_accuracy"),
    "reward, last ten iterations": late("reward"),
    "collapsed": collapsed,
    "tokens clipped, %": moved("clip_tokens", 100),
    "sd log s": moved("std_log_s"),
    "experts changed by the last update, %": expert_change,
}

EXPERIMENT = Experiment("staleness", arms(), range(3), train, draw, COLUMNS, ["gspo 0", "grpo 2"])

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
