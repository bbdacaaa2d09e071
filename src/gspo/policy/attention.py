"""Attention over packed groups: a completion attends to its group's prompt and to itself.

Swapped in through transformers' attention registry, so any architecture that uses the registry works unchanged. The
model is called with a ``gspo_context`` keyword that reaches the attention function of every layer; the context says
who attends to whom. The registered mask function returns no mask: causality is the context's business.

On the CPU attention runs block by block: completions of one group and of similar length, behind their prompt's keys. A
block's mask is [L, P + L], shared by its rows; there is no [T, T] mask and no padding to the longest row of the pass.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, AttentionMaskInterface

from gspo.algorithm.batch import Block, Layout
from gspo.errors import GspoError

NAME = "gspo"

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class UnsupportedAttention(GspoError, NotImplementedError):
    """The model's attention has a part that packed attention does not know (soft capping, sinks, a window)."""


class AttentionContext(Protocol):
    """Decides who attends to whom in one model call."""

    longest: int
    """Most tokens that any token attends to; compared with sliding windows."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """query [B, H, T, D], key and value [B, H_kv, T, D] of the tokens in this call -> [B, T, H, D]."""
        ...


def _attention_function(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    gspo_context: AttentionContext | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    if gspo_context is None:
        raise UnsupportedAttention(f"{type(module).__name__} does not hand keyword arguments to its attention.")
    if sliding_window is not None and gspo_context.longest > sliding_window:
        raise UnsupportedAttention(
            f"{type(module).__name__} has a sliding window of {sliding_window} tokens and rows are up to "
            f"{gspo_context.longest} long."
        )
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise UnsupportedAttention(f"{type(module).__name__} uses '{name}' in its attention.")
    if value.shape[-1] != query.shape[-1]:
        raise UnsupportedAttention(f"{type(module).__name__} has values of another width than its queries.")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return gspo_context.attend(module.layer_idx, query, key, value, scale), None


AttentionInterface.register(NAME, _attention_function)
AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)


class PackedAttention:
    """Training and scoring: one row of packed groups, with gradient."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.longest = max(
            (
                group.prompt[1] - group.prompt[0] + max((stop - start for start, stop in group.completions), default=0)
                for group in layout.groups
            ),
            default=0,
        )

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        return grouped_attention(query[0], key[0], value[0], self.layout, scale)[None]


def grouped_attention(query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float) -> Tensor:
    """query [H, T, D], key and value [H_kv, T, D] -> [T, H, D]; H must be a multiple of H_kv."""
    if query.device.type != "cpu":
        return _flex_attention(query, key, value, layout, scale)
    return _GroupedAttention.apply(query, key, value, layout, scale)


class _GroupedAttention(torch.autograd.Function):
    """Computed in float32: besides being exact, the CPU's kernels are up to four times faster in it at the lengths of
    answers, the backward most of all. What is kept for the backward pass stays in the model's precision."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float) -> Tensor:
        q, k, v = _widened(query, key, value)
        out = q.new_empty(q.shape[1], q.shape[0], v.shape[2])
        lse = q.new_empty(q.shape[1], q.shape[0])
        for block in layout.blocks:
            inputs = (_rows(q, block), _behind_prompt(k, block), _behind_prompt(v, block))
            mask = block.mask.to(q.dtype)
            found, found_lse = _forward(*inputs, 0.0, False, attn_mask=mask, scale=scale)
            _put(out, block, found.transpose(1, 2))
            _put(lse, block, found_lse.transpose(1, 2))
        result = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, result, lse)
        ctx.layout, ctx.scale = layout, scale
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        query, key, value, out, lse = ctx.saved_tensors
        q, k, v, o, g = _widened(query, key, value, out.transpose(0, 1), grads[0].transpose(0, 1))
        # laid out [T, H, D] like the projections, so that these gradients flow on without a copy
        dq, dk, dv = (torch.empty_like(x.transpose(0, 1)) for x in (q, k, v))
        for block in ctx.layout.blocks:  # prompts come before the completions that add to their gradient
            slope, own_lse = _rows(g, block), _rows(lse.T[..., None], block)[..., 0]
            if not block.is_slice:  # padding: no gradient comes in, and +inf makes every probability exactly 0
                slope = slope.masked_fill(~block.valid[:, None, :, None], 0)
                own_lse = own_lse.masked_fill(~block.valid[:, None], torch.inf)
            inputs = (_rows(q, block), _behind_prompt(k, block), _behind_prompt(v, block), _rows(o, block))
            mask = block.mask.to(q.dtype)
            found = _backward(slope, *inputs, own_lse, 0.0, False, attn_mask=mask, scale=ctx.scale)
            prompt, width = slice(*block.prompt), block.prompt[1] - block.prompt[0]
            _put(dq, block, found[0].transpose(1, 2))
            for total, part in ((dk, found[1]), (dv, found[2])):
                total[prompt] += part[:, :, :width].sum(0).transpose(0, 1)
                _put(total, block, part[:, :, width:].transpose(1, 2))
        gradients = zip((dq, dk, dv), (query, key, value), strict=True)
        return (*(gradient.transpose(0, 1).to(x.dtype) for gradient, x in gradients), None, None)


def _widened(*tensors: Tensor) -> list[Tensor]:
    """In float32; float64 stays."""
    return [x if x.dtype == torch.float64 else x.float() for x in tensors]


def _rows(x: Tensor, block: Block) -> Tensor:
    """[H, T, D] -> [s, H, L, D]: the block's rows; a view where they lie end to end."""
    if block.is_slice:
        start = int(block.index[0, 0])
        return x[:, start : start + block.index.numel()].unflatten(1, block.index.shape).transpose(0, 1)
    return x.transpose(0, 1)[block.index].transpose(1, 2)


def _behind_prompt(x: Tensor, block: Block) -> Tensor:
    """[H, T, D] -> [s, H, P + L, D]: the rows, each behind the block's prompt."""
    rows = _rows(x, block)
    prompt = x[:, slice(*block.prompt)]
    return torch.cat([prompt.expand(rows.shape[0], *prompt.shape), rows], dim=2)


def _put(target: Tensor, block: Block, rows: Tensor) -> None:
    """Write [s, L, ...] rows to their places in ``target`` [T, ...]; padding is dropped."""
    if block.is_slice:
        start = int(block.index[0, 0])
        target[start : start + block.index.numel()] = rows.flatten(0, 1)
    else:
        target[block.index[block.valid]] = rows[block.valid]


def _flex_attention(query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float) -> Tensor:
    """The same on CUDA, as a FlexAttention block mask. Written from the documentation; not yet measured."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    num_tokens, device = query.shape[1], query.device
    group_of = torch.empty(num_tokens, dtype=torch.int32, device=device)
    sequence_of = torch.full((num_tokens,), -1, dtype=torch.int32, device=device)
    sequence = 0
    for number, group in enumerate(layout.groups):
        end = group.completions[-1][1] if group.completions else group.prompt[1]
        group_of[group.prompt[0] : end] = number
        for start, stop in group.completions:
            sequence_of[start:stop] = sequence
            sequence += 1

    def visible(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        same = (group_of[q] == group_of[k]) & (k <= q)
        return same & ((sequence_of[k] < 0) | (sequence_of[k] == sequence_of[q]))

    mask = create_block_mask(visible, None, None, num_tokens, num_tokens, device=device)
    compiled = torch.compile(flex_attention, dynamic=True)
    out = compiled(query[None], key[None], value[None], block_mask=mask, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


def decode_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """One new token for each row: query [B, H, 1, D], key and value [B, H_kv, L, D], additive mask f32[B, 1, 1, L].

    Returns [B, 1, H, D]. Query heads that share a key head are handled as several queries of that head, so the cache is
    read once. Two plain products: the fused kernels are made for long queries and take twice as long for one.
    """
    rows, heads, _, width = query.shape
    shared = query.view(rows, key.shape[1], heads // key.shape[1], width)
    scores = torch.matmul(shared * scale, key.transpose(-1, -2)).to(mask.dtype)
    weights = scores.add_(mask).softmax(-1).to(value.dtype)
    return torch.matmul(weights, value).reshape(rows, 1, heads, width)
