"""Faults that users of other trainers reported in public, as small inputs with the right value.

One test a fault; the number the fault gives stands in a comment. ``d`` is the token's log-ratio, ``s`` the sequence's
ratio, ``A`` the advantage.
"""

from __future__ import annotations

import math

import pytest
import torch

from gspo.algorithm.advantages import group_advantages
from gspo.algorithm.kl import k1, k2, k3, kl_penalty
from gspo.algorithm.logprobs import token_logprobs
from gspo.algorithm.objectives import OBJECTIVES
from gspo.algorithm.segments import segment_mean
from tests.batches import WIDE, cumulative, evaluate, make_batch, random_batch

NAN = math.nan


def advantages(rewards: list[float], groups: list[int], **settings: object) -> list[float]:
    return group_advantages(torch.tensor(rewards), torch.tensor(groups), **settings).tolist()  # type: ignore[arg-type]


# --- the sequence ratio ---


def test_each_sequence_weighs_the_same_whatever_its_length() -> None:
    """trl#3823, ROLL#165: a sequence loss times a token mask, then summed: long answers dominate."""
    output, gradient = evaluate("gspo", make_batch([[0.0], [0.0] * 4], [1, -1]))
    assert output.loss.item() == 0.0  # fault: 0.6
    assert gradient.tolist() == [-0.5, 0.125, 0.125, 0.125, 0.125]  # fault: 0.2 each


def test_ratios_go_by_row_in_a_square_batch() -> None:
    """EasyR1#595: a ratio of shape (B,) times (B, T) broadcasts by column when B equals T."""
    output, _ = evaluate("gspo", make_batch([[0.3] * 3, [0.0] * 3, [-0.3] * 3], [1, 1, 1]), **WIDE)
    assert output.ratio.tolist() == pytest.approx([1.349859, 1, 0.740818], abs=1e-6)


@pytest.mark.parametrize("name", ["gspo", "gspo_token"])
def test_the_sequence_ratio_is_one_number(name: str) -> None:
    """Trinity-RFT#154: divided by the length but not summed, the "sequence" ratio varies by token."""
    output, gradient = evaluate(name, make_batch([[0.3, -0.1, 0.1]], [1]), **WIDE)
    assert output.ratio.tolist() == pytest.approx([1.105171], abs=1e-6)
    assert gradient.tolist() == pytest.approx([-1.105171 / 3] * 3, abs=1e-6)  # fault: 1.105171, 0.967216, 1.033895


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("hidden", [(7.0, -9.0), (1e6, -1e6), (NAN, math.inf), (0.0, 0.0)])
def test_masked_tokens_do_not_enter(name: str, hidden: tuple[float, float]) -> None:
    """Soup#723, UniRL#409: with holes in the mask, as tool turns leave them."""
    batch = make_batch([[0.2, hidden[0], 0.4, hidden[1]]], [1], mask=[[1, 0, 1, 0]])
    output, gradient = evaluate(name, batch, **WIDE)
    if name == "grpo":
        assert output.ratio.item() == pytest.approx((math.exp(0.2) + math.exp(0.4)) / 2, abs=1e-6)
    else:
        assert output.ratio.item() == pytest.approx(1.349859, abs=1e-6)  # fault, all four tokens: 0.704688
    assert gradient[[1, 3]].tolist() == [0.0, 0.0]
    assert gradient[0] < 0 and gradient[2] < 0


@pytest.mark.parametrize("name", OBJECTIVES)
def test_left_and_right_padding_give_the_same(name: str) -> None:
    """Soup#744."""
    right = make_batch([[0.2, 0.4, NAN], [-0.1, NAN, NAN]], [1, -1], mask=[[1, 1, 0], [1, 0, 0]])
    left = make_batch([[NAN, 0.2, 0.4], [NAN, NAN, -0.1]], [1, -1], mask=[[0, 1, 1], [0, 0, 1]])
    (first, grad_right), (second, grad_left) = evaluate(name, right), evaluate(name, left)
    assert first.loss == second.loss
    assert torch.equal(grad_right[right.completion_mask], grad_left[left.completion_mask])


def test_packed_sequences_stay_apart() -> None:
    """ms-swift#5965: packed rows taken as one sequence."""
    output, gradient = evaluate("gspo", make_batch([[0.1, 0.3], [-0.2]], [1, 1]), **WIDE)
    assert output.ratio.tolist() == pytest.approx([1.221403, 0.818731], abs=1e-6)  # fault: 1.068939 for all
    assert gradient.tolist() == pytest.approx([-1.221403 / 4, -1.221403 / 4, -0.818731 / 2], abs=1e-6)


def test_the_default_band_is_the_papers() -> None:
    """trl#3834, verl#2775: with GRPO's width of 0.2 the clip never acts on a sequence ratio."""
    batch = make_batch([[0.001, 0.001]], [1])
    output, gradient = evaluate("gspo", batch)
    assert gradient.tolist() == [0.0, 0.0]
    assert output.clipped_high.tolist() == [1.0]
    _, wide = evaluate("gspo", batch, clip_low=0.2, clip_high=0.2)
    assert wide.tolist() == pytest.approx([-0.5005, -0.5005], abs=1e-6)


# --- denominators ---


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("split", [[[0, 1, 2, 3]], [[0, 1], [2, 3]], [[0], [1], [2], [3]], [[0, 1, 2], [3]]])
def test_accumulation_divides_once(name: str, split: list[list[int]]) -> None:
    """ms-swift#10117: g, g/2, g/4 as the same four sequences are cut finer; NeMo-RL#84: the sum instead."""
    batch = random_batch([3, 1, 5, 2], drift=0.1)
    whole, expected = evaluate(name, batch, num_sequences=4)
    parts = [evaluate(name, batch.sequences(rows), num_sequences=4) for rows in split]
    torch.testing.assert_close(sum(output.loss for output, _ in parts), whole.loss, rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.cat([gradient for _, gradient in parts]), expected, rtol=0, atol=1e-12)


def test_uneven_micro_batches_have_no_say() -> None:
    """SkyRL#925, open-instruct#1137, trl#3021: losses 1, 2, 3 in one micro-batch and 10 in the next."""
    batch = make_batch([[0.0]] * 4, [-1, -2, -3, -10])
    parts = [evaluate("gspo", batch.sequences(rows), num_sequences=4)[0].loss for rows in ([0, 1, 2], [3])]
    assert sum(parts).item() == pytest.approx(4.0)  # fault, mean of means: 6.0


@pytest.mark.parametrize("name", OBJECTIVES)
def test_masked_out_answers_leave_the_denominator(name: str) -> None:
    """trl#6369: 1 finished and 3 truncated answers whose tokens are masked: the loss of the finished one alone."""
    alone, expected = evaluate(name, make_batch([[0.0, 0.0]], [-1]))
    batch = make_batch(
        [[0.0, 0.0], [0.1] * 3, [0.1] * 3, [0.1] * 3], [-1] * 4, mask=[[1, 1], [0] * 3, [0] * 3, [0] * 3]
    )
    output, gradient = evaluate(name, batch)
    assert output.loss == alone.loss == 1.0  # fault: 0.25
    assert torch.equal(gradient[:2], expected)
    assert output.ratio.tolist() == [1.0] * 4
    parts = [evaluate(name, batch.sequences(rows), num_sequences=1)[0].loss for rows in ([1, 2], [0, 3])]
    assert sum(parts).item() == 1.0


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("count", [None, 0, 5])
def test_nothing_left_to_train_on_is_a_zero(name: str, count: int | None) -> None:
    """unsloth-zoo#1286, trl#3248, verl#782: 0/0."""
    batch = make_batch([[0.3, 5.0], [NAN]], [1, -1], mask=[[0, 0], [0]])
    output, gradient = evaluate(name, batch, num_sequences=count)
    assert output.loss.item() == 0.0
    assert gradient.tolist() == [0.0] * 3
    assert output.clipped.tolist() == [0.0, 0.0]


def test_nan_under_a_mask_is_selected_away() -> None:
    """verl#6349, ms-swift#9767: multiplying by the mask gives NaN; selecting after exp gives a NaN gradient."""
    values = torch.tensor([1.0, NAN, 3.0], requires_grad=True)
    mean = segment_mean(values, torch.tensor([True, False, True]), cumulative([3]))
    assert mean.item() == 2.0
    mean.backward()
    assert values.grad is not None and values.grad.tolist() == [0.5, 0.0, 0.5]
    for name in OBJECTIVES:
        batch = make_batch([[0.0, 1e10, 0.0]], [1], mask=[[1, 0, 1]], dtype=torch.float32)
        assert evaluate(name, batch, **WIDE)[1].tolist() == [-0.5, 0.0, -0.5]


# --- divergence from the reference ---


def test_the_kl_term_takes_the_tokens_own_ratio() -> None:
    """trl#6586: with the sequence ratio each token's gradient gets a part that belongs to the others."""
    new = torch.tensor([-1.0, -2.0], requires_grad=True)
    penalty = kl_penalty(
        new,
        ref_logprobs=torch.tensor([-1.5, -1.2]),
        old_logprobs=new.detach(),
        completion_mask=torch.tensor([True, True]),
        cu_seqlens=cumulative([2]),
    )
    assert penalty.item() == pytest.approx(0.266036, abs=1e-6)
    penalty.backward()
    assert new.grad is not None
    # fault: [0.329753, -0.479753] with the sequence ratio, [0.196735, -0.612770] with plain k3
    assert new.grad.tolist() == pytest.approx([0.25, -0.40], abs=1e-6)


def test_gradients_of_the_kl_estimators() -> None:
    """open-instruct#534, verl#2953, trl#4967, slime#1004: right value, another divergence's gradient.

    Exact expectation over 3 tokens: uniform policy, reference (1/2, 1/4, 1/4).
    """
    logits = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64).log()
    new = logits.log_softmax(0)
    policy = new.detach().exp()
    assert (policy * k1(new, ref)).sum().item() == pytest.approx(0.056633, abs=1e-6)

    def slope(values: torch.Tensor) -> list[float]:
        return torch.autograd.grad((policy * values).sum(), logits, retain_graph=True)[0].tolist()

    reverse = pytest.approx([-0.154033, 0.077016, 0.077016], abs=1e-6)
    assert slope(k1(new, ref)) == pytest.approx([0, 0, 0], abs=1e-12)
    assert slope(k2(new, ref)) == reverse
    assert slope(k3(new, ref)) == pytest.approx([-0.166667, 0.083333, 0.083333], abs=1e-6)  # that of KL(ref || policy)
    penalties = [
        kl_penalty(
            new[[token]],
            ref_logprobs=ref[[token]],
            old_logprobs=new.detach()[[token]],
            completion_mask=torch.tensor([True]),
            cu_seqlens=cumulative([1]),
        )
        for token in range(3)
    ]
    assert slope(torch.stack(penalties)) == reverse


def test_the_kl_of_an_empty_row_is_not_nan() -> None:
    """unsloth-zoo#1262."""
    penalty = kl_penalty(
        torch.tensor([-1.0, NAN]),
        ref_logprobs=torch.tensor([-1.0, NAN]),
        old_logprobs=torch.tensor([-1.0, math.inf]),
        completion_mask=torch.tensor([True, False]),
        cu_seqlens=cumulative([1, 1, 0]),
    )
    assert penalty.item() == 0.0


# --- advantages ---


def test_uneven_groups_keep_their_own_baseline() -> None:
    """slime#1414, #2230: groups of 4, 3, 4 fall back to one baseline for the batch."""
    rewards, groups = [1, 0, 0, 1, 5, 5, 5, 0, 0, 1, 0], [0] * 4 + [1] * 3 + [2] * 4
    found = advantages([float(r) for r in rewards], groups, scale="none")
    assert found[4:7] == [0.0, 0.0, 0.0]  # fault: 3.363636
    assert found[:4] == [0.5, -0.5, -0.5, 0.5]
    assert found[7:] == [-0.25, -0.25, 0.75, -0.25]


def test_groups_go_by_prompt_not_by_position() -> None:
    """prime-rl#600: prompts interleaved p, q, p, q and cut in windows of two."""
    assert advantages([1.0, 0.0, 1.0, 0.0], [7, 3, 7, 3]) == [0.0] * 4  # fault: + - + -


def test_a_group_is_a_prompts_answers() -> None:
    """rllm#776: a key that is unique to each answer makes groups of one and takes the baseline away."""
    assert advantages([1.0, 0.0, 1.0, 1.0], [0, 0, 1, 1], scale="none") == [0.5, -0.5, 0.0, 0.0]  # fault: 1, 0, 1, 1


@pytest.mark.parametrize("scale", ["group_std", "none", "batch_std"])
def test_a_group_of_one_has_no_advantage(scale: str) -> None:
    """axolotl#3353, verl#7581: the sample deviation of one value is NaN."""
    assert advantages([3.0], [0], scale=scale) == [0.0]
    assert advantages([1.0, NAN, NAN], [0, 0, 0], scale=scale) == [0.0] * 3


def test_an_unscored_answer_does_not_move_the_baseline() -> None:
    """verl#6452: a rejected answer of reward 9; trl#5775, ms-swift#8123: None counted as 0."""
    found = advantages([1.0, 0.0, 0.0, NAN], [0] * 4, scale="none")
    assert found == pytest.approx([2 / 3, -1 / 3, -1 / 3, 0])  # fault: -1.5, -2.5, -2.5
    assert advantages([1.0, NAN, 0.0], [0] * 3, scale="none") == [0.5, 0.0, -0.5]  # fault: baseline 1/3


def test_the_deviation_is_the_samples() -> None:
    """PipelineRL#54: mean and deviation over the whole group, ddof 1."""
    found = advantages([1.0, 0.0, 0.0, 1.0], [0] * 4, eps=1e-4)
    assert found == pytest.approx([0.865875, -0.865875, -0.865875, 0.865875], abs=1e-6)  # ddof 0: 0.9998


@pytest.mark.parametrize("name", OBJECTIVES)
def test_advantages_are_used_as_given(name: str) -> None:
    """gem#113: normalised a second time inside the loss."""
    _, gradient = evaluate(name, make_batch([[0.0], [0.0], [0.0]], [3.0, 5.0, 5.0]))
    assert gradient.tolist() == pytest.approx([-1.0, -5 / 3, -5 / 3])


# --- masks and temperature ---


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_end_token_is_trained(name: str) -> None:
    """trl#4970: padding told by id loses the end token. Ids [5, 6, 2] padded with 2: mask 1 1 1 0 0."""
    _, gradient = evaluate(name, make_batch([[0.0] * 5], [1], mask=[[1, 1, 1, 0, 0]]))
    assert gradient.tolist() == pytest.approx([-1 / 3, -1 / 3, -1 / 3, 0, 0])


@pytest.mark.parametrize("name", OBJECTIVES)
def test_tool_text_is_not_trained(name: str) -> None:
    """trl#4975, #5144: 4 sampled tokens, 3 of a tool, 2 sampled: the mean is over 6, whatever the tool wrote."""
    mask = [[1, 1, 1, 1, 0, 0, 0, 1, 1]]
    found = []
    for tool in (0.0, 3.0, NAN):
        delta = [[0.1, 0.1, 0.1, 0.1, tool, tool, tool, 0.1, 0.1]]
        output, gradient = evaluate(name, make_batch(delta, [1], mask=mask), **WIDE)
        assert output.ratio.item() == pytest.approx(math.exp(0.1), abs=1e-6)
        found.append(gradient.tolist())
    assert found[0] == found[1] == found[2]
    assert found[0] == pytest.approx([-math.exp(0.1) / 6 if keep else 0.0 for keep in mask[0]])


def score_second_token(temperature: float) -> float:
    """Logits [2, 0, -1], token 1."""
    weight = torch.tensor([[2.0], [0.0], [-1.0]])
    return token_logprobs(torch.ones(1, 1), weight, torch.tensor([1]), temperature=temperature).logprobs.item()


def test_scores_are_at_the_sampling_temperature() -> None:
    """trl#3029, #4159: sampled at 0.6 and scored at 1, a token's ratio is 3.336841 before any update."""
    assert score_second_token(1.0) == pytest.approx(-2.169846, abs=1e-6)
    assert score_second_token(0.6) == pytest.approx(-3.374871, abs=1e-6)


@pytest.mark.parametrize("temperature", [0.0, -1.0, NAN])
def test_no_temperature_to_score_at(temperature: float) -> None:
    """trl#3640."""
    with pytest.raises(ValueError, match="temperature must be above 0"):
        score_second_token(temperature)


def test_a_tiny_temperature_is_finite() -> None:
    """miles#2686."""
    assert score_second_token(1e-4) == pytest.approx(-20_000, rel=1e-5)
