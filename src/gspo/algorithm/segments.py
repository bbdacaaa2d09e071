"""Sums and means over sequences laid end to end.

Everything reduces in float32 (float64 stays float64): bfloat16 sums lose the third digit. Masked places are selected
away before anything else, never multiplied by zero, so NaN or infinity under a mask reaches neither value nor gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor


def segment_ids(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """int64[N]: which sequence each token belongs to.

    ``cu_seqlens`` int[S+1] holds the cumulative lengths, from 0 to ``num_tokens``; a sequence may be empty. Raises
    ValueError when it does not begin at 0 and end at ``num_tokens``.
    """
    ends = cu_seqlens[[0, -1]].tolist() if cu_seqlens.ndim == 1 and cu_seqlens.shape[0] else []
    if ends != [0, num_tokens]:
        raise ValueError(
            f"cu_seqlens must be 1-D, begin at 0 and end at the number of tokens, {num_tokens}; found shape "
            f"{list(cu_seqlens.shape)} with ends {ends}. Give cumulative lengths with the leading 0."
        )
    lengths = cu_seqlens.diff()
    return torch.repeat_interleave(torch.arange(lengths.shape[0], device=lengths.device), lengths.long())


def accumulate_dtype(values: Tensor) -> torch.dtype:
    """float64 for float64, float32 for everything else."""
    return torch.float64 if values.dtype == torch.float64 else torch.float32


def segment_sum(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[N] -> [S]: the sum over each sequence; 0 for an empty one."""
    dtype = accumulate_dtype(values)
    zeros = torch.zeros(cu_seqlens.shape[0] - 1, dtype=dtype, device=values.device)
    return zeros.index_add(0, segment_ids(cu_seqlens, values.shape[0]), values.to(dtype))


def segment_counts(mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """bool[N] -> f32[S]: unmasked tokens of each sequence."""
    return segment_sum(mask.to(torch.float32), cu_seqlens)


def segment_mean(values: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[N] -> [S]: the mean over each sequence's unmasked tokens; 0 for one that has none: ask ``segment_counts``."""
    kept = torch.where(mask, values, torch.zeros_like(values))
    counts = segment_counts(mask, cu_seqlens).to(accumulate_dtype(values))
    return segment_sum(kept, cu_seqlens) / counts.clamp(min=1)
