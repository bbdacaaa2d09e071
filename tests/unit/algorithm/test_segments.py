"""Sums and means over sequences laid end to end."""

from __future__ import annotations

import math

import pytest
import torch

from gspo.algorithm.segments import segment_counts, segment_ids, segment_mean, segment_sum
from tests.batches import cumulative

BOUNDS = cumulative([2, 0, 3])


def test_ids_skip_empty_sequences() -> None:
    assert segment_ids(BOUNDS, 5).tolist() == [0, 0, 2, 2, 2]
    assert segment_ids(cumulative([]), 0).tolist() == []


@pytest.mark.parametrize("bounds", [[0, 2, 4], [0, 2, 6], [1, 5], [], [[0, 5]]])
def test_bounds_that_do_not_fit_are_refused(bounds: list[int]) -> None:
    with pytest.raises(ValueError, match=r"begin at 0 and end at the number of tokens, 5"):
        segment_ids(torch.tensor(bounds), 5)


def test_sum_mean_and_counts() -> None:
    values, mask = torch.tensor([1.0, 2, 4, 8, 16]), torch.tensor([True, True, True, False, True])
    assert segment_sum(values, BOUNDS).tolist() == [3, 0, 28]
    assert segment_counts(mask, BOUNDS).tolist() == [2, 0, 2]
    assert segment_mean(values, mask, BOUNDS).tolist() == [1.5, 0, 10]


def test_a_masked_sequence_has_mean_zero_and_count_zero() -> None:
    values, mask = torch.tensor([math.nan, math.inf]), torch.tensor([False, False])
    assert segment_mean(values, mask, cumulative([2])).tolist() == [0.0]
    assert segment_counts(mask, cumulative([2])).tolist() == [0.0]


def test_reduction_is_in_float32_and_float64_stays() -> None:
    """In bfloat16, 256 + 1 is 256 for ever."""
    ones = torch.ones(1000, dtype=torch.bfloat16)
    assert segment_sum(ones, cumulative([1000])).tolist() == [1000.0]
    assert segment_sum(ones, cumulative([1000])).dtype == torch.float32
    tiny = torch.tensor([1.0, 1e-12], dtype=torch.float64)
    assert segment_sum(tiny, cumulative([2])).item() == 1.0 + 1e-12
    assert segment_mean(tiny, torch.tensor([True, True]), cumulative([2])).item() == (1.0 + 1e-12) / 2
