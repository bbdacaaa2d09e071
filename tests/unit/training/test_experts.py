"""Training a mixture of experts: replay, expert change, the balance loss, and the settings that ask for them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from gspo.algorithm.batch import StepBatch
from gspo.config import Config
from gspo.errors import ConfigError
from gspo.metrics import Means
from gspo.packing import Row, pack_step
from gspo.policy.forward import score
from gspo.policy.load import Policy
from gspo.rollout.system import copy_policy
from gspo.training.loop import RunResult, train
from gspo.training.trainer import Trainer
from gspo.types import Routing
from tests.helpers import random_rows
from tests.parity.test_families import PACKED, build

LENGTHS = [[5, 1, 9, 3], [7, 2], [4, 4, 4]]


def rows(drift: float | None = None) -> list[Row]:
    return random_rows(LENGTHS, drift=drift)


def trainer(policy: Policy, reference: Policy | None = None, **values: Any) -> Trainer:
    return Trainer(
        policy, Config().with_values({f"algorithm.{key}": value for key, value in values.items()}), reference
    )


def perturb(policy: Policy, size: float = 0.02) -> None:
    with torch.no_grad():
        for number, parameter in enumerate(policy.model.parameters()):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
            parameter.add_(size * noise.to(parameter))


def gradient(policy: Policy) -> torch.Tensor:
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in policy.model.parameters()])


@pytest.mark.parametrize("mode", ["none", "old"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unchanged_weights_have_ratio_one_and_no_change(tiny_moe: Policy, dtype: torch.dtype, mode: str) -> None:
    tiny_moe.cast(dtype)
    made, means = trainer(tiny_moe, routing_replay=mode), Means()
    for step in (
        pack_step(rows(), max_tokens=18),
        made.with_old_logprobs(pack_step(rows(), max_tokens=18)),
    ):
        assert len(step.batches) > 1
        _, results = made.forward_backward(step, means)
        assert {result.ratio for result in results.values()} == {1.0}
        assert {change for result in results.values() for change in result.expert_change or [1.0]} == {0.0}
    assert means.result()["moe/expert_change"] == 0.0


def test_r2_forces_the_old_experts_when_routers_have_moved(tiny_moe: Policy) -> None:
    """The experts modules get what they got in the old pass; the change that is reported is the routers' own."""
    made, means = trainer(tiny_moe, routing_replay="old"), Means()
    step = made.with_old_logprobs(pack_step(rows(), max_tokens=4096))
    perturb(tiny_moe)
    used: list[torch.Tensor] = []
    for router in tiny_moe.routers:
        router.experts.register_forward_pre_hook(lambda module, args: used.append(args[1]))
    made.forward_backward(step, means)
    old = step.batches[0].old_experts
    assert old is not None and torch.equal(torch.stack(used, 1), old.long())
    assert means.result()["moe/expert_change"] > 0.02
    router_gradients = [router.module.weight.grad for router in tiny_moe.routers]
    assert all(found is not None and float(found.norm()) > 0 for found in router_gradients)
    used.clear()
    trainer(tiny_moe).forward_backward(step, means)
    assert not torch.equal(torch.stack(used, 1), old.long()), "without replay the routers choose"


def test_r3_forces_what_the_rows_bring(tiny_moe: Policy) -> None:
    """In the old pass, the first update and the later ones alike."""
    generator = torch.Generator().manual_seed(5)

    def experts(count: int) -> torch.Tensor:
        return torch.rand(count, 4, 8, generator=generator).argsort(-1)[..., :2].to(torch.uint8)

    prompts: dict[tuple[int, ...], torch.Tensor] = {}
    routed = []
    for row in rows():
        prompt = prompts.setdefault(tuple(row.prompt_ids), experts(len(row.prompt_ids)))
        completion = torch.cat([prompt[-1:], experts(len(row.token_ids) - 1)])
        routed.append(replace(row, routing=Routing(prompt.numpy(), completion.numpy())))
    made = trainer(tiny_moe, routing_replay="rollout")
    step = pack_step(routed, max_tokens=4096)
    (batch,) = step.batches
    expected = score(tiny_moe, batch, replay=batch.rollout_experts).logprobs
    live = score(tiny_moe, batch).logprobs
    assert torch.equal(made.score(batch).logprobs, expected) and not torch.equal(expected, live)
    old = made.with_old_logprobs(step).batches[0].old_logprobs
    assert old is not None and torch.equal(old, expected)
    assert torch.equal(trainer(tiny_moe).score(batch).logprobs, live), "only when asked for"
    with pytest.raises(ConfigError, match="needs an engine that reports which experts it used"):
        made.score(pack_step(rows(), max_tokens=4096).batches[0])


def test_the_reference_chooses_its_own_experts(tiny_moe: Policy) -> None:
    """It is a model of its own; at the start it agrees with the policy exactly, replay or not."""
    reference = copy_policy(tiny_moe, torch.float32)
    made, means = trainer(tiny_moe, reference, routing_replay="old", kl_weight=0.5), Means()
    step = made.with_old_logprobs(pack_step(rows(), max_tokens=4096))
    made.forward_backward(step, means)
    assert means.result()["policy/kl_ref"] == 0.0
    used: list[torch.Tensor] = []
    perturb(reference)
    for router in reference.routers:
        router.experts.register_forward_pre_hook(lambda module, args: used.append(args[1]))
    made.forward_backward(step, Means())
    assert torch.equal(torch.stack(used, 1), score(reference, step.batches[0]).experts.long())  # type: ignore[union-attr]


def test_expert_change_by_layer_is_one_where_all_experts_are_new() -> None:
    """A router of 2 of 4 experts turned around chooses the other 2; the layers before it stay."""
    policy = build("qwen3_moe", PACKED["qwen3_moe"])
    made, means = trainer(policy), Means()
    step = made.with_old_logprobs(pack_step(rows(), max_tokens=18))
    with torch.no_grad():
        policy.routers[-1].module.weight.neg_()
    _, results = made.forward_backward(step, means)
    assert {tuple(result.expert_change or ()) for result in results.values()} == {(0.0, 1.0)}
    assert means.result()["moe/expert_change"] == 0.5


def test_expert_change_counts_the_policys_tokens_only(tiny_moe: Policy) -> None:
    """Masked tokens are no choice of the policy; each answer's mean is over its own, the metric's over all."""
    masked = [replace(row, completion_mask=[n % 3 != 1 for n in range(len(row.token_ids))]) for row in rows()]
    made, means = trainer(tiny_moe), Means()
    step = made.with_old_logprobs(pack_step(masked, max_tokens=4096))
    perturb(tiny_moe)
    _, results = made.forward_backward(step, means)
    (batch,) = step.batches
    now, old = (e[batch.predict_index].tolist() for e in (score(tiny_moe, batch).experts, batch.old_experts))  # type: ignore[index]
    bounds, mask, everything = batch.cu_seqlens.tolist(), batch.completion_mask.tolist(), []
    for place, row in enumerate(batch.rows):
        kept = [n for n in range(bounds[place], bounds[place + 1]) if mask[n]]
        shares = [[1 - len(set(now[n][layer]) & set(old[n][layer])) / 2 for n in kept] for layer in range(4)]
        assert results[row].expert_change == [round(sum(values) / len(kept), 4) for values in shares]
        everything += [value for values in shares for value in values]
    assert means.result()["moe/expert_change"] == pytest.approx(sum(everything) / len(everything), abs=1e-6)


def transformers_balance(policy: Policy, all_rows: list[Row]) -> torch.Tensor:
    """The model's own router logits, one row at a time, at the positions that predict; transformers' loss by layer."""
    by_layer: list[list[torch.Tensor]] = [[] for _ in policy.routers]
    for row in all_rows:
        ids = torch.tensor([[*row.prompt_ids, *row.token_ids[:-1]]])
        logits = policy.model(input_ids=ids, output_router_logits=True).router_logits
        kept = torch.tensor(row.completion_mask)
        for layer, values in enumerate(logits):
            by_layer[layer].append(values[-len(row.token_ids) :][kept])
    losses = [load_balancing_loss_func((torch.cat(layer),), 8, 2) for layer in by_layer]
    return torch.stack(losses).mean()


CUTS: dict[str, Callable[[list[Row]], StepBatch]] = {
    "one pass": lambda r: pack_step(r, max_tokens=4096),
    "four passes or more": lambda r: pack_step(r, max_tokens=13),
    "prompts repeated": lambda r: pack_step(r, max_tokens=24, share_prompts=False),
}


@pytest.mark.parametrize("objective", ["gspo", "gspo_token", "grpo"])
@pytest.mark.parametrize("attention", ["grouped", "plain"])
@pytest.mark.parametrize("cut", CUTS)
def test_the_balance_loss_enters_once_for_the_whole_update(
    tiny_moe: Policy, cut: str, attention: str, objective: str
) -> None:
    """E1 (trl#7009, unsloth#6904): gradient with the weight minus without = weight x d(aux), however it is cut."""
    masked = [replace(row, completion_mask=[n % 4 != 2 for n in range(len(row.token_ids))]) for row in rows()]
    step = CUTS[cut](masked)
    assert cut != "four passes or more" or len(step.batches) >= 4
    tiny_moe.attention = attention
    found, losses, metrics = [], [], []
    for weight in (0.0, 10.0):
        tiny_moe.model.zero_grad()
        means = Means()
        loss, _ = trainer(tiny_moe, objective=objective, router_aux_weight=weight).forward_backward(step, means)
        found.append(gradient(tiny_moe))
        losses.append(loss)
        metrics.append(means.result())
    expected = transformers_balance(tiny_moe, masked)
    tiny_moe.model.zero_grad()
    expected.backward()
    expected, aux = expected.detach(), gradient(tiny_moe)
    difference = (found[1] - found[0]) / 10
    assert float((difference - aux).norm() / aux.norm()) < 2e-5
    assert (losses[1] - losses[0]) / 10 == pytest.approx(float(expected), rel=1e-5)
    assert metrics[1]["moe/router_aux"] == pytest.approx(float(expected), rel=1e-5)
    assert "moe/router_aux" not in metrics[0], "reported though not added"


def test_the_balance_loss_is_of_the_routers_choice_also_under_replay(tiny_moe: Policy) -> None:
    step = trainer(tiny_moe).with_old_logprobs(pack_step(rows(), max_tokens=18))
    (batch, *_) = step.batches
    first = replace(batch, old_experts=(batch.old_experts.long() + 1).remainder(8).to(torch.uint8))  # type: ignore[union-attr]
    for router in list(tiny_moe.routers)[1:]:  # later layers see replayed inputs: leave the first one's loss alone
        router.module.weight.data.zero_()
    found = []
    for mode in ("none", "old"):
        means = Means()
        made = trainer(tiny_moe, routing_replay=mode, router_aux_weight=1.0)
        made.forward_backward(replace(step, batches=(first,)), means)
        found.append(means.result()["moe/router_aux"])
    assert found[0] == pytest.approx(found[1], rel=1e-6)


@pytest.mark.parametrize("attention", ["grouped", "plain"])
def test_the_models_own_router_loss_never_enters(tiny_moe: Policy, attention: str) -> None:
    tiny_moe.attention = attention
    found = []
    for asked in (False, True):
        tiny_moe.model.config.output_router_logits = asked
        tiny_moe.model.router_aux_loss_coef = 100.0
        tiny_moe.model.zero_grad()
        trainer(tiny_moe).forward_backward(pack_step(rows(0.05), max_tokens=4096), Means())
        found.append(gradient(tiny_moe))
    assert torch.equal(*found)


BASE: dict[str, Any] = {
    "model.path": "builtin:tiny-moe",
    "model.dtype": "float32",
    "task.prompts": "builtin:vowels",
    "task.max_prompt_tokens": 96,
    "eval.every": 0,
    "rollout.prompts_per_iteration": 4,
    "rollout.group_size": 4,
    "rollout.max_tokens": 8,
    "optimizer.learning_rate": 1e-2,
    "run.iterations": 2,
}


def run(folder: Path, **values: Any) -> RunResult:
    return train(Config().with_values(BASE | {"run.directory": str(folder)} | values))


def numbers(result: RunResult) -> list[dict[str, Any]]:
    timed = ("time/", "throughput/", "memory/")
    return [{key: value for key, value in line.items() if not key.startswith(timed)} for line in result.metrics]


def test_a_run_reports_experts_and_each_setting_changes_it(tmp_path: Path) -> None:
    base = run(tmp_path / "base")
    assert numbers(base) == numbers(run(tmp_path / "again"))
    assert all(line["moe/expert_change"] > 0 and line["mismatch/experts"] < 0.01 for line in base.metrics)
    records = [json.loads(line) for line in (base.directory / "rollouts" / "2.jsonl").read_text().splitlines()]
    changes = [record["expert_change"] for record in records if record["ratio"] is not None]
    assert all(len(change) == 4 and all(0 <= value <= 1 for value in change) for change in changes)
    assert any(any(change) for change in changes)
    assert all(record["expert_change"] is None for record in records if record["ratio"] is None)
    for turned in (
        {"algorithm.routing_replay": "old"},
        {"algorithm.routing_replay": "rollout"},
        {"algorithm.router_aux_weight": 1.0},
    ):
        assert numbers(run(tmp_path / "turned", **turned)) != numbers(base), turned


def test_an_engine_that_routes_otherwise_is_seen(tmp_path: Path) -> None:
    """E3 (AReaL#1207, NeMo-RL#2590): the share of experts on which sampler and trainer differ is a metric."""
    (line,) = run(tmp_path, **{"engine.dtype": "bfloat16", "run.iterations": 1}).metrics
    assert 0.001 < line["mismatch/experts"] < 0.2


def test_a_dense_model_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    for values in ({"algorithm.routing_replay": "old"}, {"algorithm.router_aux_weight": 0.1}):
        with pytest.raises(ConfigError, match="needs a mixture-of-experts model"):
            run(tmp_path / "runs", **{"model.path": "builtin:tiny"}, **values)
    assert not (tmp_path / "runs").exists()


def test_a_dense_run_has_no_numbers_about_experts(tmp_path: Path) -> None:
    dense = run(tmp_path, **{"model.path": "builtin:tiny", "run.iterations": 1})
    assert not [key for key in dense.metrics[0] if "moe" in key or "experts" in key]
