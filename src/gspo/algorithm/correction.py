"""Weights against the mismatch between the engine that sampled and the trainer: functions of rho = pi_old / mu.

mu are the engine's own likelihoods (``rollout_logprobs``), pi_old the trainer's of the same weights. The factor stays
apart from the importance ratio: that is clipped, this one is truncated or masked, and it is always detached. Truncation
is TIS (Yao et al. 2025), token masking IcePop (arXiv 2510.18855, equations 1 to 3). For the sequence forms rho is the
geometric mean over the tokens, like GSPO's own ratio, so that they do not depend on the length.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gspo.algorithm.segments import accumulate_dtype, segment_mean

LOG_LIMIT = 20.0
"""|log rho| is cut here before exp, so that one broken token gives no infinity."""


@dataclass(frozen=True)
class Correction:
    """``weights``: detached factors in [0, cap], [N] when ``per_token``, else [S].

    ``rho``: the same before truncation or masking. ``acted`` bool: where it was truncated or masked.
    """

    weights: Tensor
    rho: Tensor
    acted: Tensor
    per_token: bool


def mismatch_correction(
    old_logprobs: Tensor,
    *,
    rollout_logprobs: Tensor,
    completion_mask: Tensor,
    cu_seqlens: Tensor,
    kind: str,
    cap: float = 2.0,
) -> Correction:
    """Factors for the terms of an objective.

    Args:
        old_logprobs: [N] nats, the trainer's, of the weights that sampled.
        rollout_logprobs: [N] nats, the engine's; a token without one (NaN) counts as rho = 1.
        completion_mask: bool[N]; masked tokens have rho 1 and count in no mean.
        cu_seqlens: int[S+1].
        kind: 'truncate_token' or 'truncate_sequence': min(rho, cap). 'mask_token' or 'mask_sequence': 0 where rho is
            outside [1/cap, cap], else 1.
        cap: above 1.

    Raises ValueError for another kind or cap.
    """
    action, _, unit = kind.partition("_")
    if action not in ("truncate", "mask") or unit not in ("token", "sequence"):
        raise ValueError(f"kind must be truncate_ or mask_ with token or sequence, found {kind!r}.")
    if not cap > 1:
        raise ValueError(f"cap must be above 1, the weight of an exact match, found {cap}.")
    old, rollout = (x.detach().to(accumulate_dtype(old_logprobs)) for x in (old_logprobs, rollout_logprobs))
    log_rho = torch.where(completion_mask & rollout.isfinite(), old - rollout, 0.0)
    if unit == "sequence":
        log_rho = segment_mean(log_rho, completion_mask, cu_seqlens)
    rho = log_rho.clamp(-LOG_LIMIT, LOG_LIMIT).exp()
    if action == "truncate":
        return Correction(rho.clamp(max=cap), rho, rho > cap, unit == "token")
    outside = (rho > cap) | (rho < 1 / cap)
    return Correction((~outside).to(rho.dtype), rho, outside, unit == "token")
