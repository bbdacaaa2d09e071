"""Random inputs of the objectives, as sequences laid end to end, and one way to call any objective on them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gspo.algorithm.objectives import OBJECTIVES, ObjectiveOutput

WIDE = {"clip_low": 0.999999, "clip_high": 1e9}
"""A band nothing leaves: the objective without its clip."""


@dataclass(frozen=True)
class Batch:
    """What an objective takes. ``token_advantages`` [N] repeats ``advantages`` [S] unless it is set otherwise."""

    logprobs: Tensor
    old_logprobs: Tensor
    completion_mask: Tensor
    advantages: Tensor
    cu_seqlens: Tensor
    token_advantages: Tensor

    @property
    def lengths(self) -> list[int]:
        return self.cu_seqlens.diff().tolist()

    def sequences(self, rows: Sequence[int]) -> Batch:
        """The batch of these sequences, in this order."""
        bounds = self.cu_seqlens.tolist()
        places = torch.tensor([p for row in rows for p in range(bounds[row], bounds[row + 1])], dtype=torch.int64)
        return Batch(
            self.logprobs[places],
            self.old_logprobs[places],
            self.completion_mask[places],
            self.advantages[list(rows)],
            cumulative([self.lengths[row] for row in rows]),
            self.token_advantages[places],
        )


def cumulative(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def make_batch(
    delta: Sequence[Sequence[float]],
    advantages: Sequence[float],
    *,
    mask: Sequence[Sequence[int]] | None = None,
    dtype: torch.dtype = torch.float64,
) -> Batch:
    """By hand: log-ratios row by row; old log-probs are 0, so the log-probs are the log-ratios."""
    flat = torch.tensor([value for row in delta for value in row], dtype=dtype)
    keep = [bool(value) for row in mask for value in row] if mask else [True] * flat.shape[0]
    lengths = torch.tensor([len(row) for row in delta])
    weights = torch.tensor(advantages, dtype=dtype)
    return Batch(
        flat,
        torch.zeros_like(flat),
        torch.tensor(keep, dtype=torch.bool),
        weights,
        cumulative(lengths.tolist()),
        weights.repeat_interleave(lengths),
    )


def random_batch(
    lengths: Sequence[int], *, seed: int = 0, drift: float = 0.3, holes: float = 0.0, dtype: torch.dtype = torch.float64
) -> Batch:
    """Log-ratios of standard deviation ``drift``; a share ``holes`` of the tokens is masked."""
    generator = torch.Generator().manual_seed(seed)

    def normal(count: int) -> Tensor:
        return torch.randn(count, generator=generator, dtype=torch.float64)

    tokens = sum(lengths)
    old = -normal(tokens).abs() - 0.1
    delta, mask = drift * normal(tokens), torch.rand(tokens, generator=generator) >= holes
    advantages = normal(len(lengths)).to(dtype)
    spread = advantages.repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
    return Batch((old + delta).to(dtype), old.to(dtype), mask, advantages, cumulative(lengths), spread)


def evaluate(name: str, batch: Batch, **settings: Any) -> tuple[ObjectiveOutput, Tensor]:
    """The objective ``name`` (its loss detached) and the gradient of the loss with respect to the log-probs [N]."""
    logprobs = batch.logprobs.detach().clone().requires_grad_()
    token = name == "gspo_token"
    weights = {"token_advantages": batch.token_advantages} if token else {"advantages": batch.advantages}
    output = OBJECTIVES[name](
        logprobs,
        old_logprobs=batch.old_logprobs,
        completion_mask=batch.completion_mask,
        cu_seqlens=batch.cu_seqlens,
        **weights,
        **settings,
    )
    (gradient,) = torch.autograd.grad(output.loss, logprobs)
    return replace(output, loss=output.loss.detach()), gradient


def with_delta(batch: Batch, delta: Tensor) -> Batch:
    """The same old log-probs, other log-ratios."""
    return replace(batch, logprobs=batch.old_logprobs + delta)
