"""(c) GSPO clips two orders of magnitude more than GRPO: over clip widths, learning rates and lengths (Fig. 2)

'short': answers of about 13 tokens; 'long': of about 600. The widths are multiples of the paper's bands.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from experiments.common import Arm, Experiment, Results, main
from experiments.measure import train
from experiments.tables import late, moved
from gspo.config import PAPER_CLIP

WIDTHS = {"gspo": (1, 10, 100), "grpo": (0.1, 1)}
RATES = (3e-5, 1e-4, 3e-4)
LONG_RATES = (1e-4,)


def arms() -> dict[str, Arm]:
    found: dict[str, Arm] = {}
    for length, base, rates, iterations in (("short", "sort_moe", RATES, 20), ("long", "long_moe", LONG_RATES, 6)):
        for rate in rates:
            for objective, widths in WIDTHS.items():
                for width in widths:
                    values = _band(objective, width) | {
                        "algorithm.objective": objective,
                        "optimizer.learning_rate": rate,
                        "run.iterations": iterations,
                    }
                    found[f"{length} {objective} x{width:g} {rate:g}"] = Arm(base, values, {"final_evaluation": False})
    return found


def _band(objective: str, width: float) -> dict[str, Any]:
    low, high = PAPER_CLIP[objective]
    return {"algorithm.clip_low": low * width, "algorithm.clip_high": high * width}


def draw(results: Results, path: Path) -> None:
    from experiments import figures  # matplotlib

    columns = [("short", rate) for rate in RATES] + [("long", rate) for rate in LONG_RATES]
    figure, axes = figures.grid(2, len(columns), "Share that the objective clips, from the second mini-batch on")
    for column, (length, rate) in enumerate(columns):
        ends = f" {rate:g}"
        chosen = figures.by(results, length, ends)
        for row, metric in enumerate(("clip_tokens", "clip_sequences")):
            values = {arm.split(" ", 1)[1].removesuffix(ends): [moved(metric)(record) or 0.0 for record in records]
                      for arm, records in chosen.items()}  # fmt: skip
            figures.points(axes[row][column], values, figures.COLOURS)
            axes[row][column].set_yscale("symlog", linthresh=1e-4)
            axes[row][column].set_ylim(0, 1)
            axes[row][column].set_title(f"{metric}, {length} answers, lr {rate:g}", fontsize=8)
    figures.save(figure, path)


COLUMNS = {
    "tokens clipped, %": moved("clip_tokens", 100),
    "sequences with a clipped token, %": moved("clip_sequences", 100),
    "sd log s": moved("std_log_s"),
    "sd log w": moved("std_log_w"),
    "length": late("length"),
}

EXPERIMENT = Experiment(
    "clip_fractions", arms(), range(3), train, draw, COLUMNS, ["short gspo x1 0.0001", "short grpo x1 0.0001"]
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
