"""What the figures share. Needs matplotlib: the extra gspo[experiments]."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib

from experiments.measure import interval

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLOURS = plt.get_cmap("tab10").colors  # type: ignore[attr-defined]


def grid(rows: int, columns: int, title: str) -> tuple[Any, Any]:
    """(figure, axes [rows][columns])."""
    figure, axes = plt.subplots(rows, columns, figsize=(4.6 * columns, 3.3 * rows), squeeze=False, layout="constrained")
    figure.suptitle(title)
    return figure, axes


def curves(
    axis: Any, records: Sequence[Mapping[str, Any]], metric: str, label: str, colour: Any, style: str = "-"
) -> None:
    """Mean over seeds of a curve, smoothed over 5 iterations, its 95 % interval as a band, and every seed thin."""
    series = [smooth(record["curve"][metric]) for record in records]
    for values in series:
        axis.plot(range(1, len(values) + 1), values, color=colour, linewidth=0.5, alpha=0.35)
    found = [interval(point) for point in zip(*series, strict=True)]
    steps = range(1, len(found) + 1)
    axis.plot(steps, [centre for centre, _ in found], style, color=colour, label=f"{label} ({len(records)} seeds)")
    low, high = [c - h for c, h in found], [c + h for c, h in found]
    axis.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)


def panels(
    axes: Any,
    results: Mapping[str, Any],
    columns: Sequence[tuple[str, str]],
    metrics: Sequence[str],
    label: Callable[[str], str],
) -> None:
    """A row of axes for each metric, a column for the arms whose names start and end like that: their curves."""
    for column, (start, end) in enumerate(columns):
        chosen = by(results, start, end)
        for row, metric in enumerate(metrics):
            axis = axes[row][column]
            axis.set_title(f"{metric}: {' '.join((start + end).split())}", fontsize=8)
            for number, (arm, records) in enumerate(chosen.items()):
                curves(axis, records, metric, label(arm), COLOURS[number], "--" if "r2" in arm else "-")
            if chosen:
                axis.legend(fontsize=6)


def against(
    axis: Any, by_place: Mapping[int, Sequence[Mapping[str, Any]]], metric: str, label: str, colour: Any
) -> None:
    """The mean of a curve's last three quarters against a number: every seed, their mean and its 95 % interval."""
    places, found = list(by_place), []
    for place, records in by_place.items():
        values = [late(record["curve"][metric]) for record in records]
        axis.plot([place] * len(values), values, ".", color=colour, markersize=4, alpha=0.5)
        found.append(interval(values))
    halves = [half for _, half in found]
    axis.errorbar(places, [centre for centre, _ in found], yerr=halves, color=colour, capsize=3, label=label)


def late(values: Sequence[float | None]) -> float:
    """Mean over the last three quarters."""
    kept = [value for value in values[len(values) // 4 :] if value is not None]
    return sum(kept) / len(kept) if kept else float("nan")


def points(axis: Any, groups: Mapping[str, Sequence[float]], colours: Sequence[Any]) -> None:
    """One column a group: every value as a dot, the mean and its 95 % interval."""
    for place, (values, colour) in enumerate(zip(groups.values(), colours, strict=False)):
        axis.plot([place] * len(values), values, "o", color=colour, markersize=3, alpha=0.6)
        centre, half = interval(values)
        axis.errorbar([place + 0.18], [centre], yerr=[half], fmt="_", color=colour, capsize=3)
    axis.set_xticks(range(len(groups)), list(groups), rotation=40, ha="right", fontsize=7)


def smooth(values: Sequence[float | None], width: int = 5) -> list[float]:
    """Mean over the last ``width`` values that are there."""
    found: list[float] = []
    for end in range(1, len(values) + 1):
        window = [value for value in values[max(0, end - width) : end] if value is not None]
        found.append(sum(window) / len(window) if window else float("nan"))
    return found


def save(figure: Any, path: Any) -> None:
    figure.savefig(path, dpi=110)
    plt.close(figure)


def by(results: Mapping[str, Any], start: str = "", end: str = "") -> dict[str, Any]:
    """The arms whose names start and end like that."""
    return {arm: records for arm, records in results.items() if arm.startswith(start) and arm.endswith(end)}
