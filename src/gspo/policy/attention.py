"""Attention over packed groups: a completion attends to its group's prompt and to itself.

Swapped in through transformers' attention registry, so any architecture that uses the registry works unchanged. The
model is called with a ``gspo_context`` keyword that reaches the attention function of every layer; the context says
who attends to whom. The registered mask function returns no mask: causality is the context's business.

On the CPU the two parts of a completion's attention (its prompt, itself) are computed separately and merged by
their log-sum-exp, so there is no mask, no copy of the prompt's keys for each completion, and no padding beyond the
buckets of similar lengths. The backward pass gives each part the merged output and log-sum-exp, from which the
flash kernel recovers exactly the merged softmax.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, AttentionMaskInterface

from gspo.algorithm.batch import Layout
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
        for prompt, completions in _regions(layout):
            for part, causal in ((prompt, True), (completions, False)):
                if part.stop > part.start:
                    found, found_lse = _forward(
                        q[None, :, part], k[None, :, prompt], v[None, :, prompt], 0.0, causal, scale=scale
                    )
                    out[part], lse[part] = found[0].transpose(0, 1), found_lse[0].T
        for bucket in layout.buckets:
            own, own_lse = _forward(*(_gather(x, bucket.index) for x in (q, k, v)), 0.0, True, scale=scale)
            index = bucket.index[bucket.valid]
            own, own_lse = own.transpose(1, 2)[bucket.valid], own_lse.transpose(1, 2)[bucket.valid]
            prompt_lse = lse[index]
            merged = torch.logaddexp(prompt_lse, own_lse)
            mixed = out[index] * (prompt_lse - merged).exp()[..., None]
            out[index] = mixed.addcmul_(own, (own_lse - merged).exp()[..., None])
            lse[index] = merged
        result = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, result, lse)
        ctx.layout, ctx.scale = layout, scale
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        query, key, value, out, lse = ctx.saved_tensors
        layout, scale = ctx.layout, ctx.scale
        q, k, v = _widened(query, key, value)
        g, o = _widened(grads[0].transpose(0, 1), out.transpose(0, 1))
        z = lse.T
        # laid out [T, H, D] like the projections, so that these gradients flow on without a copy
        dq, dk, dv = (torch.empty_like(x.transpose(0, 1)).transpose(0, 1) for x in (q, k, v))
        for bucket in layout.buckets:
            index, valid = bucket.index, bucket.valid
            # +inf makes every probability of a padding query exactly 0
            padded_lse = lse[index].masked_fill_(~valid[..., None], torch.inf).transpose(1, 2)
            padded_grad = _gather(g, index).masked_fill(~valid[:, None, :, None], 0)
            parts = (_gather(x, index) for x in (q, k, v, o))
            found = _backward(padded_grad, *parts, padded_lse, 0.0, True, scale=scale)
            for target, source in zip((dq, dk, dv), found, strict=True):
                target.transpose(0, 1)[index[valid]] = source.transpose(1, 2)[valid]
        for prompt, completions in _regions(layout):
            found = _part_backward(g, q, k, v, o, z, prompt, prompt, True, scale)
            dq[:, prompt], dk[:, prompt], dv[:, prompt] = found
            if completions.stop > completions.start:
                found = _part_backward(g, q, k, v, o, z, completions, prompt, False, scale)
                dq[:, completions] += found[0]
                dk[:, prompt] += found[1]
                dv[:, prompt] += found[2]
        return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype), None, None


def _part_backward(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    z: Tensor,
    queries: slice,
    keys: slice,
    causal: bool,
    scale: float,
) -> list[Tensor]:
    """Gradients of the queries and keys of one part of the attention, given the merged output and log-sum-exp."""
    found = _backward(
        g[None, :, queries], q[None, :, queries], k[None, :, keys], v[None, :, keys], o[None, :, queries],
        z[None, :, queries], 0.0, causal, scale=scale,
    )  # fmt: skip
    return [gradient[0] for gradient in found]


def _widened(*tensors: Tensor) -> list[Tensor]:
    """In float32; float64 stays."""
    return [x if x.dtype == torch.float64 else x.float() for x in tensors]


def _regions(layout: Layout) -> list[tuple[slice, slice]]:
    """Each group's prompt and all its completions behind it."""
    regions = []
    for group in layout.groups:
        end = group.completions[-1][1] if group.completions else group.prompt[1]
        regions.append((slice(*group.prompt), slice(group.prompt[1], end)))
    return regions


def _gather(x: Tensor, index: Tensor) -> Tensor:
    """[H, T, D] at [s, L] positions -> [s, H, L, D]."""
    return x.transpose(0, 1)[index].transpose(1, 2)


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
