"""Packed tensors against the padded loop oracle: values, gradients, ratios and clipped shares."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.batches import Batch, evaluate, random_batch
from tests.parity.padded_oracle import Padded, finite_differences, solve

NAMES = ("gspo", "gspo_token", "grpo")
BANDS = [(3e-4, 4e-4), (0.05, 0.08), (0.2, 0.27), (0.9, 50.0)]


def draw(seed: int, dtype: torch.dtype = torch.float64, *, by_token: bool = False) -> Batch:
    """Uneven lengths, holes in the mask, one row without any unmasked token, one with advantage 0, one empty."""
    generator = np.random.default_rng(seed)
    lengths = [int(n) for n in generator.integers(1, 12, size=int(generator.integers(4, 9)))] + [0]
    batch = random_batch(lengths, seed=seed, holes=0.3, dtype=dtype)
    bounds = batch.cu_seqlens.tolist()
    batch.completion_mask[bounds[1] : bounds[2]] = False
    batch.advantages[2] = 0.0
    spread = batch.advantages.repeat_interleave(torch.tensor(lengths))
    if by_token:
        spread = spread + torch.randn(spread.shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    return replace(batch, token_advantages=spread)


def padded(batch: Batch) -> Padded:
    """[B, T] with NaN wherever there is no token; the packed values, taken as float64."""
    shape = (len(batch.lengths), max(batch.lengths))
    arrays = {name: np.full(shape, np.nan) for name in ("logprobs", "old_logprobs", "advantages")}
    mask = np.zeros(shape, dtype=bool)
    for row, (start, length) in enumerate(zip(batch.cu_seqlens.tolist(), batch.lengths, strict=False)):
        span = slice(start, start + length)
        arrays["logprobs"][row, :length] = batch.logprobs[span].double()
        arrays["old_logprobs"][row, :length] = batch.old_logprobs[span].double()
        arrays["advantages"][row, :length] = batch.token_advantages[span].double()
        mask[row, :length] = batch.completion_mask[span]
    return Padded(arrays["logprobs"], arrays["old_logprobs"], mask, arrays["advantages"])


def flat(batch: Batch, rows: np.ndarray) -> torch.Tensor:
    return torch.tensor(np.concatenate([rows[row, :length] for row, length in enumerate(batch.lengths)]))


@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("name", NAMES)
def test_the_oracles_coefficients_are_the_derivative_of_its_value(name: str, band: tuple[float, float]) -> None:
    batch = padded(draw(3, by_token=name == "gspo_token"))
    np.testing.assert_allclose(finite_differences(name, batch, *band), solve(name, batch, *band).gradient, atol=1e-8)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-6)])
@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", NAMES)
def test_objective_equals_the_oracle(
    name: str, seed: int, band: tuple[float, float], dtype: torch.dtype, tolerance: float
) -> None:
    batch = draw(seed, dtype, by_token=name == "gspo_token")
    expected = solve(name, padded(batch), *band)
    hidden = ~batch.completion_mask
    batch.logprobs[hidden], batch.old_logprobs[hidden], batch.token_advantages[hidden] = torch.nan, torch.inf, torch.nan
    output, gradient = evaluate(name, batch, clip_low=band[0], clip_high=band[1])
    assert output.loss.dtype == gradient.dtype == dtype
    assert output.loss.item() == pytest.approx(expected.loss, abs=tolerance)
    torch.testing.assert_close(gradient.double(), flat(batch, expected.gradient), rtol=0, atol=tolerance)
    for found, wanted in (
        (output.ratio, expected.ratio),
        (output.clipped_high, expected.high),
        (output.clipped_low, expected.low),
        (output.clipped, expected.high + expected.low),
    ):
        assert found.dtype == torch.float32
        np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-6, atol=1e-6)


def test_the_draws_reach_every_branch() -> None:
    """The comparison above would be empty if no row were clipped on each side, and none on the free sides."""
    seen = [solve("gspo", padded(draw(seed)), 0.05, 0.08) for seed in range(6)]
    assert sum(a.high.sum() for a in seen) > 2 and sum(a.low.sum() for a in seen) > 2
    assert sum(int((np.abs(a.gradient).sum(1) > 0).sum()) for a in seen) > 10
