"""Group-relative advantages against numpy, group by group."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from gspo.algorithm.advantages import group_advantages, groups_without_signal

GROUPS = [4, 9, 4, 4, 9, 2, 9, 4]
REWARDS = [1.0, 0.5, 0.25, math.nan, -1.0, 7.0, 0.0, 3.0]


def by_hand(scale: str, eps: float) -> np.ndarray:
    rewards, groups = np.array(REWARDS), np.array(GROUPS)
    out = np.zeros(len(rewards))
    for group in (4, 9):
        rows = (groups == group) & ~np.isnan(rewards)
        deviation = rewards[rows] if scale == "group_std" else rewards[~np.isnan(rewards)]
        divisor = 1.0 if scale == "none" else deviation.std(ddof=1) + eps
        out[rows] = (rewards[rows] - rewards[rows].mean()) / divisor
    return out


@pytest.mark.parametrize("eps", [1e-6, 0.5])
@pytest.mark.parametrize("scale", ["group_std", "none", "batch_std"])
def test_values(scale: str, eps: float) -> None:
    found = group_advantages(torch.tensor(REWARDS), torch.tensor(GROUPS), scale=scale, eps=eps)  # type: ignore[arg-type]
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), by_hand(scale, eps), rtol=1e-6)


def test_the_deviation_is_taken_about_the_mean() -> None:
    """A one-pass sum of squares loses a spread of 0.3 on top of 1e7, even in float64."""
    rewards = torch.tensor([1e7 + 0.1, 1e7 + 0.4], dtype=torch.float64)
    assert group_advantages(rewards, torch.tensor([0, 0])).tolist() == pytest.approx([-(2**-0.5), 2**-0.5], rel=1e-5)


def test_float32_rewards_are_taken_in_float64() -> None:
    """A spread of 0.001 on top of 1000 is sixteen steps of float32: its mean there is 6 % off."""
    rewards = torch.tensor([1000.0, 1000.001, 1000.0])
    exact = rewards.double().numpy()
    expected = (exact - exact.mean()) / (exact.std(ddof=1) + 1e-6)
    np.testing.assert_allclose(
        group_advantages(rewards, torch.zeros(3, dtype=torch.int64)).numpy(), expected, rtol=1e-6
    )


@pytest.mark.parametrize(
    ("rewards", "quiet"),
    [
        ([1.0, 1.0 + 0.9e-8], True),
        ([1.0, 1.0 + 1.1e-8], False),
        ([1e6, 1e6 + 0.009], True),
        ([1e6, 1e6 + 0.011], False),
        ([0.0, 1e-9], True),
        ([-5.0, -5.0], True),
        ([-1.0, 0.0], False),
        ([math.nan, 1.0], True),
        ([math.nan, math.nan], True),
        ([2.0, math.nan, 1.0], False),
    ],
)
def test_rule_of_no_signal(rewards: list[float], quiet: bool) -> None:
    values, ids = torch.tensor(rewards, dtype=torch.float64), torch.zeros(len(rewards), dtype=torch.int64)
    assert groups_without_signal(values, ids).tolist() == [quiet]
    assert bool((group_advantages(values, ids) == 0).all()) is quiet


def test_groups_without_signal_are_in_order_of_id() -> None:
    assert groups_without_signal(torch.tensor(REWARDS), torch.tensor(GROUPS)).tolist() == [True, False, False]


def test_no_rewards() -> None:
    empty = group_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.int64), scale="batch_std")
    assert empty.shape == (0,)


@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_an_infinite_reward_is_refused_by_row(value: float) -> None:
    with pytest.raises(ValueError, match="row 2 is infinite"):
        group_advantages(torch.tensor([0.0, 1.0, value]), torch.tensor([0, 0, 0]))


def test_shapes_that_disagree_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[3\] and \[2\]"):
        group_advantages(torch.zeros(3), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"\[1, 3\]"):
        group_advantages(torch.zeros(1, 3), torch.zeros(1, 3, dtype=torch.int64))


def test_an_unknown_scale_is_refused() -> None:
    with pytest.raises(ValueError, match="'group_std', 'none' or 'batch_std'; found 'std'"):
        group_advantages(torch.zeros(2), torch.zeros(2, dtype=torch.int64), scale="std")  # type: ignore[arg-type]
