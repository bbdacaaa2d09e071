"""Expert change and the balance loss, against their definitions and transformers' own load-balancing loss."""

from __future__ import annotations

import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from gspo.algorithm.routing import expert_change, expert_counts, router_balance_loss


def chosen(*positions: list[list[int]]) -> torch.Tensor:
    return torch.tensor(positions, dtype=torch.uint8)


def test_expert_change_by_hand() -> None:
    before = chosen([[0, 1], [4, 5]], [[2, 3], [0, 7]])
    assert expert_change(before, before).tolist() == [[0, 0], [0, 0]]
    assert expert_change(before.flip(-1), before).tolist() == [[0, 0], [0, 0]], "order is no change"
    assert expert_change(chosen([[2, 3], [6, 7]], [[0, 1], [1, 2]]), before).tolist() == [[1, 1], [1, 1]]
    assert expert_change(chosen([[0, 9], [4, 5]], [[3, 9], [8, 9]]), before).tolist() == [[0.5, 0], [0.5, 1]]


def test_expert_change_is_one_minus_the_overlap_of_sets() -> None:
    generator = torch.Generator().manual_seed(0)
    now, before = (torch.rand(20, 3, 16, generator=generator).argsort(-1)[..., :4].to(torch.uint8) for _ in range(2))
    found = expert_change(now, before)
    for n in range(20):
        for layer in range(3):
            kept = set(now[n, layer].tolist()) & set(before[n, layer].tolist())
            assert float(found[n, layer]) == 1 - len(kept) / 4


def test_experts_of_other_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match=r"equal shapes, found \[1, 1, 2\] and \[2, 1, 2\]"):
        expert_change(chosen([[0, 1]]), chosen([[0, 1]], [[0, 1]]))


def routed(positions: int = 40, layers: int = 3, num_experts: int = 8, k: int = 2) -> tuple[list[torch.Tensor], ...]:
    generator = torch.Generator().manual_seed(1)
    logits = [torch.randn(positions, num_experts, generator=generator).requires_grad_() for _ in range(layers)]
    return logits, [layer.softmax(-1).topk(k).indices for layer in logits]


def test_one_layer_is_transformers_loss() -> None:
    logits, experts = routed()
    for layer, picked in zip(logits, experts, strict=True):
        expected = load_balancing_loss_func((layer,), 8, 2)
        found = router_balance_loss([layer], expert_counts(picked[:, None], 8), 40)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
        first, second = (torch.autograd.grad(loss, layer)[0] for loss in (found, expected))
        torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-8)


def test_parts_of_an_update_add_up() -> None:
    """Uneven parts, counts of the whole: the loss and its gradient are those of one part."""
    logits, experts = routed()
    counts = expert_counts(torch.stack(experts, 1), 8)
    assert counts.sum(-1).tolist() == [80, 80, 80]
    whole = router_balance_loss(logits, counts, 40)
    parts = [router_balance_loss([x[a:b] for x in logits], counts, 40) for a, b in ((0, 3), (3, 30), (30, 40))]
    torch.testing.assert_close(sum(parts), whole, rtol=1e-6, atol=0)
    for first, second in zip(
        torch.autograd.grad(sum(parts), logits, retain_graph=True), torch.autograd.grad(whole, logits), strict=True
    ):
        torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-8)


def test_an_even_load_gives_k_and_a_collapsed_one_gives_e() -> None:
    even = router_balance_loss([torch.zeros(8, 8)], torch.full((1, 8), 2.0), 8)
    assert float(even) == pytest.approx(2)
    logits = torch.full((8, 8), -50.0)
    logits[:, 3] = 50
    counts = torch.zeros(1, 8)
    counts[0, 3] = 8  # K = 1
    assert float(router_balance_loss([logits], counts, 8)) == pytest.approx(8)
