"""Shared by all tests: one thread a test process, no network, small models."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from hypothesis import settings

from gspo.config import ModelConfig
from gspo.policy.load import Policy, load_policy

torch.set_num_threads(1)
settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.load_profile("repeatable")


@pytest.fixture
def tiny_moe() -> Policy:
    """The built-in mixture of experts, fresh weights each time, float32."""
    return load_policy(ModelConfig(path="builtin:tiny-moe"))


@pytest.fixture
def tiny_policy() -> Policy:
    """The built-in two-layer model, fresh weights each time, float32."""
    return load_policy(ModelConfig(path="builtin:tiny"))
