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
from torch.nn import functional as F
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
    # the kernel wants unit stride in the last axis, which projections have
    return _GroupedAttention.apply(query, key, value, layout, scale)


class _GroupedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float) -> Tensor:
        heads, num_tokens, width = query.shape
        out = query.new_empty(num_tokens, heads, width)
        lse_dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        lse = torch.empty(num_tokens, heads, dtype=lse_dtype)
        q, k, v = query[None], key[None], value[None]
        for (start, stop), region in _regions(layout):
            part = slice(start, stop)
            out_part, lse_part = _forward(q[:, :, part], k[:, :, part], v[:, :, part], 0.0, True, scale=scale)
            out[part], lse[part] = out_part[0].transpose(0, 1), lse_part[0].T
            if region.stop > region.start:
                out_part, lse_part = _forward(q[:, :, region], k[:, :, part], v[:, :, part], 0.0, False, scale=scale)
                out[region], lse[region] = out_part[0].transpose(0, 1), lse_part[0].T
        for bucket in layout.buckets:
            own_out, own_lse = _forward(*(_gather(x, bucket.index) for x in (query, key, value)), 0.0, True, scale=scale)
            index = bucket.index[bucket.valid]
            own_out = own_out.transpose(1, 2)[bucket.valid]
            own_lse = own_lse.transpose(1, 2)[bucket.valid]
            prompt_lse = lse[index]
            merged = torch.logaddexp(prompt_lse, own_lse)
            mixed = out[index].to(lse_dtype) * (prompt_lse - merged).exp()[..., None]
            mixed += own_out.to(lse_dtype) * (own_lse - merged).exp()[..., None]
            out[index], lse[index] = mixed.to(out.dtype), merged
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.layout, ctx.scale = layout, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        query, key, value, out, lse = ctx.saved_tensors
        layout, scale = ctx.layout, ctx.scale
        grad = grads[0]
        # [T, H, D] is the layout of the projections, so these gradients flow on without a copy
        dq, dk, dv = (torch.empty_like(x.transpose(0, 1)).transpose(0, 1) for x in (query, key, value))
        g, o, z = grad.transpose(0, 1)[None], out.transpose(0, 1)[None], lse.T[None]
        q, k, v = query[None], key[None], value[None]
        for bucket in layout.buckets:
            index, valid = bucket.index, bucket.valid
            # +inf makes every probability of a padding query exactly 0
            padded_lse = lse[index].masked_fill(~valid[..., None], torch.inf).transpose(1, 2)
            parts = (_gather(x, index) for x in (grad.transpose(0, 1), query, key, value, out.transpose(0, 1)))
            grad_b, query_b, key_b, value_b, out_b = parts
            grad_b = grad_b.masked_fill(~valid[:, None, :, None], 0)
            found = _backward(grad_b, query_b, key_b, value_b, out_b, padded_lse, 0.0, True, scale=scale)
            for target, source in zip((dq, dk, dv), found, strict=True):
                target[:, index[valid]] = source.transpose(1, 2)[valid].transpose(0, 1)
        for (start, stop), region in _regions(layout):
            part = slice(start, stop)
            args = (g[:, :, part], q[:, :, part], k[:, :, part], v[:, :, part], o[:, :, part], z[:, :, part])
            dq[:, part], dk[:, part], dv[:, part] = (x[0] for x in _backward(*args, 0.0, True, scale=scale))
            if region.stop > region.start:
                args = (g[:, :, region], q[:, :, region], k[:, :, part], v[:, :, part], o[:, :, region], z[:, :, region])
                from_prompt = _backward(*args, 0.0, False, scale=scale)
                dq[:, region] += from_prompt[0][0]
                dk[:, part] += from_prompt[1][0]
                dv[:, part] += from_prompt[2][0]
        return dq, dk, dv, None, None


def _regions(layout: Layout) -> list[tuple[tuple[int, int], slice]]:
    """Each group's prompt range and the range of all its completions behind it."""
    regions = []
    for group in layout.groups:
        end = group.completions[-1][1] if group.completions else group.prompt[1]
        regions.append((group.prompt, slice(group.prompt[1], end)))
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


def causal_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """One new token for each row: query [B, H, 1, D], key and value [B, H_kv, L, D], additive mask [B, 1, 1, L].

    Query heads that share a key head are handled as several queries of that head, so the cache is read once.
    """
    rows, heads, _, width = query.shape
    shared = query.view(rows, key.shape[1], heads // key.shape[1], width)
    out = F.scaled_dot_product_attention(shared, key, value, attn_mask=mask, scale=scale)
    return out.reshape(rows, 1, heads, width)
