"""The table of an experiment: one line an arm, each number the mean over its seeds and half its 95 % interval."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments.measure import interval

Record = Mapping[str, Any]
Column = Callable[[Record], float | None]


def table(results: Mapping[str, Sequence[Record]], columns: Mapping[str, Column]) -> str:
    """Markdown. Numbers of three significant digits; an interval only where there are several seeds."""
    lines = ["| run | seeds | " + " | ".join(columns) + " |", "|---" * (len(columns) + 2) + "|"]
    for arm, records in results.items():
        cells = [_cell([column(record) for record in records]) for column in columns.values()]
        lines.append(f"| {arm} | {len(records)} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(values: Sequence[float | None]) -> str:
    kept = [value for value in values if value is not None and math.isfinite(value)]
    if not kept:
        return ""
    centre, half = interval(kept)
    return f"{centre:.3g}" + (f" ± {half:.2g}" if len(kept) > 1 else "")


def final(name: str) -> Column:
    """Of the held-out evaluation after training."""
    return lambda record: record["final"].get(name)


def late(metric: str, count: int = 10) -> Column:
    """Mean of a curve over its last ``count`` iterations."""
    return lambda record: _mean(record["curve"][metric][-count:])


def seconds(part: str) -> Column:
    """Of a whole run."""
    return lambda record: record["seconds"][part]


def largest(metric: str) -> Column:
    return lambda record: max((v for v in record["curve"][metric] if v is not None), default=None)


def moved(metric: str, factor: float = 1.0) -> Column:
    """Mean over an iteration's updates but the first, where no ratio can leave 1; of a single update, that one."""

    def value(record: Record) -> float | None:
        found = _mean([u.get(metric) for u in (record["by_update"][1:] or record["by_update"])])
        return None if found is None else factor * found

    return value


def expert_change(record: Record) -> float | None:
    """Percent of the experts that differ from the old pass's when the last update of an iteration is computed: mean
    over layers."""
    found = _mean(record["by_update"][-1].get("expert_change_by_layer", []))
    return None if found is None else 100 * found


def collapsed(record: Record) -> float:
    """1 if the reward of the last five iterations is below half that of the first five."""
    rewards = record["curve"]["reward"]
    first, last = _mean(rewards[:5]) or 0.0, _mean(rewards[-5:]) or 0.0
    return float(last < first / 2)


def _mean(values: Sequence[float | None]) -> float | None:
    kept = [value for value in values if value is not None]
    return sum(kept) / len(kept) if kept else None
