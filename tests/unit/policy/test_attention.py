"""Packed attention against a dense mask, written as the rule reads: own past, and the prompt of one's group."""

from __future__ import annotations

import pytest
import torch

from gspo.algorithm.batch import Layout
from gspo.packing import pack, pack_prompts
from gspo.policy.attention import grouped_attention
from tests.helpers import random_rows

SHAPES = [[[5, 1, 3], [6]], [[2, 2], [2, 2]], [[1, 1], [9, 8, 1, 30]], [[40]]]


def dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: Layout, scale: float) -> torch.Tensor:
    """[H, T, D] -> [T, H, D] by an explicit [T, T] mask, token by token."""
    num_tokens = query.shape[1]
    visible = torch.zeros(num_tokens, num_tokens, dtype=torch.bool)
    for group in layout.groups:
        for token in range(*group.prompt):
            visible[token, group.prompt[0] : token + 1] = True
        for start, stop in group.completions:
            for token in range(start, stop):
                visible[token, group.prompt[0] : group.prompt[1]] = True
                visible[token, start : token + 1] = True
    repeat = query.shape[0] // key.shape[0]
    key, value = key.repeat_interleave(repeat, 0), value.repeat_interleave(repeat, 0)
    scores = (query @ key.transpose(-1, -2)) * scale
    return (scores.masked_fill(~visible, -torch.inf).softmax(-1) @ value).transpose(0, 1)


@pytest.mark.parametrize("lengths", SHAPES)
@pytest.mark.parametrize("heads", [(4, 2), (3, 3)])
def test_equals_a_dense_mask_in_value_and_gradient(lengths: list[list[int]], heads: tuple[int, int]) -> None:
    rows = random_rows(lengths)
    batch = pack(rows, range(len(rows)), max_tokens=10_000)[0]
    generator = torch.Generator().manual_seed(1)
    shapes = [(count, batch.num_tokens, 16) for count in (heads[0], heads[1], heads[1])]
    inputs = [torch.randn(s, dtype=torch.float64, generator=generator).requires_grad_() for s in shapes]
    weights = torch.randn(batch.num_tokens, heads[0], 16, dtype=torch.float64, generator=generator)
    ours = grouped_attention(*inputs, batch.layout, 0.3)
    theirs = dense(*inputs, batch.layout, 0.3)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    for mine, expected in zip(
        torch.autograd.grad((ours * weights).sum(), inputs),
        torch.autograd.grad((theirs * weights).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-11)


def test_rows_do_not_see_each_other() -> None:
    """Changing one completion's keys changes that completion only; changing the prompt's changes its whole group."""
    rows = random_rows([[4, 4], [4]])
    batch = pack(rows, range(3), max_tokens=1000)[0]
    query, key, value = (torch.randn(2, batch.num_tokens, 8, dtype=torch.float64) for _ in range(3))
    before = grouped_attention(query, key, value, batch.layout, 1.0)

    def changed_by(start: int, stop: int) -> set[int]:
        other = key.clone()
        other[:, start:stop] += 1.0
        after = grouped_attention(query, other, value, batch.layout, 1.0)
        return set((after - before).abs().amax((1, 2)).gt(1e-12).nonzero()[:, 0].tolist())

    group = next(g for g in batch.layout.groups if len(g.completions) == 2)
    first, second = group.completions
    assert changed_by(*first) <= set(range(*first)) and changed_by(*first)
    assert changed_by(*group.prompt) >= set(range(*second))
    assert changed_by(*group.prompt) <= set(range(group.prompt[0], second[1]))


def test_no_padding_value_can_reach_a_gradient() -> None:
    """Rows of very different logits in one block: a padded query against a far larger row must not make NaN."""
    rows = random_rows([[8, 7, 7, 7]])
    batch = pack(rows, range(4), max_tokens=1000)[0]
    assert any(not block.valid.all() for block in batch.layout.blocks)
    inputs = [torch.randn(2, batch.num_tokens, 8) * 200 for _ in range(3)]
    inputs = [x.requires_grad_() for x in inputs]
    out = grouped_attention(*inputs, batch.layout, 1.0)
    gradients = torch.autograd.grad(out.sum(), inputs)
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_prompts_alone() -> None:
    _, _, layout, last = pack_prompts([[1, 2, 3], [4]])
    query, key, value = (torch.randn(2, 4, 8, dtype=torch.float64) for _ in range(3))
    torch.testing.assert_close(
        grouped_attention(query, key, value, layout, 0.5), dense(query, key, value, layout, 0.5), rtol=0, atol=1e-12
    )
    assert last == [2, 3]
