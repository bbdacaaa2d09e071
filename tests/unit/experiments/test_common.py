"""The experiments' runner: what is done is kept and not made again; intervals are Student's."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments import common, moe_stability
from experiments.common import Store
from experiments.measure import interval


def test_a_run_that_is_stored_is_not_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    store = Store(moe_stability.EXPERIMENT, quick=False)
    planned = store.missing()
    assert len(planned) == 20 * 5 and len({seed for _, seed in planned[:20]}) == 1  # balanced when it is stopped
    for arm, seed in (planned[3], planned[0]):
        store.add({"arm": arm, "seed": seed, "value": 1})
    store.add({"arm": planned[0][0], "seed": 0, "value": 2})  # again: the later one counts
    assert store.missing() == [run for run in planned if run not in (planned[0], planned[3])]
    assert [record["value"] for record in store.records()] == [2, 1]


def test_every_arm_is_a_config_that_is_accepted() -> None:
    for arm in moe_stability.EXPERIMENT.arms.values():
        common.base_config(arm.base, quick=False).with_values(arm.values)
    assert set(moe_stability.EXPERIMENT.quick_arms) <= set(moe_stability.EXPERIMENT.arms)


def test_interval() -> None:
    centre, half = interval([1.0, 2.0, 3.0])
    assert centre == 2.0 and half == pytest.approx(4.303 / 3**0.5)  # deviation 1, two degrees of freedom
    assert interval([5.0]) == (5.0, 0.0)
