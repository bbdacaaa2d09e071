"""Which clip band for which length: a table of what the other experiments have stored, written to
experiments/results/clip_bands.md. Nothing is run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.common import RESULTS
from experiments.precision import LENGTHS
from experiments.tables import Column, late, table

DRIFT = {
    "clip_fractions": ("short gspo", "long gspo"),
    "moe_stability": ("gspo healthy 4", "gspo healthy 16", "gspo-scaled healthy 4", "gspo-scaled healthy 16"),
    "long_answers": ("moe gspo ", "dense gspo "),
}
"""Experiment -> how the names of its GSPO arms begin."""


def main() -> None:
    drift = {
        f"{name}: {arm}": records
        for name, starts in DRIFT.items()
        for arm, records in stored(name).items()
        if arm.startswith(starts)
    }
    noise = {arm: records for arm, records in stored("precision").items() if arm.startswith("noise")}
    text = (
        "abs(log s) of a sequence, by update of an iteration (the first has none): a band of the 70th percentile\n"
        "clips about 15 %, one of the 90th about 5 %.\n\n"
        + table(drift, DRIFT_COLUMNS)
        + "\nThe same from the engine's noise alone, before any update: 70th percentile by length.\n\n"
        + table(noise, NOISE_COLUMNS)
    )
    (RESULTS / "clip_bands.md").write_text(text, encoding="utf-8")


def stored(name: str) -> Mapping[str, Sequence[Mapping[str, Any]]]:
    found: dict[str, list[Mapping[str, Any]]] = {}
    path = RESULTS / f"{name}.json"
    for record in json.loads(path.read_text(encoding="utf-8"))["runs"] if path.exists() else []:
        found.setdefault(record["arm"], []).append(record)
    return found


def of_update(update: int, metric: str) -> Column:
    """``update``: from the end when negative."""
    return lambda record: record["by_update"][update].get(metric)


def of_length(length: int) -> Column:
    return lambda record: next(
        (line["log_s_p70"] for line in record["noise"]["by_length"] if line["length"] == length), None
    )


DRIFT_COLUMNS: Mapping[str, Column] = {
    "tokens an answer": late("length"),
    "learning rate": lambda record: record["values"]["optimizer.learning_rate"],
    "second update: median": of_update(1, "log_s_p50"),
    "70th percentile": of_update(1, "log_s_p70"),
    "last update: median": of_update(-1, "log_s_p50"),
    "70th": of_update(-1, "log_s_p70"),
    "90th": of_update(-1, "log_s_p90"),
}
NOISE_COLUMNS: Mapping[str, Column] = {f"{length} tokens": of_length(length) for length in LENGTHS}

if __name__ == "__main__":
    main()
