"""Mixture-of-experts families: packed equals plain, replay, export, and sampling that agrees with training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from gspo.config import OptimizerConfig
from gspo.engines.base import Request, Sampling
from gspo.engines.native import NativeEngine
from gspo.packing import Row, pack, pack_step
from gspo.policy import moe
from gspo.policy.forward import Scored, choose_attention, score, score_next
from gspo.policy.load import Policy
from gspo.rollout.system import copy_policy
from gspo.training.checkpoint import write_model
from gspo.training.optimizer import MasterOptimizer
from tests.helpers import random_rows
from tests.parity.test_families import DEEPSEEK, EXPERTS, PACKED, build

FAMILIES: dict[str, tuple[dict[str, Any], moe.WeightRule]] = {
    "qwen3_moe": (PACKED["qwen3_moe"], moe.WeightRule("softmax", True)),
    "qwen2_moe": (PACKED["qwen2_moe"], moe.WeightRule("softmax", False)),
    "mixtral": (PACKED["mixtral"], moe.WeightRule("softmax", True)),
    "olmoe": (PACKED["olmoe"], moe.WeightRule("softmax", False)),
    "granitemoe": (
        {"num_local_experts": 4, "num_experts_per_tok": 2, "logits_scaling": 1.0},
        moe.WeightRule("chosen", False),
    ),
    "flex_olmo": (EXPERTS, moe.WeightRule("softmax", False)),
    "deepseek_v3": (DEEPSEEK | {"v_head_dim": 8}, moe.WeightRule("sigmoid", True, 2.5)),
}
NAMED = ["qwen3_moe", "qwen2_moe", "mixtral", "olmoe"]


def loaded(family: str) -> Policy:
    policy = build(family, FAMILIES[family][0])
    assert "computed by grouped_mm" in str(moe.choose_experts(policy))
    return policy


def rows() -> list[Row]:
    return random_rows([[5, 1, 9, 3], [7, 2], [4]])


def gradients(policy: Policy, scored: Scored) -> list[torch.Tensor]:
    parameters = list(policy.model.parameters())
    weights = torch.linspace(-1, 1, scored.logprobs.shape[0])
    found = torch.autograd.grad((scored.logprobs * weights).sum(), parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_with_shared_prompts_equals_one_row_at_a_time(family: str) -> None:
    policy = loaded(family)
    batch = pack(rows(), range(7), max_tokens=4096)[0]
    packed = score(policy, batch)
    policy.attention = "plain"
    plain = score(policy, batch)
    assert packed.experts is not None and torch.equal(packed.experts, plain.experts)
    torch.testing.assert_close(packed.logprobs, plain.logprobs, rtol=0, atol=1e-5)
    for first, second in zip(gradients(policy, packed), gradients(policy, plain), strict=True):
        assert float((first - second).norm()) <= 1e-5 * float(second.norm().clamp(min=1e-2))


@pytest.mark.parametrize("family", FAMILIES)
def test_replaying_its_own_experts_changes_no_bit(family: str) -> None:
    policy = loaded(family)
    assert {router.rule for router in policy.routers} == {FAMILIES[family][1]}
    batch = pack(rows(), range(7), max_tokens=4096)[0]
    live = score(policy, batch)
    again = score(policy, batch, replay=live.experts)
    assert torch.equal(live.logprobs, again.logprobs)
    assert all(torch.equal(a, b) for a, b in zip(gradients(policy, live), gradients(policy, again), strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_plain_under_replay_of_other_experts(family: str) -> None:
    policy = loaded(family)
    batch = pack(rows(), range(7), max_tokens=4096)[0]
    live = score(policy, batch)
    assert live.experts is not None
    other = ((live.experts.long() + 1) % policy.routers[0].num_experts).to(torch.uint8)
    packed = score(policy, batch, replay=other)
    policy.attention = "plain"
    plain = score(policy, batch, replay=other)
    assert float((packed.logprobs - live.logprobs).detach().abs().max()) > 1e-3
    torch.testing.assert_close(packed.logprobs, plain.logprobs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("attention", ["grouped", "plain"])
@pytest.mark.parametrize("family", FAMILIES)
def test_replaying_the_rollouts_experts_gives_the_rollouts_logprobs(family: str, attention: str) -> None:
    """Prompt and answer: routing recorded while sampling, laid out by the packer, forced on the trainer's pass.

    The experts are those the trainer's routers would choose, so a shift by one token would show here too.
    """
    policy = loaded(family)
    choose_attention(policy, "grouped")
    policy.attention = attention
    prompts = [[7, 8, 9], [3, 14, 15, 92, 65], [11]]
    sampling = Sampling(7, 1.0, frozenset(range(12)))
    requests = [Request(prompt, 4, (0, number)) for number, prompt in enumerate(prompts)]
    answers = NativeEngine(policy, max_batch=5).generate(requests, sampling)
    sampled = [
        Row(prompt, c.token_ids, [True] * len(c.token_ids), 1.0, c.logprobs, routing=c.routing)
        for prompt, row in zip(prompts, answers, strict=True)
        for c in row
    ]
    assert len({len(row.token_ids) for row in sampled}) > 2
    (batch,) = pack_step(sampled, max_tokens=4096).batches  # refuses routing that contradicts itself
    assert len(batch.layout.groups) == 3, "the prompts were not shared"
    replayed = score(policy, batch, replay=batch.rollout_experts)
    torch.testing.assert_close(replayed.logprobs, batch.rollout_logprobs, rtol=0, atol=2e-5)
    assert torch.equal(replayed.experts, batch.rollout_experts)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", [*NAMED, "llama"])
def test_export_loads_elsewhere_and_computes_the_same(family: str, tmp_path: Path) -> None:
    """Experts are fused in memory and single on disk; the file has the float32 master weights and says so."""
    settings = PACKED[family]
    policy = build(family, settings)
    batch = pack(rows(), range(7), max_tokens=4096)[0]
    before = score(policy, batch).logprobs
    policy.cast(torch.bfloat16)
    optimizer = MasterOptimizer(policy.model, OptimizerConfig(), 1)
    optimizer.master = [p.detach().clone() for p in build(family, settings).model.parameters()]
    write_model(policy, optimizer, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.float32
    again = Policy(model.eval(), policy.tokenizer, family, torch.float32)
    assert torch.equal(score(again, batch).logprobs, before)


@pytest.mark.parametrize("family", NAMED)
def test_a_second_copy_follows_every_expert(family: str) -> None:
    """vllm#42577, SkyRL#1680: after two syncs every tensor has arrived, fused experts and routers included."""
    policy = loaded(family)
    engine = NativeEngine(copy_policy(policy, torch.float32), owner=policy)
    row = list(range(20, 36))
    for version in (1, 2):
        with torch.no_grad():
            for number, parameter in enumerate(policy.model.parameters()):
                noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(100 * version + number))
                parameter.add_(0.02 * noise)
        engine.load_weights(version)
        pairs = zip(policy.model.state_dict().items(), engine.policy.model.state_dict().values(), strict=True)
        assert [name for (name, mine), theirs in pairs if not torch.equal(mine, theirs)] == []
    assert engine.next_logprobs(row, row) == pytest.approx(score_next(policy, row, row), abs=1e-6)
