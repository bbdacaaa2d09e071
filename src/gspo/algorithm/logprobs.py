"""Hidden states x head -> log-probability and entropy of each token, without a [N, V] tensor.

The vocabulary is walked in tiles with a running log-sum-exp; the backward pass computes each tile's logits again and
writes that tile's weight gradient once. Tiles over tokens instead would add up the whole head's gradient once a tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gspo.algorithm.segments import accumulate_dtype


@dataclass(frozen=True)
class TokenLogprobs:
    """``logprobs`` [N] in nats, with gradient; ``entropy`` [N] in nats, detached, or None; float32, or float64."""

    logprobs: Tensor
    entropy: Tensor | None


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    vocab_chunk: int = 2048,
    entropy: bool = True,
) -> TokenLogprobs:
    """log softmax((hidden @ weight.T + bias) / temperature)[targets], tile by tile.

    Args:
        hidden: [N, D]; N may be 0. Row i is the state that predicts target i.
        weight: [V, D], the head. Products are made in its dtype, everything after them in float32 (or float64).
        targets: int64[N].
        temperature: above 0; the one the tokens were sampled at.
        bias: [V] or None.
        vocab_chunk: vocabulary rows a tile; the largest temporary is [N, vocab_chunk].

    Entropy is that of the tempered distribution. Raises ValueError for a temperature that is not above 0, a
    vocab_chunk below 1, shapes that disagree, or a target outside the vocabulary.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0 to score tokens, found {temperature}.")
    if vocab_chunk < 1:
        raise ValueError(f"vocab_chunk must be at least 1, found {vocab_chunk}.")
    if hidden.ndim != 2 or targets.shape != hidden.shape[:1] or weight.shape[1] != hidden.shape[1]:
        raise ValueError(
            f"hidden [N, D], weight [V, D] and targets [N] must agree, found {list(hidden.shape)}, "
            f"{list(weight.shape)} and {list(targets.shape)}."
        )
    if targets.numel() and not (int(targets.min()) >= 0 and int(targets.max()) < weight.shape[0]):
        raise ValueError(  # no tile would hold it, and its log-prob would be quietly wrong
            f"targets must lie in [0, {weight.shape[0]}), found {int(targets.min())} to {int(targets.max())}. Leave "
            "tokens that are not scored out instead of marking them."
        )
    logprobs, spread = _TiledLogprobs.apply(hidden, weight, targets, bias, temperature, vocab_chunk, entropy)
    return TokenLogprobs(logprobs, spread if entropy else None)


def plain_logprobs(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> TokenLogprobs:
    """The same from whole logits [N, V]: the oracle, and the fall-back for heads that are more than a product."""
    scaled = torch.log_softmax(logits.to(accumulate_dtype(logits)) / temperature, dim=-1)
    entropy = -(scaled.exp() * scaled).sum(-1).detach()
    return TokenLogprobs(scaled.gather(1, targets[:, None])[:, 0], entropy)


class _TiledLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        bias: Tensor | None,
        temperature: float,
        chunk: int,
        entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        dtype = accumulate_dtype(hidden)
        rows = torch.arange(targets.shape[0], device=targets.device)
        lowest = torch.finfo(dtype).min  # finite: a first tile whose bias is -inf throughout gives no inf - inf
        largest = torch.full(targets.shape, lowest, dtype=dtype, device=hidden.device)
        total, weighted, chosen = (torch.zeros_like(largest) for _ in range(3))
        for start in range(0, weight.shape[0], chunk):
            logits = _tile(hidden, weight, bias, start, chunk, temperature)
            here = (targets >= start) & (targets < start + chunk)
            picked = logits[rows, (targets - start).clamp(0, logits.shape[1] - 1)]
            chosen = torch.where(here, picked, chosen)
            maximum = torch.maximum(largest, logits.amax(-1))
            shrink = (largest - maximum).exp()
            logits.sub_(maximum[:, None])
            weights = logits.exp()
            tile_total = weights.sum(-1)
            if entropy:  # sum of p * (logit - maximum); the running part is moved to the new maximum
                moved = (weighted + total * (largest - maximum)) * shrink
                weighted = moved + torch.linalg.vecdot(weights, logits.clamp_(min=-1e30))
            total = total * shrink + tile_total
            largest = maximum
        normaliser = largest + total.log()
        ctx.save_for_backward(hidden, weight, targets, bias, normaliser)
        ctx.temperature, ctx.chunk = temperature, chunk
        spread = total.log() - weighted / total
        ctx.mark_non_differentiable(spread)
        return chosen - normaliser, spread

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        hidden, weight, targets, bias, normaliser = ctx.saved_tensors
        scaled = grads[0] / ctx.temperature
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[3]
        grad_hidden = torch.zeros(hidden.shape, dtype=normaliser.dtype, device=hidden.device) if need_hidden else None
        grad_weight = torch.empty_like(weight) if need_weight else None
        grad_bias = torch.empty_like(bias) if need_bias else None
        for start in range(0, weight.shape[0], ctx.chunk):
            logits = _tile(hidden, weight, bias, start, ctx.chunk, ctx.temperature)
            # d logprob / d logits = onehot(target) - softmax
            slope = logits.sub_(normaliser[:, None]).exp_().mul_(-scaled[:, None])
            inside = ((targets >= start) & (targets < start + slope.shape[1])).nonzero()[:, 0]
            slope[inside, targets[inside] - start] += scaled[inside]
            tile = slice(start, start + slope.shape[1])
            if grad_bias is not None:
                grad_bias[tile] = slope.sum(0)
            slope = slope.to(weight.dtype)
            if grad_hidden is not None:
                grad_hidden += slope @ weight[tile]
            if grad_weight is not None:
                torch.mm(slope.T, hidden, out=grad_weight[tile])
        return (
            None if grad_hidden is None else grad_hidden.to(hidden.dtype),
            grad_weight, None, grad_bias, None, None, None,
        )  # fmt: skip


def _tile(hidden: Tensor, weight: Tensor, bias: Tensor | None, start: int, chunk: int, temperature: float) -> Tensor:
    """Tempered logits [N, <= chunk] of one vocabulary tile, in the accumulation dtype.

    On the CPU a bfloat16 product comes back rounded to bfloat16: there is no product with float32 output there.
    """
    tile = slice(start, start + chunk)
    logits = torch.nn.functional.linear(hidden, weight[tile], None if bias is None else bias[tile])
    logits = logits.to(accumulate_dtype(hidden))
    return logits.div_(temperature) if temperature != 1.0 else logits
