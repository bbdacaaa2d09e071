"""Drawing tokens from logits in one pass, with their log-probabilities."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK = 128
"""Entries summed into one block of the two-level search."""


def sample_tokens(logits: Tensor, uniforms: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Inverse-CDF sampling from logits [B, V] and uniforms [B] in [0, 1): (token ids int64 [B], log-probs f32 [B]).

    Two levels, block sums and then inside the chosen block, because a running sum over a whole vocabulary costs more
    than the rest of the step and loses precision. Temperature 0 takes the largest logit, and its log-probability is
    that of the untempered distribution.
    """
    largest = logits.amax(-1, keepdim=True).float()
    weights = logits - largest  # one large tensor in float32, then in place: fresh memory costs more than arithmetic
    scale = 1.0 if temperature == 0 else temperature
    if scale != 1.0:
        weights.div_(scale)
    weights.exp_()
    padding = -weights.shape[1] % BLOCK
    if padding:
        weights = F.pad(weights, (0, padding))
    blocks = weights.view(weights.shape[0], -1, BLOCK)
    cumulative = blocks.sum(-1).cumsum(-1)
    total = cumulative[:, -1]
    chosen = logits.argmax(-1) if temperature == 0 else _search(blocks, cumulative, uniforms.to(total.dtype) * total)
    picked = logits.gather(1, chosen[:, None])[:, 0].float()
    return chosen, (picked - largest[:, 0]) / scale - total.log()


def _search(blocks: Tensor, cumulative: Tensor, target: Tensor) -> Tensor:
    """First entry whose cumulative weight exceeds the target; rounding never picks an entry of weight 0."""
    rows = torch.arange(blocks.shape[0], device=blocks.device)
    # a target rounded up to the total would run past the end: the last block with any weight is where it belongs
    last_block = (cumulative < cumulative[:, -1:]).sum(-1)
    block = torch.minimum((cumulative <= target[:, None]).sum(-1), last_block)
    before = torch.where(block > 0, cumulative[rows, (block - 1).clamp(min=0)], 0.0)
    inside = blocks[rows, block]
    running = inside.cumsum(-1)
    last_entry = (running < running[:, -1:]).sum(-1)
    entry = torch.minimum((running <= (target - before)[:, None]).sum(-1), last_entry)
    return block * BLOCK + entry
