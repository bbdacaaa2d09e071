"""What the equations of GSPO and GRPO imply about each other (arXiv 2507.18071)."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from gspo.algorithm.advantages import group_advantages, groups_without_signal
from gspo.algorithm.objectives import OBJECTIVES
from tests.batches import WIDE, Batch, cumulative, evaluate, make_batch, random_batch, with_delta

LENGTHS = [6, 3, 1, 4]


def same(first: torch.Tensor, second: torch.Tensor) -> None:
    torch.testing.assert_close(first, second, rtol=0, atol=1e-12)


def on_policy() -> Batch:
    batch = random_batch(LENGTHS, holes=0.2)
    return replace(batch, logprobs=batch.old_logprobs.clone())


def test_first_update_all_objectives_have_one_gradient() -> None:
    """At the weights that sampled every ratio is exactly 1, and the bands do not matter."""
    (gspo, expected), *others = [evaluate(name, on_policy()) for name in ("gspo", "gspo_token", "grpo")]
    assert gspo.ratio.tolist() == [1.0] * 4
    for output, gradient in others:
        assert output.ratio.tolist() == [1.0] * 4
        same(gradient, expected)
    same(gspo.loss, -on_policy().advantages.mean())
    assert float(expected.abs().max()) > 0.01


@pytest.mark.parametrize("band", [(0.9, 10.0), (0.05, 0.05), (3e-4, 4e-4)])
def test_gspo_token_is_gspo_when_advantages_are_constant(band: tuple[float, float]) -> None:
    """Equations (5) and (13), in value and in gradient, clipped or not."""
    batch = random_batch(LENGTHS, holes=0.2)
    settings = {"clip_low": band[0], "clip_high": band[1]}
    (whole, expected), (token, gradient) = (
        evaluate("gspo", batch, **settings),
        evaluate("gspo_token", batch, **settings),
    )
    same(token.loss, whole.loss)
    same(gradient, expected)
    assert torch.equal(token.ratio, whole.ratio) and torch.equal(token.clipped, whole.clipped)


def test_gspo_is_grpo_when_all_lengths_are_one() -> None:
    batch = random_batch([1] * 9)
    band = {"clip_low": 0.2, "clip_high": 0.2}
    (first, expected), (second, gradient) = evaluate("gspo", batch, **band), evaluate("grpo", batch, **band)
    same(second.loss, first.loss)
    same(gradient, expected)
    assert torch.equal(second.clipped, first.clipped) and 0 < float(first.clipped.sum()) < 9


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize(
    ("ratio", "advantage", "high", "low"),
    [
        (1.5, 1.0, 1.0, 0.0),
        (0.5, 1.0, 0.0, 0.0),
        (1.1, 1.0, 0.0, 0.0),
        (0.5, -1.0, 0.0, 1.0),
        (1.5, -1.0, 0.0, 0.0),
        (0.9, -1.0, 0.0, 0.0),
        (1.5, 0.0, 0.0, 0.0),
        (0.5, 0.0, 0.0, 0.0),
    ],
)
def test_sign_table_of_the_pessimistic_clip(name: str, ratio: float, advantage: float, high: float, low: float) -> None:
    """The clip acts only where leaving the band further would pay."""
    batch = make_batch([[math.log(ratio)] * 2], [advantage])
    output, gradient = evaluate(name, batch, clip_low=0.2, clip_high=0.2)
    assert (output.clipped_high.item(), output.clipped_low.item(), output.clipped.item()) == (high, low, high + low)
    slope = 0.0 if high or low else -ratio * advantage / 2
    assert gradient.tolist() == pytest.approx([slope, slope], abs=1e-12)
    assert output.loss.item() == pytest.approx(-min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage))


def test_the_sequence_ratio_is_at_most_the_mean_token_ratio() -> None:
    """Geometric and arithmetic mean."""
    batch = random_batch(LENGTHS)
    geometric, arithmetic = evaluate("gspo", batch, **WIDE)[0].ratio, evaluate("grpo", batch, **WIDE)[0].ratio
    assert bool((geometric <= arithmetic + 1e-6).all()) and bool((geometric[[0, 1, 3]] < arithmetic[[0, 1, 3]]).all())


@pytest.mark.parametrize("name", OBJECTIVES)
def test_padding_never_enters(name: str) -> None:
    """Each sequence gets two masked tokens with huge values at its end: nothing changes."""
    batch = random_batch([3, 2])
    order, junk = [0, 1, 2, 5, 5, 3, 4, 5, 5], torch.tensor([1e3], dtype=torch.float64)

    def padded(values: torch.Tensor, fill: torch.Tensor) -> torch.Tensor:
        return torch.cat([values, fill])[order]

    wider = Batch(
        padded(batch.logprobs, junk),
        padded(batch.old_logprobs, -junk),
        padded(batch.completion_mask, torch.tensor([False])),
        batch.advantages,
        cumulative([5, 4]),
        padded(batch.token_advantages, junk),
    )
    (first, expected), (second, gradient) = evaluate(name, batch, **WIDE), evaluate(name, wider, **WIDE)
    same(second.loss, first.loss)
    same(gradient[[0, 1, 2, 5, 6]], expected)
    assert gradient[[3, 4, 7, 8]].tolist() == [0.0] * 4


def test_token_coefficients_of_gspo() -> None:
    """Equation (10): dJ / dlogprob_it = s_i A_i M_it / (G |y_i|) where the clip does not act."""
    batch = random_batch(LENGTHS, holes=0.2)
    output, gradient = evaluate("gspo", batch, **WIDE)
    for row, part in enumerate(gradient.split(LENGTHS)):
        mask = batch.completion_mask.split(LENGTHS)[row]
        delta = (batch.logprobs - batch.old_logprobs).split(LENGTHS)[row][mask]
        ratio = math.exp(delta.sum().item() / int(mask.sum()))
        same(part, torch.where(mask, -ratio * batch.advantages[row] / (4 * mask.sum()), 0.0))
        assert output.ratio[row].item() == pytest.approx(ratio, rel=1e-6)


@pytest.mark.parametrize("band", [(0.9, 10.0), (0.02, 0.02)])
def test_a_constant_log_ratio_makes_gspo_and_grpo_equal(band: tuple[float, float]) -> None:
    batch = random_batch(LENGTHS)
    constant = torch.tensor([0.03, -0.05, 0.01, 0.04], dtype=torch.float64).repeat_interleave(torch.tensor(LENGTHS))
    batch = with_delta(batch, constant)
    settings = {"clip_low": band[0], "clip_high": band[1]}
    (gspo, expected), (grpo, gradient) = evaluate("gspo", batch, **settings), evaluate("grpo", batch, **settings)
    same(grpo.loss, gspo.loss)
    same(gradient, expected)


def test_the_loss_is_the_mean_over_sequences_not_over_tokens() -> None:
    """A token mean of the broadcast sequence objective is sum |y_i| J_i / sum |y_i|: another objective."""
    batch = random_batch(LENGTHS)
    alone = torch.stack([evaluate("gspo", batch.sequences([row]))[0].loss for row in range(4)])
    whole = evaluate("gspo", batch)[0].loss
    same(whole, alone.mean())
    weights = torch.tensor(LENGTHS, dtype=torch.float64)
    assert abs(float(whole - (weights * alone).sum() / weights.sum())) > 1e-3


def test_one_token_a_segment_turns_gspo_into_grpo() -> None:
    """With sequences of equal length, cut into segments of one token that inherit the advantage."""
    batch = random_batch([4] * 3)
    cut = replace(batch, cu_seqlens=cumulative([1] * 12), advantages=batch.token_advantages)
    band = {"clip_low": 0.2, "clip_high": 0.2}
    (grpo, expected), (gspo, gradient) = evaluate("grpo", batch, **band), evaluate("gspo", cut, **band)
    same(gspo.loss, grpo.loss)
    same(gradient, expected)


def test_gspo_token_keeps_each_tokens_advantage() -> None:
    """Equation (17): coefficient s_i A_it / (G |y_i|); the sequence form would give every token the mean advantage."""
    batch = random_batch(LENGTHS)
    spread = torch.randn(14, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    output, gradient = evaluate("gspo_token", replace(batch, token_advantages=spread), **WIDE)
    lengths = torch.tensor(LENGTHS)
    ratio = output.ratio.double().repeat_interleave(lengths)
    torch.testing.assert_close(gradient, -ratio * spread / (4 * lengths.repeat_interleave(lengths)), rtol=1e-6, atol=0)
    means = torch.stack([part.mean() for part in spread.split(LENGTHS)])
    plain = evaluate("gspo", replace(batch, advantages=means), **WIDE)[1]
    assert float((plain - gradient).abs().max()) > 1e-2
    sums = [torch.stack([part.sum() for part in values.split(LENGTHS)]) for values in (plain, gradient)]
    torch.testing.assert_close(*sums, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_splitting_is_exact_with_the_global_denominator_only(name: str) -> None:
    batch = random_batch(LENGTHS)
    whole, expected = evaluate(name, batch)
    parts = [evaluate(name, batch.sequences(rows), num_sequences=4) for rows in ([0], [1, 2, 3])]
    same(parts[0][0].loss + parts[1][0].loss, whole.loss)
    same(torch.cat([gradient for _, gradient in parts]), expected)
    own = [evaluate(name, batch.sequences(rows))[0].loss for rows in ([0], [1, 2, 3])]
    assert abs(float((own[0] + own[1]) / 2 - whole.loss)) > 1e-3


def test_an_outlier_that_the_rest_compensates_is_not_clipped() -> None:
    """One token at ratio e^2, the others make up for it: s = 1. GRPO loses that token, GSPO nothing."""
    batch = make_batch([[2.0, -0.4, -0.4, -0.4, -0.4, -0.4]], [1])
    gspo, gradient = evaluate("gspo", batch)
    assert gspo.ratio.item() == pytest.approx(1.0)
    assert gspo.clipped.item() == 0.0 and gradient.tolist() == pytest.approx([-1 / 6] * 6)
    grpo, gradient = evaluate("grpo", batch)
    assert grpo.clipped.item() == pytest.approx(1 / 6) and gradient[0] == 0.0 and bool((gradient[1:] < 0).all())


@pytest.mark.parametrize("reward", [0.1, 1.0, 1e6, -3.3, 0.0])
def test_equal_rewards_have_exactly_no_advantage(reward: float) -> None:
    """In float32, seven rewards of 0.1 have a spread of 1e-8 that an eps of 1e-6 would turn into 0.0074."""
    rewards = torch.full((7,), reward)
    for scale in ("group_std", "none", "batch_std"):
        assert group_advantages(rewards, torch.zeros(7, dtype=torch.int64), scale=scale).tolist() == [0.0] * 7
    assert groups_without_signal(rewards, torch.zeros(7, dtype=torch.int64)).tolist() == [True]


def test_a_group_of_two_has_the_sign_over_root_two() -> None:
    found = group_advantages(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]))
    assert found.tolist() == pytest.approx([2**-0.5, -(2**-0.5)], abs=2e-6)  # ddof 0 would give 1, -1
