"""The objectives of the GSPO paper (arXiv 2507.18071, version 2): equations (5), (13) and (2).

All take the packed layout: S sequences laid end to end in N tokens. All return a loss to minimise that is already
divided by the sequences of the *whole* update, so losses of micro-batches add up to the update's: a mean of
micro-batch means would weigh sequences by the company they keep.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gspo.algorithm.segments import accumulate_dtype, segment_counts, segment_ids, segment_mean


@dataclass(frozen=True)
class ObjectiveOutput:
    """``loss``: scalar to minimise, -(sum of the pack's sequence objectives) / num_sequences.

    The rest is detached, f32[S]. ``ratio``: the sequence's importance ratio (mean token ratio for ``grpo``).
    ``clipped``: 1 where the clip acts and the gradient is zero (fraction of such tokens for token objectives), split
    into ``clipped_high`` (advantage > 0, ratio above the band) and ``clipped_low`` (advantage < 0, ratio below it).
    Sequences without an unmasked token have ratio 1 and clipped 0.
    """

    loss: Tensor
    ratio: Tensor
    clipped: Tensor
    clipped_high: Tensor
    clipped_low: Tensor


def gspo(
    logprobs: Tensor,
    *,
    old_logprobs: Tensor,
    completion_mask: Tensor,
    advantages: Tensor,
    cu_seqlens: Tensor,
    num_sequences: int | None = None,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> ObjectiveOutput:
    """GSPO, equation (5) with the sequence ratio of equation (7)::

        J = mean_i min(s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i)
        s_i = exp(1/|y_i| sum_t [log pi_theta(y_it) - log pi_old(y_it)])

    Its gradient is equation (10): every token of a response carries the same weight s_i A_i / |y_i|.

    Args:
        logprobs: [N] log pi_theta in nats, with gradient; float64 stays float64, all else is float32.
        old_logprobs: [N] the same under the weights that sampled.
        completion_mask: bool[N], True where the policy sampled; |y_i| counts these.
        advantages: [S].
        cu_seqlens: int[S+1], cumulative sequence lengths.
        num_sequences: sequences with an unmasked token in the whole update, over all micro-batches and ranks. None:
            this pack's own count.
        clip_low, clip_high: the band, 0 <= clip_low < 1. Defaults are the paper's (section 5.1).

    Raises ValueError for shapes that disagree or a band out of range.
    """
    _check(logprobs, old_logprobs, completion_mask, cu_seqlens, advantages, per_token=False)
    log_ratio = segment_mean(_log_ratio(logprobs, old_logprobs, completion_mask), completion_mask, cu_seqlens)
    objective, ratio, high, low = _pessimistic(log_ratio, advantages, clip_low, clip_high)
    return _output(objective, ratio, high, low, completion_mask, cu_seqlens, num_sequences)


def gspo_token(
    logprobs: Tensor,
    *,
    old_logprobs: Tensor,
    completion_mask: Tensor,
    token_advantages: Tensor,
    cu_seqlens: Tensor,
    num_sequences: int | None = None,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> ObjectiveOutput:
    """GSPO-token, equation (13) with the ratio of equation (14)::

        J = mean_i 1/|y_i| sum_t min(s_it A_it, clip(s_it, 1 - clip_low, 1 + clip_high) A_it)
        s_it = sg[s_i] pi_theta(y_it) / sg[pi_theta(y_it)]

    Numerically s_it = s_i, but the gradient stays with its token (equation 17), so advantages may differ within a
    response. With equal advantages value and gradient are those of ``gspo``.

    Args: as ``gspo``, with ``token_advantages`` [N] for ``advantages``; same errors.
    """
    _check(logprobs, old_logprobs, completion_mask, cu_seqlens, token_advantages, per_token=True)
    delta = _log_ratio(logprobs, old_logprobs, completion_mask)
    sequence = segment_mean(delta.detach(), completion_mask, cu_seqlens)[segment_ids(cu_seqlens, delta.shape[0])]
    log_ratio = sequence + (delta - delta.detach())  # the bracket is exactly 0: the value is the sequence's, unrounded
    return _token_output(log_ratio, token_advantages, completion_mask, cu_seqlens, num_sequences, clip_low, clip_high)


def grpo(
    logprobs: Tensor,
    *,
    old_logprobs: Tensor,
    completion_mask: Tensor,
    advantages: Tensor,
    cu_seqlens: Tensor,
    num_sequences: int | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.27,
    token_weights: Tensor | None = None,
) -> ObjectiveOutput:
    """GRPO, the baseline: equation (2) with the token ratio of equation (3)::

        J = mean_i 1/|y_i| sum_t min(w_it A_i, clip(w_it, 1 - clip_low, 1 + clip_high) A_i)
        w_it = pi_theta(y_it) / pi_old(y_it)

    Args: as ``gspo``; the default band is the one the paper tuned for GRPO. ``token_weights`` [N], at least 0 and
        detached, multiply the tokens' terms (a correction for engine mismatch). Same errors.
    """
    _check(logprobs, old_logprobs, completion_mask, cu_seqlens, advantages, per_token=False)
    log_ratio = _log_ratio(logprobs, old_logprobs, completion_mask)
    by_token = advantages[segment_ids(cu_seqlens, log_ratio.shape[0])]
    if token_weights is not None:  # min(r A, clip(r) A) c = min(r cA, clip(r) cA) for c >= 0
        by_token = by_token * token_weights.detach()
    return _token_output(log_ratio, by_token, completion_mask, cu_seqlens, num_sequences, clip_low, clip_high)


OBJECTIVES: Mapping[str, Callable[..., ObjectiveOutput]] = {"gspo": gspo, "gspo_token": gspo_token, "grpo": grpo}
"""Objectives by their name in the config."""


def _log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """[N] log pi_theta - log pi_old, exactly 0 where masked."""
    dtype = accumulate_dtype(logprobs)
    return torch.where(mask, logprobs.to(dtype) - old_logprobs.detach().to(dtype), 0.0)


def _pessimistic(
    log_ratio: Tensor, advantages: Tensor, low: float, high: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """min(r A, clip(r, 1 - low, 1 + high) A), the ratio r (detached), and where the clip acts above and below the band.

    Taken by cases, so that a ratio that overflows gives no 0 * inf: where the clip acts, or the advantage is 0, the
    gradient is exactly 0.
    """
    if not (0 <= low < 1 and high >= 0):
        raise ValueError(
            f"The band is [1 - clip_low, 1 + clip_high] with 0 <= clip_low < 1 and clip_high >= 0; found clip_low={low}"
            f" and clip_high={high}. Give distances from 1 such as 3e-4, not bounds such as 0.9997."
        )
    advantages = advantages.to(log_ratio.dtype)
    ratio = log_ratio.detach().exp()
    above = (advantages > 0) & (ratio > 1 + high)
    below = (advantages < 0) & (ratio < 1 - low)
    constant = above | below | (advantages == 0)
    free = torch.where(constant, 0.0, log_ratio).exp() * advantages
    objective = torch.where(constant, ratio.clamp(1 - low, 1 + high) * advantages, free)
    return objective, ratio, above, below


def _token_output(
    log_ratio: Tensor,
    token_advantages: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    num_sequences: int | None,
    low: float,
    high: float,
) -> ObjectiveOutput:
    by_token, ratio, above, below = _pessimistic(log_ratio, token_advantages, low, high)
    objective, mean_ratio, high_share, low_share = (
        segment_mean(values, mask, cu_seqlens) for values in (by_token, ratio, above.float(), below.float())
    )
    return _output(objective, mean_ratio, high_share, low_share, mask, cu_seqlens, num_sequences)


def _output(
    objective: Tensor,
    ratio: Tensor,
    high: Tensor,
    low: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    num_sequences: int | None,
) -> ObjectiveOutput:
    """Sequences without an unmasked token count in neither numerator nor denominator."""
    if num_sequences is not None and num_sequences < 0:
        raise ValueError(f"num_sequences counts sequences of the whole update, so at least 0; found {num_sequences}.")
    present = segment_counts(mask, cu_seqlens) > 0
    total = torch.where(present, objective, 0.0).sum()
    count = int(present.sum()) if num_sequences is None else num_sequences
    ratio = torch.where(present, ratio, 1.0).to(torch.float32)
    high, low = ((present * share).to(torch.float32) for share in (high, low))
    return ObjectiveOutput(-total / max(count, 1), ratio, high + low, high, low)


def _check(
    logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, cu_seqlens: Tensor, advantages: Tensor, *, per_token: bool
) -> None:
    num_tokens, num_sequences = logprobs.shape[0], cu_seqlens.shape[0] - 1
    expected: dict[str, tuple[Any, int]] = {
        "logprobs": (logprobs, num_tokens),
        "old_logprobs": (old_logprobs, num_tokens),
        "completion_mask": (mask, num_tokens),
        ("token_advantages" if per_token else "advantages"): (advantages, num_tokens if per_token else num_sequences),
    }
    for name, (tensor, length) in expected.items():
        if tensor.ndim != 1 or tensor.shape[0] != length:
            raise ValueError(
                f"{name} must have shape [{length}] ({num_tokens} tokens in {num_sequences} sequences laid end to end),"
                f" found {list(tensor.shape)}. Padded [B, T] tensors must be packed first."
            )
    if mask.dtype != torch.bool:
        raise ValueError(f"completion_mask must be bool (True = sampled by the policy), found {mask.dtype}.")
