"""Work is counted, not timed: what an iteration puts through the model, and the largest tensor it makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gspo.config import Config
from gspo.metrics import Means
from gspo.packing import pack_step
from gspo.policy.load import Policy
from gspo.rollout.collect import collect
from gspo.rollout.system import System, load_system
from gspo.sync.publish import Publisher
from gspo.tasks import RewardSuite
from gspo.training.iteration import Iteration, run_iteration
from gspo.training.trainer import Trainer
from tests.helpers import random_rows

TINY = {
    "model.path": "builtin:tiny",
    "model.dtype": "float32",
    "task.prompts": "builtin:vowels",
    "task.max_prompt_tokens": 96,
    "rollout.max_tokens": 10,
    "rollout.prompts_per_iteration": 4,
    "rollout.group_size": 4,
}


class Calls:
    """Tokens of every training pass: calls of the backbone with gradient, or of the trainer's scoring without."""

    def __init__(self, system: System) -> None:
        self.tokens: list[int] = []
        self.hook = system.policy.backbone.register_forward_pre_hook(self.note, with_kwargs=True)
        self.on = False

    def note(self, module: Any, args: Any, kwargs: Any) -> None:
        if self.on:
            self.tokens.append(kwargs["input_ids"].shape[1])


def iteration(values: dict[str, Any], reward: Any) -> tuple[list[int], dict[str, Any], list[dict[str, Any]]]:
    config = Config().with_values(TINY | values)
    system = load_system(config)
    system.task.rewards = RewardSuite([reward], [1.0])
    trainer, publisher = Trainer(system.policy, config), Publisher(system.policy, system.engine)
    calls = Calls(system)

    def progress(stage: str, done: int, total: int) -> None:
        if stage == "reward":  # sampling is over; the updates come next
            calls.on = True

    publish = publisher.publish

    def stop(version: int) -> float:
        calls.on = False
        return publish(version)

    publisher.publish = stop  # type: ignore[method-assign]
    done = run_iteration(Iteration(2, collect(system, config, 2, progress)), trainer, publisher, config, progress)
    return calls.tokens, done.metrics, done.rows


def test_an_iteration_computes_one_prompt_a_group_and_scores_three_quarters() -> None:
    """Four updates: the first makes its own old log-probs, the other three are scored once before."""
    tokens, metrics, rows = iteration({}, lambda completion_ids, **_: [float(sum(ids)) for ids in completion_ids])
    assert metrics["group/no_signal_fraction"] == 0
    groups = [rows[start : start + 4] for start in range(0, 16, 4)]
    cost = [len(group[0]["prompt_ids"]) + sum(len(row["token_ids"]) - 1 for row in group) for group in groups]
    assert tokens == [*cost[1:], *cost]


def test_groups_without_signal_cost_nothing() -> None:
    def first_group_only(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [float(sum(ids)) if number < 4 else 1.0 for number, ids in enumerate(completion_ids)]

    tokens, metrics, rows = iteration({}, first_group_only)
    assert metrics["group/no_signal_fraction"] == 0.75
    assert metrics["optimizer/updates_without_signal"] == 3
    assert metrics["policy_version"] == 4
    assert tokens == [len(rows[0]["prompt_ids"]) + sum(len(row["token_ids"]) - 1 for row in rows[:4])]


@pytest.mark.parametrize("max_tokens", [106, 150, 400])
def test_no_pass_is_larger_than_max_tokens(max_tokens: int) -> None:
    values = {"batch.max_tokens": max_tokens, "rollout.group_size": 8, "rollout.prompts_per_iteration": 8}
    tokens, _, _ = iteration(values, lambda completion_ids, **_: [float(sum(ids)) for ids in completion_ids])
    assert max(tokens) <= max_tokens


def test_no_tensor_of_tokens_times_vocabulary(tiny_policy: Policy) -> None:
    """Forward and backward of an update; the largest tensor is a weight or a tile of the head."""
    rows = random_rows([[40] * 8, [30] * 8], drift=0.1)
    step = pack_step(rows, max_tokens=4096)
    chunk, vocabulary, width = 16, 101, 128
    largest: dict[str, int] = {}

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            for item in result if isinstance(result, (tuple, list)) else [result]:
                if isinstance(item, torch.Tensor):
                    name = str(function)
                    largest[name] = max(largest.get(name, 0), item.numel())
            return result

    trainer = Trainer(tiny_policy, Config().with_values({"batch.vocab_chunk": chunk}))
    with Watch():
        trainer.forward_backward(step, Means())
    tokens = step.batches[0].num_tokens
    assert max(largest.values()) <= tokens * width, max(largest, key=lambda name: largest[name])
    assert tokens * width < 2 * tokens * vocabulary
    head = {name: size for name, size in largest.items() if "exp" in name or "softmax" in name}
    assert max(head.values()) <= max(len(step.batches[0].targets) * chunk, tokens * width // 2)


def test_the_recipes_are_valid() -> None:
    recipes = sorted((Path(__file__).resolve().parents[3] / "recipes").glob("*.toml"))
    assert len(recipes) >= 2
    for recipe in recipes:
        assert Config.load(recipe).algorithm.objective == "gspo"
