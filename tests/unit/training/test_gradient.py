"""The gradient of an update does not depend on how its rows are packed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from gspo.algorithm.batch import StepBatch
from gspo.config import Config
from gspo.metrics import Means
from gspo.packing import Row, pack_step
from gspo.policy.forward import score_plain
from gspo.policy.load import Policy
from gspo.training.trainer import RowResult, Trainer
from tests.helpers import random_rows

LENGTHS = [[5, 1, 9, 3, 7, 2, 12, 4], [3, 3, 8], [1, 1], [30, 2, 2]]


def config(objective: str = "gspo", **values: object) -> Config:
    wide = {"algorithm.clip_low": 0.02, "algorithm.clip_high": 0.03}  # some sequences inside, some outside
    return Config().with_values({"algorithm.objective": objective, **wide, **values})


def rows(drift: float | None = 0.05) -> list[Row]:
    return random_rows(LENGTHS, drift=drift)


def gradient(policy: Policy, made: Config, step: StepBatch) -> tuple[float, torch.Tensor, dict[int, RowResult]]:
    policy.model.zero_grad()
    trainer = Trainer(policy, made)
    loss, results = trainer.forward_backward(step, Means())
    flat = torch.cat([p.grad.flatten().double() for p in policy.model.parameters() if p.grad is not None])
    return loss, flat, results


def same(first: torch.Tensor, second: torch.Tensor, tolerance: float = 1e-6) -> None:
    assert float((first - second).norm() / second.norm()) < tolerance


VARIANTS: dict[str, Callable[[list[Row]], StepBatch]] = {
    "passes of 60 tokens": lambda r: pack_step(r, max_tokens=60),
    "passes of 100 tokens": lambda r: pack_step(r, max_tokens=100),
    "prompts repeated": lambda r: pack_step(r, max_tokens=4096, share_prompts=False),
    "prompts repeated, small passes": lambda r: pack_step(r, max_tokens=64, share_prompts=False),
    "rows reversed": lambda r: pack_step(r[::-1], max_tokens=4096),
    "rows interleaved": lambda r: pack_step(r[::2] + r[1::2], max_tokens=80),
}


@pytest.mark.parametrize("objective", ["gspo", "gspo_token", "grpo"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_packing_does_not_change_the_gradient(tiny_policy: Policy, objective: str, variant: str) -> None:
    whole = pack_step(rows(), max_tokens=4096)
    assert len(whole.batches) == 1
    loss, expected, _ = gradient(tiny_policy, config(objective), whole)
    other_loss, found, _ = gradient(tiny_policy, config(objective), VARIANTS[variant](rows()))
    same(found, expected)
    assert other_loss == pytest.approx(loss, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_a_group_larger_than_a_pass_has_the_same_gradient(tiny_policy: Policy, at_once: int) -> None:
    """tunix#820: a group of 8 in passes of 1, 2 and 3 answers."""
    made = random_rows([[5] * 8], prompt_lengths=[4], drift=0.05)
    _, expected, _ = gradient(tiny_policy, config(), pack_step(made, max_tokens=4096))
    step = pack_step(made, max_tokens=4 + at_once * 5)
    assert len(step.batches) >= 8 / (at_once + 1)
    _, found, _ = gradient(tiny_policy, config(), step)
    same(found, expected)


@pytest.mark.parametrize("chunk", [1, 7, 50, 101, 5000])
def test_the_head_chunk_does_not_change_the_gradient(tiny_policy: Policy, chunk: int) -> None:
    step = pack_step(rows(), max_tokens=4096)
    _, expected, _ = gradient(tiny_policy, config(), step)
    _, found, _ = gradient(tiny_policy, config(**{"batch.vocab_chunk": chunk}), step)
    same(found, expected)


def test_masked_content_does_not_matter(tiny_policy: Policy) -> None:
    """Old and rollout log-probs of masked tokens may be anything, NaN included; the tokens stay context."""
    masked = [replace(row, completion_mask=[place % 3 != 1 for place in range(len(row.token_ids))]) for row in rows()]
    broken = [
        replace(
            row,
            old_logprobs=[
                x if keep else math.nan for x, keep in zip(row.old_logprobs or [], row.completion_mask, strict=True)
            ],
            rollout_logprobs=[
                x if k else math.inf for x, k in zip(row.rollout_logprobs, row.completion_mask, strict=True)
            ],
        )
        for row in masked
    ]
    _, expected, _ = gradient(tiny_policy, config(), pack_step(masked, max_tokens=4096))
    _, found, _ = gradient(tiny_policy, config(), pack_step(broken, max_tokens=4096))
    assert torch.equal(found, expected)
    _, whole, _ = gradient(tiny_policy, config(), pack_step(rows(), max_tokens=4096))
    assert float((whole - expected).norm()) > 1e-3


def test_rows_without_signal_are_left_out_exactly(tiny_policy: Policy) -> None:
    """With advantage 0 in the forward pass or out of it: the same gradient."""
    mixed = [replace(row, advantage=0.0 if number % 2 else row.advantage) for number, row in enumerate(rows())]
    left_out = pack_step(mixed, max_tokens=4096)
    tiny = [replace(row, advantage=row.advantage or 1e-30) for row in mixed]  # forces them through the model
    computed = pack_step(tiny, max_tokens=4096)
    assert sum(b.num_sequences for b in left_out.batches) < sum(b.num_sequences for b in computed.batches)
    assert left_out.num_sequences == computed.num_sequences
    same(gradient(tiny_policy, config(), left_out)[1], gradient(tiny_policy, config(), computed)[1])


def test_plain_and_packed_give_the_same_gradient(tiny_policy: Policy) -> None:
    step = pack_step(rows(), max_tokens=4096)
    _, packed, _ = gradient(tiny_policy, config(), step)
    tiny_policy.attention = "plain"
    _, plain, _ = gradient(tiny_policy, config(), step)
    same(packed, plain, 2e-6)


def test_the_first_update_has_ratio_one_exactly_and_all_objectives_agree(tiny_policy: Policy) -> None:
    """Invariant 1: at the weights that sampled, GSPO, GSPO-token and GRPO have one gradient."""
    step = pack_step(rows(drift=None), max_tokens=100)
    found = {}
    for objective in ("gspo", "gspo_token", "grpo"):
        _, found[objective], results = gradient(tiny_policy, config(objective), step)
        assert {result.ratio for result in results.values()} == {1.0}
        assert {result.clipped for result in results.values()} == {0.0}
    same(found["gspo"], found["grpo"])
    same(found["gspo"], found["gspo_token"])


def test_old_logprobs_stay_those_of_the_weights_that_sampled(tiny_policy: Policy) -> None:
    """SkyRL#1315, miles#1829: recomputed with present weights the ratio would be 1 for ever and the clip inert."""
    made = Config().with_values({"optimizer.learning_rate": 1e-2})
    trainer = Trainer(tiny_policy, made)
    first = pack_step(rows(drift=None), max_tokens=4096)
    old = trainer.old_scores(first)
    known = [
        replace(row, old_logprobs=old[number].logprobs if number in old else None)
        for number, row in enumerate(rows(drift=None))
    ]
    second = pack_step(known, max_tokens=4096)
    by_hand = score_plain(tiny_policy, first.batches[0]).logprobs.detach()
    trainer.forward_backward(first, Means())
    trainer.optim_step()
    _, results = trainer.forward_backward(second, Means())
    now = score_plain(tiny_policy, first.batches[0]).logprobs.detach()
    bounds = first.batches[0].cu_seqlens.tolist()
    for place, row in enumerate(first.batches[0].rows):
        span = slice(bounds[place], bounds[place + 1])
        expected = float((now[span] - by_hand[span]).mean().exp())
        assert results[row].ratio == pytest.approx(expected, rel=1e-4)
    assert max(abs(math.log(result.ratio)) for result in results.values()) > 0.01


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
def test_scoring_is_at_the_sampling_temperature(tiny_policy: Policy, temperature: float) -> None:
    made = config(**{"rollout.temperature": temperature})
    step = pack_step(rows(drift=None), max_tokens=4096)
    found = Trainer(tiny_policy, made).score(step.batches[0]).logprobs
    expected = score_plain(tiny_policy, step.batches[0], temperature=temperature).logprobs
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    other = score_plain(tiny_policy, step.batches[0], temperature=0.9).logprobs
    assert float((found - other).detach().abs().max()) > 1e-3


def test_dropout_is_off_in_every_pass() -> None:
    """trl#3500: GPT-2's default dropout of 0.1 moves s by 3.5 %, ninety clip widths, between two passes."""
    from transformers import GPT2Config, GPT2LMHeadModel

    from gspo.policy.tiny import build_tokenizer

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=101, n_embd=32, n_layer=2, n_head=2, n_positions=128)).train()
    assert model.config.resid_pdrop == 0.1
    policy = Policy(model, build_tokenizer(), "gpt2", torch.float32)
    trainer = Trainer(policy, Config())
    step = pack_step(rows(drift=None), max_tokens=4096)
    first, second = (trainer.score(step.batches[0]).logprobs for _ in range(2))
    assert torch.equal(first, second)
