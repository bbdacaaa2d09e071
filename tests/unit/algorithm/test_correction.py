"""Corrections for engine mismatch: written again by hand, sequence by sequence; detached; padding and length."""

from __future__ import annotations

import math

import pytest
import torch

from gspo.algorithm.correction import mismatch_correction
from gspo.algorithm.objectives import grpo, gspo, gspo_token


def example() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Three sequences of 3, 1 and 2 tokens; the last token of the first is an inserted one."""
    old = torch.tensor([-1.0, -2.0, float("nan"), -0.5, -3.0, -1.0])
    rollout = torch.tensor([-1.5, -2.1, -9.0, -2.5, -1.0, float("nan")])
    mask = torch.tensor([True, True, False, True, True, True])
    return old, rollout, mask, torch.tensor([0, 3, 4, 6], dtype=torch.int32)


RHO_TOKEN = [math.exp(0.5), math.exp(0.1), 1.0, math.exp(2.0), math.exp(-2.0), 1.0]
RHO_SEQUENCE = [math.exp(0.3), math.exp(2.0), math.exp(-1.0)]


@pytest.mark.parametrize(
    ("kind", "weights", "acted", "rho"),
    [
        ("truncate_token", [math.exp(0.5), math.exp(0.1), 1.0, 2.0, math.exp(-2.0), 1.0], [3], RHO_TOKEN),
        ("mask_token", [1.0, 1.0, 1.0, 0.0, 0.0, 1.0], [3, 4], RHO_TOKEN),
        ("truncate_sequence", [math.exp(0.3), 2.0, math.exp(-1.0)], [1], RHO_SEQUENCE),
        ("mask_sequence", [1.0, 0.0, 0.0], [1, 2], RHO_SEQUENCE),
    ],
)
def test_by_hand(kind: str, weights: list[float], acted: list[int], rho: list[float]) -> None:
    """Values are also given before they are cut: a cap must not hide how large the mismatch was."""
    old, rollout, mask, bounds = example()
    found = mismatch_correction(
        old.requires_grad_(), rollout_logprobs=rollout, completion_mask=mask, cu_seqlens=bounds, kind=kind
    )
    assert found.weights.tolist() == pytest.approx(weights) and found.rho.tolist() == pytest.approx(rho)
    assert found.per_token == kind.endswith("token") and not found.weights.requires_grad
    assert found.acted.nonzero()[:, 0].tolist() == acted


def test_the_sequence_forms_do_not_grow_with_length() -> None:
    """A constant gap of 0.1 nat a token: the product over 100 tokens would be 22,000, the geometric mean is 1.105."""
    for length in (1, 10, 100):
        found = mismatch_correction(
            torch.full((length,), -1.0),
            rollout_logprobs=torch.full((length,), -1.1),
            completion_mask=torch.ones(length, dtype=torch.bool),
            cu_seqlens=torch.tensor([0, length], dtype=torch.int32),
            kind="mask_sequence",
        )
        assert found.rho.item() == pytest.approx(math.exp(0.1), rel=1e-5) and found.weights.item() == 1.0


def test_equal_engines_change_nothing() -> None:
    old, _, mask, bounds = example()
    for kind in ("truncate_token", "mask_token", "truncate_sequence", "mask_sequence"):
        found = mismatch_correction(
            old, rollout_logprobs=old, completion_mask=mask, cu_seqlens=bounds, kind=kind, cap=1.0001
        )
        assert bool((found.weights == 1).all()) and not bool(found.acted.any())


def test_one_broken_token_gives_no_infinity() -> None:
    found = mismatch_correction(
        torch.tensor([-1.0]),
        rollout_logprobs=torch.tensor([-500.0]),
        completion_mask=torch.tensor([True]),
        cu_seqlens=torch.tensor([0, 1], dtype=torch.int32),
        kind="truncate_token",
    )
    assert found.weights.tolist() == [2.0] and math.isfinite(found.rho.item())


@pytest.mark.parametrize(
    ("kind", "cap"), [("none", 2.0), ("clip_token", 2.0), ("truncate_batch", 2.0), ("mask_token", 1.0)]
)
def test_wrong_arguments(kind: str, cap: float) -> None:
    old, rollout, mask, bounds = example()
    with pytest.raises(ValueError, match="found"):
        mismatch_correction(old, rollout_logprobs=rollout, completion_mask=mask, cu_seqlens=bounds, kind=kind, cap=cap)


def test_weights_act_outside_the_clip() -> None:
    """A factor of the term, not of the ratio: clip state stays, and so does a ratio of 1 for unchanged weights.

    Each token's gradient is its factor times what it was without.
    """
    torch.manual_seed(0)
    bounds = torch.tensor([0, 3, 5], dtype=torch.int32)
    mask = torch.ones(5, dtype=torch.bool)
    old, advantages = torch.randn(5) - 2, torch.tensor([1.0, -0.5])
    weights = torch.tensor([0.5, 2.0, 1.0, 0.0, 1.5])
    shared = {"old_logprobs": old, "completion_mask": mask, "cu_seqlens": bounds}

    def gradient(output_of: object) -> torch.Tensor:
        logprobs = old.clone().requires_grad_()
        output = output_of(logprobs)  # type: ignore[operator]
        assert output.ratio.tolist() == pytest.approx([1.0, 1.0])
        output.loss.backward()
        assert logprobs.grad is not None
        return logprobs.grad

    by_token = advantages[torch.tensor([0, 0, 0, 1, 1])]
    plain = gradient(lambda x: gspo(x, advantages=advantages, **shared))
    weighed = gradient(lambda x: gspo_token(x, token_advantages=by_token * weights, **shared))
    assert torch.allclose(weighed, plain * weights)
    plain = gradient(lambda x: grpo(x, advantages=advantages, **shared))
    weighed = gradient(lambda x: grpo(x, advantages=advantages, token_weights=weights, **shared))
    assert torch.allclose(weighed, plain * weights)
