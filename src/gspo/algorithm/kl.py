"""Estimators of the divergence from a reference policy, and what gradient each gives when used as a loss.

For a token sampled from pi_theta, with d = log pi_theta - log pi_ref:

    ==========  =======================  ===========================  =================================
    estimator   value                    gradient as a loss           as a loss it moves towards
    ==========  =======================  ===========================  =================================
    k1          d                        0 in expectation             nothing: useless
    k2          d^2 / 2                  that of KL(theta || ref)     the reference, rightly
    k3          exp(-d) + d - 1          that of KL(ref || theta)     the reference, the other divergence
    ==========  =======================  ===========================  =================================

``kl_penalty`` is the importance-weighted k3, whose gradient is that of KL(theta || ref) off-policy as well.
Sources: Schulman, "Approximating KL divergence" (2020); arXiv 2512.21852; arXiv 2512.02556 (DeepSeek-V3.2).
"""

from __future__ import annotations

import torch
from torch import Tensor

from gspo.algorithm.segments import accumulate_dtype, segment_counts, segment_mean


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """[N] nats: unbiased, of either sign."""
    return logprobs - ref_logprobs


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """[N] nats: biased, never negative."""
    return (logprobs - ref_logprobs) ** 2 / 2


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """[N] nats: unbiased, never negative."""
    change = ref_logprobs - logprobs
    return torch.expm1(change) - change


def kl_penalty(
    logprobs: Tensor,
    *,
    ref_logprobs: Tensor,
    old_logprobs: Tensor,
    completion_mask: Tensor,
    cu_seqlens: Tensor,
    num_sequences: int | None = None,
) -> Tensor:
    """Scalar in nats to add to the loss: mean over sequences of the mean over their tokens of w_it k3_it.

    w_it = pi_theta / pi_old *per token*, differentiated: the gradient is then w_it (log pi_theta - log pi_ref) for each
    token, that of the reverse divergence. The ratio must be the token's own also under a sequence-level objective
    (trl#6586): with the sequence ratio the penalty gets a term that belongs to other tokens.

    Shapes and ``num_sequences`` as in ``gspo.algorithm.objectives``; everything in nats.
    """
    dtype = accumulate_dtype(logprobs)
    new, ref, old = (
        torch.where(completion_mask, values.to(dtype), 0.0)
        for values in (logprobs, ref_logprobs.detach(), old_logprobs.detach())
    )
    by_sequence = segment_mean((new - old).exp() * k3(new, ref), completion_mask, cu_seqlens)
    if num_sequences is None:
        num_sequences = int((segment_counts(completion_mask, cu_seqlens) > 0).sum())
    return by_sequence.sum() / max(num_sequences, 1)
