"""The probe: three engines that lie are caught, an honest one never is."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from gspo.engines.native import NativeEngine
from gspo.errors import WeightSyncError
from gspo.policy.load import Policy
from gspo.rollout.system import copy_policy
from gspo.sync.publish import Publisher


class IgnoresUpdates(NativeEngine):
    def load_weights(self, version: int) -> None:
        self.policy_version = version


class LoadsHalf(NativeEngine):
    def load_weights(self, version: int) -> None:
        assert self.owner is not None
        pairs = list(zip(self.policy.model.parameters(), self.owner.model.parameters(), strict=True))
        for mine, theirs in pairs[: len(pairs) // 2]:
            mine.data.copy_(theirs)


class KeepsItsCache(NativeEngine):
    """Answers a prompt it has seen from memory, as a prefix cache that is not reset does."""

    def next_logprobs(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> list[float]:
        if not hasattr(self, "memory"):
            self.memory: dict[tuple[int, ...], list[float]] = {}
        return self.memory.setdefault(tuple(prompt_ids), super().next_logprobs(prompt_ids, token_ids))


def move(policy: Policy, size: float, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter += torch.randn(parameter.shape, generator=generator).to(parameter) * size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [IgnoresUpdates, LoadsHalf, KeepsItsCache])
def test_an_engine_without_the_new_weights_is_caught(
    tiny_policy: Policy, kind: type[NativeEngine], dtype: torch.dtype
) -> None:
    engine = kind(copy_policy(tiny_policy, dtype), owner=tiny_policy)
    publisher = Publisher(tiny_policy, engine)
    move(tiny_policy, 1e-2)
    with pytest.raises(WeightSyncError, match="does not have the weights of version 4"):
        publisher.publish(4)


@pytest.mark.parametrize("kind", [IgnoresUpdates, LoadsHalf, KeepsItsCache])
def test_updates_below_the_rounding_add_up(tiny_policy: Policy, kind: type[NativeEngine]) -> None:
    """No single one of them can be told from the engine's bfloat16; together they can."""
    engine = kind(copy_policy(tiny_policy, torch.bfloat16), owner=tiny_policy)
    publisher = Publisher(tiny_policy, engine)
    with pytest.raises(WeightSyncError, match="does not have the weights"):
        for version in range(1, 200):
            move(tiny_policy, 1e-4, version)
            publisher.publish(version)
    assert version > 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_honest_engine_never_fires(tiny_policy: Policy, dtype: torch.dtype) -> None:
    """200 good updates of many sizes, with an engine in the trainer's precision and one in bfloat16."""
    engine = NativeEngine(copy_policy(tiny_policy, dtype), owner=tiny_policy)
    publisher = Publisher(tiny_policy, engine)
    for version in range(200):
        move(tiny_policy, 10.0 ** -(2 + version % 4), version)
        publisher.publish(version)
        assert engine.policy_version == version


def test_shared_weights_arrive_by_being_the_same(tiny_policy: Policy) -> None:
    publisher = Publisher(tiny_policy, NativeEngine(tiny_policy))
    move(tiny_policy, 1e-2)
    assert publisher.publish(1) == 0.0


def test_another_model_is_refused_at_start(tiny_policy: Policy) -> None:
    other = copy_policy(tiny_policy, torch.float32)
    move(other, 1.0)
    with pytest.raises(WeightSyncError, match="disagree before any update"):
        Publisher(tiny_policy, NativeEngine(other))
