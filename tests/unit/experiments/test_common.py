"""The experiments' runner: what is done is kept and not made again; intervals are Student's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from experiments import (
    clip_fractions,
    common,
    dense_objectives,
    long_answers,
    moe_stability,
    precision,
    staleness,
)
from experiments.common import Experiment, Store
from experiments.engines import to_int8_and_back
from experiments.measure import interval

EXPERIMENTS = [
    module.EXPERIMENT
    for module in (dense_objectives, moe_stability, clip_fractions, precision, staleness, long_answers)
]


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


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda experiment: experiment.name)
def test_every_arm_is_a_config_that_is_accepted(experiment: Experiment) -> None:
    for arm in experiment.arms.values():
        common.base_config(arm.base, quick=False).with_values(arm.values)
    assert set(experiment.quick_arms) <= set(experiment.arms)
    assert len(experiment.seeds) >= 3


def test_eight_bits() -> None:
    torch.manual_seed(0)
    weight = torch.randn(3, 5, 64)
    rounded = to_int8_and_back(weight)
    step = weight.abs().amax(-1, keepdim=True) / 127
    assert ((rounded - weight).abs() <= step / 2 * 1.0001).all() and (rounded != weight).any()
    assert max(len(row.unique()) for row in rounded.flatten(0, 1)) <= 255


def test_interval() -> None:
    centre, half = interval([1.0, 2.0, 3.0])
    assert centre == 2.0 and half == pytest.approx(4.303 / 3**0.5)  # deviation 1, two degrees of freedom
    assert interval([5.0]) == (5.0, 0.0)
