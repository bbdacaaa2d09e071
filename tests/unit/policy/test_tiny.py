"""Built-in models: their names, sizes, and that the weights of the plain ones never change."""

from __future__ import annotations

import hashlib

import pytest
import torch

from gspo.config import ModelConfig
from gspo.errors import ConfigError
from gspo.policy import tiny
from gspo.policy.load import load_policy


def weights_hash(name: str) -> str:
    digest = hashlib.sha256()
    for key, value in sorted(tiny.build(name)[0].state_dict().items()):
        digest.update(key.encode() + value.numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("builtin:tiny-3x96", (3, 96, 0, 0)),
        ("builtin:tiny-moe-5x64-4of32", (5, 64, 4, 32)),
        ("builtin:tiny-moe-1x32-1of2", (1, 32, 1, 2)),
    ],
)
def test_sizes_are_in_the_name(name: str, expected: tuple[int, ...]) -> None:
    layers, width, active, experts = expected
    policy = load_policy(ModelConfig(path=name))
    config = policy.model.config
    assert (config.num_hidden_layers, config.hidden_size) == (layers, width)
    assert len(policy.routers) == (layers if experts else 0)
    if experts:
        assert {(router.top_k, router.num_experts) for router in policy.routers} == {(active, experts)}
        assert config.num_experts_per_tok * config.moe_intermediate_size == 2 * width and config.norm_topk_prob


def test_the_same_weights_every_time_whatever_the_random_state() -> None:
    torch.manual_seed(1)
    first = weights_hash("builtin:tiny-moe-2x32-2of4")
    torch.manual_seed(2)
    assert weights_hash("builtin:tiny-moe-2x32-2of4") == first != weights_hash("builtin:tiny-moe-2x32-1of4")
    assert weights_hash("builtin:tiny") == weights_hash("builtin:tiny-2x64")
    assert weights_hash("builtin:tiny-moe") == weights_hash("builtin:tiny-moe-4x64-2of8")


@pytest.mark.parametrize(
    "name",
    [
        "builtin:tinny",
        "builtin:tiny-moe-12x64",
        "builtin:tiny-0x64",
        "builtin:tiny-2x40",
        "builtin:tiny-moe-2x64-3of8",
        "builtin:tiny-moe-2x64-8of4",
    ],
)
def test_a_size_that_cannot_be_is_a_sentence(name: str) -> None:
    with pytest.raises(ConfigError, match=r"model.path"):
        load_policy(ModelConfig(path=name))
