"""What is measured and penalised about experts: pure functions on what the routers of a pass chose.

``experts``: whole numbers [N, layers, K], the K experts of each of N positions in each layer. Their order is the
router's and means nothing here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from gspo.algorithm.segments import accumulate_dtype


def expert_change(now: Tensor, before: Tensor) -> Tensor:
    """1 - |now and before| / K for each position and layer: f32[N, layers], 0 unchanged, 1 disjoint.

    Section 5.3 of the GSPO paper (arXiv 2507.18071) reports its mean. Raises ValueError for shapes that differ.
    """
    if now.shape != before.shape:
        raise ValueError(f"experts must have equal shapes, found {list(now.shape)} and {list(before.shape)}.")
    kept = (now[..., :, None] == before[..., None, :].to(now.device)).any(-1)
    return 1 - kept.float().mean(-1)


def expert_counts(experts: Tensor, num_experts: int) -> Tensor:
    """How often each expert was chosen, by layer: f32[layers, E]; sums to N * K in each layer."""
    layers = experts.shape[1]
    chosen = experts.long() + num_experts * torch.arange(layers, device=experts.device)[:, None]
    return torch.bincount(chosen.flatten(), minlength=layers * num_experts).view(layers, num_experts).float()


def router_balance_loss(router_logits: Sequence[Tensor], counts: Tensor, num_positions: int) -> Tensor:
    """Load-balancing loss of Switch Transformers (arXiv 2101.03961, equations 4 to 6), mean over the layers.

    E * sum over experts of f_e * P_e, where f_e = counts_e / num_positions is how often an expert was chosen and P_e is
    the mean of its probability; K when the load is even.

    Args:
        router_logits: for each layer [n, E], of the n positions of one pass; with gradient.
        counts: f32[layers, E] and num_positions: of the whole update, whose passes' losses add up to the update's.
    """
    probabilities = [F.softmax(logits, dim=-1, dtype=accumulate_dtype(logits)).sum(0) for logits in router_logits]
    summed = torch.stack(probabilities) / max(num_positions, 1)
    share = (counts / max(num_positions, 1)).to(summed)
    return counts.shape[1] * (share * summed).sum(-1).mean()
