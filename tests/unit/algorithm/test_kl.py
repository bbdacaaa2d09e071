"""The divergence estimators on an exact categorical: expectations are sums, no sampling."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gspo.algorithm.kl import k1, k2, k3, kl_penalty
from tests.batches import cumulative

GENERATOR = torch.Generator().manual_seed(0)
LOGITS, REFERENCE, SAMPLER = (torch.randn(5, generator=GENERATOR, dtype=torch.float64) for _ in range(3))


def slope(value: Callable[[Tensor], Tensor]) -> Tensor:
    """Gradient with respect to the policy's logits; ``value`` gets the policy's log-probs."""
    logits = LOGITS.clone().requires_grad_()
    return torch.autograd.grad(value(logits.log_softmax(0)), logits)[0]


def forward_kl(new: Tensor) -> Tensor:
    ref = REFERENCE.log_softmax(0)
    return (ref.exp() * (ref - new)).sum()


def reverse_kl(new: Tensor) -> Tensor:
    return (new.exp() * (new - REFERENCE.log_softmax(0))).sum()


def test_values_of_the_estimators() -> None:
    new, ref = LOGITS.log_softmax(0), REFERENCE.log_softmax(0)
    expected = reverse_kl(new)
    for unbiased in (k1, k3):
        torch.testing.assert_close((new.exp() * unbiased(new, ref)).sum(), expected)
    assert abs(float((new.exp() * k2(new, ref)).sum() - expected)) > 1e-2
    assert bool((k2(new, ref) >= 0).all()) and bool((k3(new, ref) >= 0).all())


def test_gradients_of_the_estimators_as_losses() -> None:
    ref, frozen = REFERENCE.log_softmax(0), LOGITS.softmax(0)
    assert float(slope(lambda new: (frozen * k1(new, ref)).sum()).abs().max()) < 1e-12
    torch.testing.assert_close(slope(lambda new: (frozen * k2(new, ref)).sum()), slope(reverse_kl))
    torch.testing.assert_close(slope(lambda new: (frozen * k3(new, ref)).sum()), slope(forward_kl))
    assert float((slope(forward_kl) - slope(reverse_kl)).abs().max()) > 1e-2


def test_the_penalty_has_the_reverse_gradient_off_policy() -> None:
    """Tokens drawn from another policy: every token once, weighted by that policy's probability."""
    ref, old = REFERENCE.log_softmax(0), SAMPLER.log_softmax(0)

    def expectation(new: Tensor) -> Tensor:
        penalties = [
            kl_penalty(
                new[[token]],
                ref_logprobs=ref[[token]],
                old_logprobs=old[[token]],
                completion_mask=torch.tensor([True]),
                cu_seqlens=cumulative([1]),
            )
            for token in range(5)
        ]
        return (old.exp() * torch.stack(penalties)).sum()

    torch.testing.assert_close(slope(expectation), slope(reverse_kl))
    torch.testing.assert_close(expectation(LOGITS.log_softmax(0)), reverse_kl(LOGITS.log_softmax(0)))


@pytest.mark.parametrize("count", [None, 2, 8])
def test_the_penalty_is_a_mean_over_tokens_then_over_sequences(count: int | None) -> None:
    """Equal ratio and distance within a sequence; one masked token and one sequence without any other."""
    new = torch.tensor([0.0, 0.0, 0.0, torch.nan, torch.nan], requires_grad=True)
    old = torch.tensor([-0.2, -0.2, 0.1, torch.inf, torch.nan])
    ref = torch.tensor([-0.5, -0.5, 0.3, torch.nan, torch.nan])
    mask = torch.tensor([True, True, True, False, False])
    penalty = kl_penalty(
        new,
        ref_logprobs=ref,
        old_logprobs=old,
        completion_mask=mask,
        cu_seqlens=cumulative([2, 2, 1]),
        num_sequences=count,
    )
    d = torch.tensor([0.5, -0.3])
    weights = torch.tensor([0.2, -0.1]).exp()
    by_sequence = weights * ((-d).exp() - 1 + d)
    torch.testing.assert_close(penalty, by_sequence.sum() / (count or 2))
    penalty.backward()
    expected = weights * d / (count or 2)
    torch.testing.assert_close(
        new.grad, torch.stack([expected[0] / 2, expected[0] / 2, expected[1], d[0] * 0, d[0] * 0])
    )
