"""Objectives at their edges: gradients by finite differences, overflow, precision, wrong arguments."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from gspo.algorithm.objectives import OBJECTIVES, gspo, gspo_token
from tests.batches import WIDE, evaluate, make_batch, random_batch


@pytest.mark.parametrize("band", [WIDE, {"clip_low": 0.05, "clip_high": 0.08}])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_gradcheck(name: str, band: dict[str, float]) -> None:
    """GSPO-token too: with advantages constant in a sequence its stop-gradients cancel."""
    batch = random_batch([4, 1, 3, 2], holes=0.2)
    weights = {"token_advantages": batch.token_advantages} if name == "gspo_token" else {"advantages": batch.advantages}

    def loss(logprobs: torch.Tensor) -> torch.Tensor:
        return OBJECTIVES[name](
            logprobs,
            old_logprobs=batch.old_logprobs,
            completion_mask=batch.completion_mask,
            cu_seqlens=batch.cu_seqlens,
            **weights,
            **band,
        ).loss

    assert torch.autograd.gradcheck(loss, batch.logprobs.clone().requires_grad_())


@pytest.mark.parametrize("name", OBJECTIVES)
def test_advantage_zero_gives_exactly_no_gradient(name: str) -> None:
    batch = make_batch([[0.3, -2.0], [0.1]], [0.0, -0.0])
    output, gradient = evaluate(name, batch)
    assert output.loss.item() == 0.0
    assert gradient.tolist() == [0.0] * 3
    assert output.clipped.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize(("delta", "advantage"), [(200.0, 1.0), (200.0, 0.0), (-200.0, -1.0), (-200.0, 1.0)])
def test_a_ratio_that_overflows_gives_no_nan(name: str, delta: float, advantage: float) -> None:
    """exp(200) is infinite in float32; where the clip acts its gradient is 0 all the same."""
    batch = make_batch([[delta, delta], [0.0]], [advantage, 1.0], dtype=torch.float32)
    output, gradient = evaluate(name, batch, clip_low=0.1, clip_high=0.1)
    first = {(200.0, 1.0): 1.1, (200.0, 0.0): 0.0, (-200.0, -1.0): -0.9, (-200.0, 1.0): 0.0}[delta, advantage]
    assert output.loss.item() == pytest.approx(-(first + 1) / 2)
    assert gradient.tolist() == [0.0, 0.0, -0.5]


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("log_ratio", [-10.0, 10.0])
def test_large_ratios_are_not_clamped(name: str, log_ratio: float) -> None:
    """A clamp on log-ratios would change s; only the band of the paper acts."""
    batch = make_batch([[log_ratio] * 3], [1.0 if log_ratio < 0 else -1.0])
    output, _ = evaluate(name, batch)
    assert abs(output.loss.item()) == pytest.approx(math.exp(log_ratio))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_ratios_are_finer_than_bfloat16(name: str) -> None:
    """bfloat16 cannot tell 1.0026 from 1: its spacing there, 2^-7, is wider than the clip band."""
    batch = make_batch([[2.0**-7, 0.0, 0.0]], [1.0], dtype=torch.bfloat16)
    output, gradient = evaluate(name, batch, **WIDE)
    expected = (math.exp(2**-7) + 2) / 3 if name == "grpo" else math.exp(2**-7 / 3)
    assert output.loss.dtype == output.ratio.dtype == torch.float32
    assert output.ratio.item() == pytest.approx(expected, abs=2e-7)
    assert gradient.dtype == torch.bfloat16


def test_the_value_of_the_gspo_token_ratio_is_the_sequences() -> None:
    """Large log-ratios inside a sequence must not round its ratio."""
    batch = make_batch([[30.0, -30.0 + 3e-4, 1e-4]], [1.0], dtype=torch.float32)
    whole, token = evaluate("gspo", batch)[0], evaluate("gspo_token", batch)[0]
    assert torch.equal(whole.ratio, token.ratio)
    assert float(abs(whole.loss - token.loss)) < 1e-7


@pytest.mark.parametrize("name", OBJECTIVES)
def test_outputs_are_detached_and_old_logprobs_get_no_gradient(name: str) -> None:
    batch = random_batch([3, 2])
    logprobs, old = batch.logprobs.clone().requires_grad_(), batch.old_logprobs.clone().requires_grad_()
    weights = {"token_advantages": batch.token_advantages} if name == "gspo_token" else {"advantages": batch.advantages}
    output = OBJECTIVES[name](
        logprobs,
        old_logprobs=old,
        completion_mask=batch.completion_mask,
        cu_seqlens=batch.cu_seqlens,
        **weights,
        **WIDE,
    )
    assert not any(t.requires_grad for t in (output.ratio, output.clipped, output.clipped_high, output.clipped_low))
    output.loss.backward()
    assert logprobs.grad is not None and old.grad is None


@pytest.mark.parametrize("name", OBJECTIVES)
def test_no_sequences_at_all(name: str) -> None:
    output, gradient = evaluate(name, random_batch([]))
    assert output.loss.item() == 0.0
    assert gradient.shape == output.ratio.shape == (0,)


def test_wrong_arguments_say_what_was_expected() -> None:
    batch = random_batch([3, 2])
    good: dict[str, Any] = {
        "old_logprobs": batch.old_logprobs,
        "completion_mask": batch.completion_mask,
        "advantages": batch.advantages,
        "cu_seqlens": batch.cu_seqlens,
    }
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"advantages": batch.token_advantages}, r"advantages must have shape \[2\].*found \[5\]"),
        ({"old_logprobs": batch.old_logprobs[:4]}, r"old_logprobs must have shape \[5\].*found \[4\]"),
        ({"completion_mask": batch.completion_mask.float()}, r"completion_mask must be bool"),
        ({"completion_mask": batch.completion_mask[None]}, r"completion_mask must have shape \[5\].*found \[1, 5\]"),
        ({"cu_seqlens": batch.cu_seqlens - 1}, r"cu_seqlens must .* begin at 0"),
        ({"clip_low": 0.9997, "clip_high": 1.0004, "num_sequences": -1}, r"num_sequences .* at least 0; found -1"),
        ({"clip_low": 1.0}, r"0 <= clip_low < 1"),
        ({"clip_high": -3e-4}, r"clip_high >= 0"),
    ]
    gspo(batch.logprobs, **good)
    for change, message in wrong:
        with pytest.raises(ValueError, match=message):
            gspo(batch.logprobs, **(good | change))
    del good["advantages"]
    with pytest.raises(ValueError, match=r"token_advantages must have shape \[5\].*found \[2\]"):
        gspo_token(batch.logprobs, **good, token_advantages=batch.advantages)
