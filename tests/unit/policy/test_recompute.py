"""Layers computed again in the backward pass: the same numbers, less kept, replayed experts also the second time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from gspo.algorithm.batch import PackedBatch
from gspo.config import Config
from gspo.errors import ConfigError
from gspo.packing import Row, pack
from gspo.policy.forward import score
from gspo.policy.load import Policy
from gspo.policy.recompute import check_recompute, find_layers
from gspo.rollout.system import load_system

GROUP = [[5, 9, 11, 2, 7], [8, 3, 1], [4, 4, 6, 10, 12, 3, 9]]


def batch(repeat: int = 1) -> PackedBatch:
    rows = [
        Row([1, 2, 3, 4], ids * repeat, [True] * len(ids) * repeat, 1.0, [0.0] * len(ids) * repeat) for ids in GROUP
    ]
    return pack(rows, range(len(rows)), max_tokens=4096)[0]


def gradient(policy: Policy, replay: torch.Tensor | None = None) -> tuple[torch.Tensor, list[torch.Tensor]]:
    policy.model.zero_grad()
    scored = score(policy, batch(), replay=replay)
    scored.logprobs.pow(2).sum().backward()
    found = [p.grad.clone() for p in policy.model.parameters() if p.grad is not None]
    return scored.logprobs.detach(), found


@pytest.mark.parametrize("attention", ["grouped", "plain"])
@pytest.mark.parametrize("model", ["tiny_policy", "tiny_moe"])
def test_the_same_bits(model: str, attention: str, request: pytest.FixtureRequest) -> None:
    policy = request.getfixturevalue(model)
    policy.attention = attention
    kept = gradient(policy)
    policy.recompute = True
    again = gradient(policy)
    assert torch.equal(kept[0], again[0])
    assert len(kept[1]) == len(again[1]) > 5
    assert all(torch.equal(a, b) for a, b in zip(kept[1], again[1], strict=True))


def test_replayed_experts_hold_in_the_second_computation(tiny_moe: Policy) -> None:
    own = score(tiny_moe, batch(), entropy=False).experts
    assert own is not None
    other = (own + 1) % tiny_moe.routers[0].num_experts
    kept = gradient(tiny_moe, other)
    tiny_moe.recompute = True
    again = gradient(tiny_moe, other)
    assert all(torch.equal(a, b) for a, b in zip(kept[1], again[1], strict=True))
    free = gradient(tiny_moe)
    assert not all(torch.equal(a, b) for a, b in zip(free[1], again[1], strict=True))


class Live(TorchDispatchMode):
    """Bytes of what operators made that is still held."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return out

    def bytes(self) -> int:
        return sum(size for reference, size in self.made.values() if not reference.expired())


def kept_bytes(policy: Policy) -> int:
    passed = batch(8)
    live = Live()
    with live:
        scored = score(policy, passed)
    found = live.bytes()
    assert scored.logprobs.requires_grad
    return found


def test_less_is_kept(tiny_policy: Policy) -> None:
    kept = kept_bytes(tiny_policy)
    tiny_policy.recompute = True
    assert kept_bytes(tiny_policy) < 0.5 * kept


def test_layers_run_twice_with_a_gradient_and_once_without(tiny_policy: Policy) -> None:
    calls: list[bool] = []
    tiny_policy.recompute = True
    for layer in find_layers(tiny_policy):
        layer.mlp.register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    layers = len(find_layers(tiny_policy))
    gradient(tiny_policy)
    assert len(calls) == 2 * layers
    with torch.no_grad():
        score(tiny_policy, batch())
    assert len(calls) == 3 * layers
    assert not any(module.training for module in tiny_policy.model.modules())


def test_setting_reaches_the_policy_and_is_refused_where_it_cannot_be(tiny_policy: Policy) -> None:
    settings = {"model.path": "builtin:tiny", "task.prompts": "builtin:vowels", "rollout.max_tokens": 8}
    assert load_system(Config().with_values({**settings, "batch.recompute_activations": True})).policy.recompute
    assert not load_system(Config().with_values(settings)).policy.recompute
    tiny_policy.model.model.layers = torch.nn.ModuleList()
    tiny_policy.recompute = True
    with pytest.raises(ConfigError, match=r"batch.recompute_activations needs a model"):
        check_recompute(tiny_policy)
