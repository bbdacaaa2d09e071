"""Float32 master weights, clipping, skipped updates, and the learning rate counted in updates."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from gspo.config import Config, OptimizerConfig
from gspo.metrics import Mean, Means, mean, std
from gspo.packing import pack_step
from gspo.policy.load import Policy
from gspo.training.iteration import split_evenly
from gspo.training.optimizer import MasterOptimizer, learning_rate
from gspo.training.trainer import Trainer
from tests.helpers import random_rows


class One(nn.Module):
    def __init__(self, value: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([value], dtype=dtype))


def step(model: One, optimizer: MasterOptimizer, gradient: float) -> tuple[float, bool]:
    (model.weight * gradient).sum().backward()
    return optimizer.step()


def test_small_updates_are_heard_in_bfloat16() -> None:
    """AReaL#1634: a bfloat16 weight of 0.02 cannot move by 1e-6; its float32 master can, and shows after a while."""
    model = One(0.02, torch.bfloat16)
    optimizer = MasterOptimizer(model, OptimizerConfig(learning_rate=1e-6), 1000)
    step(model, optimizer, 1.0)
    assert model.weight.item() == 0.02001953125
    assert optimizer.master[0].item() == pytest.approx(0.02001953125 - 1e-6, rel=1e-6)
    for _ in range(99):
        step(model, optimizer, 1.0)
    assert optimizer.master[0].item() == pytest.approx(0.02001953125 - 1e-4, rel=1e-4)
    assert model.weight.item() < 0.02001953125
    assert model.weight.dtype == torch.bfloat16 and optimizer.master[0].dtype == torch.float32


def test_bfloat16_gradients_add_up_in_float32() -> None:
    model = One(1.0, torch.bfloat16)
    optimizer = MasterOptimizer(model, OptimizerConfig(learning_rate=0.0, max_grad_norm=1e9), 10)
    for _ in range(1000):
        (model.weight * 1.0).sum().backward()
    assert model.weight.grad is None
    assert optimizer.gradient_norm() == 1000.0  # in bfloat16 the sum would stop at 256


def test_an_update_without_signal_does_not_move_the_weights() -> None:
    """reasoning-from-scratch#186: AdamW at lr 0.1, gradient 1, then 0: momentum alone would go from 0.9 to 0.833."""
    model = One(1.0, torch.float32)
    optimizer = MasterOptimizer(model, OptimizerConfig(learning_rate=0.1), 10)
    step(model, optimizer, 1.0)
    assert model.weight.item() == pytest.approx(0.9)
    optimizer.skip()
    assert model.weight.item() == pytest.approx(0.9)
    assert optimizer.updates == 2
    step(model, optimizer, 0.0)
    assert model.weight.item() == pytest.approx(0.832994, abs=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_thrown_away(bad: float) -> None:
    model = One(1.0, torch.float32)
    optimizer = MasterOptimizer(model, OptimizerConfig(learning_rate=0.1), 10)
    _, made = step(model, optimizer, bad)
    assert not made and model.weight.item() == 1.0 and not optimizer.adam.state
    _, made = step(model, optimizer, 1.0)
    assert made and model.weight.item() == pytest.approx(0.9)


@pytest.mark.parametrize("largest", [0.5, 1.0, 100.0])
def test_clipping_is_by_the_norm_of_the_whole_gradient(largest: float) -> None:
    """Three steps equal to plain AdamW after torch's own clipping."""
    torch.manual_seed(0)
    ours, theirs = nn.Linear(8, 3), nn.Linear(8, 3)
    theirs.load_state_dict(ours.state_dict())
    optimizer = MasterOptimizer(ours, OptimizerConfig(learning_rate=0.01, max_grad_norm=largest), 10)
    adam = torch.optim.AdamW(theirs.parameters(), lr=0.01, weight_decay=0.0)
    for step_number in range(3):
        x = torch.randn(4, 8) * (1 + step_number)
        for model in (ours, theirs):
            (model(x) ** 2).sum().backward()
        norm, made = optimizer.step()
        expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), largest)
        adam.step()
        adam.zero_grad()
        assert made and norm == pytest.approx(float(expected), rel=1e-5)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def test_the_learning_rate_counts_updates() -> None:
    config = OptimizerConfig(learning_rate=1.0, warmup=4, schedule="linear")
    assert [learning_rate(config, update, 12) for update in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert learning_rate(config, 8, 12) == 0.5 and learning_rate(config, 12, 12) == 0.0
    cosine = replace(config, schedule="cosine")
    assert learning_rate(cosine, 8, 12) == pytest.approx(0.5) and learning_rate(cosine, 12, 12) == pytest.approx(0.0)
    assert learning_rate(replace(config, schedule="constant"), 11, 12) == 1.0


def test_mini_batches_are_disjoint_whole_groups() -> None:
    for groups, parts, size in ((8, 4, 8), (10, 4, 3), (5, 4, 2), (4, 4, 2), (7, 3, 1)):
        found = split_evenly(groups * size, parts, size)
        assert [row for part in found for row in part] == list(range(groups * size))
        assert all(len(part) % size == 0 and part for part in found)
        sizes = [len(part) for part in found]
        assert max(sizes) - min(sizes) <= size


def test_nothing_left_to_train_on_changes_nothing(tiny_policy: Policy) -> None:
    """trl#3248: all masks 0, or all advantages 0: loss 0, no pass, weights bit-identical."""
    before = [p.detach().clone() for p in tiny_policy.model.parameters()]
    trainer = Trainer(tiny_policy, Config().with_values({"optimizer.learning_rate": 0.1}))
    rows = random_rows([[3, 4]])
    for quiet in (
        [replace(row, advantage=0.0) for row in rows],
        [replace(row, completion_mask=[False] * len(row.token_ids)) for row in rows],
    ):
        step = pack_step(quiet, max_tokens=1000)
        assert step.batches == ()
        assert trainer.forward_backward(step, Means()) == (0.0, {})
    assert all(torch.equal(a, b) for a, b in zip(before, tiny_policy.model.parameters(), strict=True))


def test_uneven_pieces_weigh_by_what_they_count() -> None:
    """SkyRL#925: 100 tokens at 0.5 and 900 at 0.3 are 0.32, not 0.40. One NaN does not wipe a window (trl#4501)."""
    value = Mean()
    value.add(0.5, 100)
    value.add(0.3, 900)
    assert value.value == pytest.approx(0.32)
    assert mean([0.5, float("nan"), 0.8]) == pytest.approx(0.65)
    assert mean([]) is None and std([1.0]) is None and std([1.0, 3.0]) == pytest.approx(2**0.5)
    means = Means()
    means.add("x", float("nan"), 5)
    assert means.result() == {}
