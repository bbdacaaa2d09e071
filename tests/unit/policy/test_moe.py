"""Routers are found by what they return; recording watches, replaying forces experts and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import PhimoeConfig, PhimoeForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from gspo.algorithm.batch import PackedBatch
from gspo.config import AlgorithmConfig, ModelConfig
from gspo.errors import ConfigError, PackingError
from gspo.packing import pack
from gspo.policy import moe
from gspo.policy.forward import score
from gspo.policy.load import Policy, load_policy
from gspo.policy.tiny import build_tokenizer
from tests.helpers import random_rows

SMALL = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 4,
}


def qwen(**values: object) -> Policy:
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 3, "head_dim": 8, "moe_intermediate_size": 24}
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": True}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**(SMALL | sizes | experts | values))).eval()
    return Policy(model, build_tokenizer(), "qwen", torch.float32)


def one_pass(lengths: list[list[int]] | None = None) -> PackedBatch:
    rows = random_rows(lengths or [[5, 1, 9], [3, 4]])
    return pack(rows, range(len(rows)), max_tokens=4096)[0]


def hooks(policy: Policy) -> int:
    return sum(len(module._forward_hooks) for module in policy.model.modules())


def test_a_dense_model_has_no_routers_and_gets_no_hooks(tiny_policy: Policy) -> None:
    assert tiny_policy.routers == () and moe.choose_experts(tiny_policy) is None
    with moe.record_routing(tiny_policy, logits=True) as record, moe.replay_routing(tiny_policy, None):
        assert hooks(tiny_policy) == 0
    assert record.take() == (None, ())
    scored = score(tiny_policy, one_pass())
    assert scored.experts is None and scored.router_logits == ()


def test_routers_in_order_and_only_where_there_are_experts(tiny_moe: Policy) -> None:
    assert [router.module for router in tiny_moe.routers] == [layer.mlp.gate for layer in tiny_moe.model.model.layers]
    assert {(router.num_experts, router.top_k, router.dtype) for router in tiny_moe.routers} == {(8, 2, torch.uint8)}
    mixed = qwen(mlp_only_layers=[1])
    assert [router.module for router in mixed.routers] == [mixed.model.model.layers[n].mlp.gate for n in (0, 2)]
    assert score(mixed, one_pass()).experts.shape[1:] == (2, 2)  # type: ignore[union-attr]


def test_more_than_256_experts_need_16_bits() -> None:
    policy = qwen(num_experts=300, moe_intermediate_size=4)
    batch = one_pass()
    scored = score(policy, batch)
    assert scored.experts is not None and scored.experts.dtype == torch.int16 and int(scored.experts.max()) > 255
    assert torch.equal(score(policy, batch, replay=scored.experts).logprobs, scored.logprobs)


@pytest.mark.parametrize("normalised", [True, False])
def test_the_weights_follow_norm_topk_prob(normalised: bool) -> None:
    policy = qwen(norm_topk_prob=normalised)
    assert {router.rule for router in policy.routers} == {moe.WeightRule("softmax", normalised)}
    batch = one_pass()
    live = score(policy, batch)
    assert torch.equal(score(policy, batch, replay=live.experts).logprobs, live.logprobs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("attention", ["grouped", "plain"])
def test_replaying_a_pass_on_itself_changes_no_bit(tiny_moe: Policy, dtype: torch.dtype, attention: str) -> None:
    tiny_moe.cast(dtype)
    tiny_moe.attention = attention
    batch = one_pass()
    live = score(tiny_moe, batch)
    again = score(tiny_moe, batch, replay=live.experts)
    assert torch.equal(again.logprobs, live.logprobs)
    assert again.experts is not None and torch.equal(again.experts, live.experts)
    parameters = list(tiny_moe.model.parameters())
    gradients = [torch.autograd.grad(found.logprobs.sum(), parameters) for found in (live, again)]
    assert all(torch.equal(first, second) for first, second in zip(*gradients, strict=True))


def test_what_is_recorded_is_what_the_experts_get(tiny_moe: Policy) -> None:
    """And replaying forces it: the experts see the stored indices, with weights of the live logits."""
    batch = one_pass()
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    watched = tiny_moe.routers[2]
    handle = watched.experts.register_forward_pre_hook(lambda module, args: seen.append((args[1], args[2])))
    live = score(tiny_moe, batch, router_logits=True)
    assert live.experts is not None
    assert torch.equal(seen[-1][0], live.experts[:, 2].long())
    forced = (live.experts.long() + 1) % 8
    replayed = score(tiny_moe, batch, replay=forced.to(torch.uint8))
    handle.remove()
    assert torch.equal(seen[-1][0], forced[:, 2])
    assert float((replayed.logprobs - live.logprobs).detach().abs().max()) > 1e-4
    assert replayed.experts is not None and not torch.equal(replayed.experts.long(), forced), "the record is the choice"
    torch.testing.assert_close(seen[-1][1].sum(-1), torch.ones(batch.num_tokens))


def test_a_forced_expert_is_weighed_by_live_scores_and_the_router_learns() -> None:
    """Megatron-LM#79: gathered from scores zeroed outside the top k, a forced expert weighs 0 and has no gradient."""
    policy = qwen(norm_topk_prob=False)
    batch = one_pass()
    live = score(policy, batch)
    outside = live.experts.clone()  # type: ignore[union-attr]
    for layer, router in enumerate(policy.routers):
        lowest = []
        handle = router.module.register_forward_hook(lambda m, a, out, keep=lowest: keep.append(out[0].argsort(-1)))
        score(policy, batch)
        handle.remove()
        outside[:, layer] = lowest[0][:, :2].to(torch.uint8)
    scored = score(policy, batch, replay=outside)
    gradients = torch.autograd.grad(scored.logprobs.sum(), [router.module.weight for router in policy.routers])
    assert all(float(gradient.norm()) > 1e-4 for gradient in gradients)


def test_the_record_is_the_routers_choice_whichever_block_is_outside(tiny_moe: Policy) -> None:
    batch = one_pass([[9]])  # one row: the plain call below is the same
    live = score(tiny_moe, batch).experts
    forced = ((live.long() + 1) % 8).to(torch.uint8)  # type: ignore[union-attr]
    first_layer = []
    for outer, inner in ((moe.record_routing(tiny_moe), None), (None, moe.record_routing(tiny_moe))):
        with outer or moe.replay_routing(tiny_moe, forced) as a, inner or moe.replay_routing(tiny_moe, forced) as b:
            tiny_moe.backbone(input_ids=batch.token_ids[None], use_cache=False)
        experts, _ = (a or b).take()  # type: ignore[union-attr]
        first_layer.append(experts[:, 0])  # type: ignore[index]
    assert all(torch.equal(found, live[:, 0]) for found in first_layer)  # type: ignore[index]


@pytest.mark.parametrize("normalised", [True, False])
def test_the_routers_gradient_equals_finite_differences(normalised: bool) -> None:
    """One mixture layer in float64, experts forced that the router would not choose."""
    policy = qwen(norm_topk_prob=normalised)
    assert all(router.rule for router in policy.routers)  # found in float32: the family rounds its softmax to it
    policy.cast(torch.float64)
    policy.model.set_experts_implementation("eager")  # grouped products know no float64
    block, weight = policy.model.model.layers[0].mlp, policy.routers[0].module.weight
    generator = torch.Generator().manual_seed(1)
    x, direction, target = (
        torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((1, 7, 32), (6, 32), (1, 7, 32))
    )
    weight.data.mul_(20)
    experts = torch.randint(0, 6, (7, 1, 1), generator=generator)
    experts = torch.cat([experts, (experts + 3) % 6], -1).expand(7, 3, 2).to(torch.uint8)

    def value() -> torch.Tensor:
        with moe.replay_routing(policy, experts):
            return (block(x) * target).sum()

    (gradient,) = torch.autograd.grad(value(), weight)
    step = 1e-5
    with torch.no_grad():
        weight.add_(step * direction)
        above = float(value())
        weight.add_(-2 * step * direction)
        below = float(value())
    expected = float((gradient * direction).sum())
    assert (above - below) / (2 * step) == pytest.approx(expected, rel=1e-7) and abs(expected) > 1e-6


MISFITS = {
    "one token short": (lambda experts: experts[1:], "has experts for .* tokens and the pass has"),
    "a layer short": (lambda experts: experts[:, 1:], r"\[tokens, 4 layers, 2 experts\]"),
    "another top k": (lambda experts: experts[..., :1], r"\[tokens, 4 layers, 2 experts\]"),
    "an expert too many": (lambda experts: experts + 1, "has expert 8; this model's experts are numbered 0 to 7"),
}


@pytest.mark.parametrize("case", MISFITS)
@pytest.mark.filterwarnings("ignore")
def test_experts_that_do_not_fit_are_refused(tiny_moe: Policy, case: str) -> None:
    change, message = MISFITS[case]
    batch = one_pass()
    experts = score(tiny_moe, batch).experts
    with pytest.raises(PackingError, match=message):
        score(tiny_moe, batch, replay=change(experts))
    assert hooks(tiny_moe) == 0, "a failed replay leaves its hooks behind"


def test_settings_that_need_routers(tiny_policy: Policy, tiny_moe: Policy) -> None:
    for values in ({"routing_replay": "old"}, {"routing_replay": "rollout"}, {"router_aux_weight": 0.01}):
        algorithm = AlgorithmConfig(**values)  # type: ignore[arg-type]
        moe.check_settings(tiny_moe, algorithm)
        with pytest.raises(ConfigError, match=rf"algorithm.{next(iter(values))} = .* needs a mixture-of-experts model"):
            moe.check_settings(tiny_policy, algorithm)


def test_weights_by_an_unknown_rule_are_recorded_but_not_replayed() -> None:
    """Phi-MoE's weights are a masked softmax of its own."""
    config = PhimoeConfig(**SMALL, num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=2)
    policy = Policy(PhimoeForCausalLM(config).eval(), build_tokenizer(), "phi", torch.float32)
    assert len(policy.routers) == 2 and all(router.rule is None for router in policy.routers)
    assert score(policy, one_pass()).experts is not None
    with pytest.raises(ConfigError, match="PhimoeTopKRouter weighs experts by a rule gspo does not know"):
        moe.check_settings(policy, AlgorithmConfig(routing_replay="old"))


def test_experts_are_computed_by_the_fast_kernel_only_if_it_is_right(
    tiny_moe: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_moe.model.set_experts_implementation("batched_mm")  # a model may come with the slow one
    assert "2 of 8 a token in 4 layers, computed by grouped_mm" in str(moe.choose_experts(tiny_moe))
    assert tiny_moe.model.config._experts_implementation == "grouped_mm"
    right = moe._experts_output
    calls: list[int] = []

    def wrong_the_second_time(router: moe.Router) -> torch.Tensor:
        calls.append(1)
        return right(router) * (1.01 if len(calls) == 2 else 1)

    monkeypatch.setattr(moe, "_experts_output", wrong_the_second_time)
    assert "the family's own loop" in str(moe.choose_experts(tiny_moe))
    assert tiny_moe.model.config._experts_implementation == "eager"


def test_a_pad_token_in_a_text_is_content(tmp_path: Path) -> None:
    """A padding index would freeze its embedding: there is no padding here, so every token's embedding learns."""
    found = []
    weights = qwen().model.state_dict()
    for pad in (None, 7):
        policy = qwen(pad_token_id=pad)
        policy.model.load_state_dict(weights)
        folder = tmp_path / str(pad)
        policy.model.save_pretrained(folder)
        policy.tokenizer.save_pretrained(folder)
        loaded = load_policy(ModelConfig(path=str(folder)))
        embedding: nn.Embedding = loaded.model.get_input_embeddings()
        rows = random_rows([[4, 5]])
        rows[0].token_ids[1] = 7  # type: ignore[index]
        batch = pack(rows, range(2), max_tokens=4096)[0]
        found.append(torch.autograd.grad(score(loaded, batch).logprobs.sum(), embedding.weight)[0])
    assert torch.equal(found[0], found[1]) and float(found[1][7].norm()) > 1e-3
