"""What must not change an update: splitting, order, padding, masked content, the size of a tile."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo.algorithm.advantages import group_advantages
from gspo.algorithm.logprobs import token_logprobs
from gspo.algorithm.objectives import OBJECTIVES
from tests.batches import Batch, cumulative, evaluate, random_batch

quick = settings(deadline=None, derandomize=True, max_examples=30, database=None)
every_objective = pytest.mark.parametrize("name", OBJECTIVES)
seeds = st.integers(0, 10_000)
lengths = st.lists(st.integers(0, 6), min_size=1, max_size=6)
bands = st.sampled_from([(3e-4, 4e-4), (0.05, 0.08), (0.2, 0.27)])


@st.composite
def batches(draw: st.DrawFn, holes: float = 0.3) -> Batch:
    return random_batch(draw(lengths), seed=draw(seeds), drift=draw(st.sampled_from([1e-3, 0.1, 0.5])), holes=holes)


def run(
    name: str, batch: Batch, band: tuple[float, float], count: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    output, gradient = evaluate(name, batch, clip_low=band[0], clip_high=band[1], num_sequences=count)
    return output.loss, gradient


def same(first: torch.Tensor, second: torch.Tensor) -> None:
    torch.testing.assert_close(first, second, rtol=0, atol=1e-12)


def present(batch: Batch) -> int:
    return sum(bool(part.any()) for part in batch.completion_mask.split(batch.lengths))


@every_objective
@quick
@given(batch=batches(), band=bands, cut=st.integers(0, 6))
def test_split_into_packs(name: str, batch: Batch, band: tuple[float, float], cut: int) -> None:
    loss, gradient = run(name, batch, band)
    rows = list(range(len(batch.lengths)))
    parts = [run(name, batch.sequences(part), band, present(batch)) for part in (rows[:cut], rows[cut:])]
    same(parts[0][0] + parts[1][0], loss)
    same(torch.cat([part for _, part in parts]), gradient)


@every_objective
@quick
@given(batch=batches(), band=bands, data=st.data())
def test_order_of_sequences(name: str, batch: Batch, band: tuple[float, float], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(batch.lengths))))
    loss, gradient = run(name, batch, band)
    moved_loss, moved = run(name, batch.sequences(order), band)
    same(moved_loss, loss)
    rows = gradient.split(batch.lengths)
    same(moved, torch.cat([rows[row] for row in order]))


@every_objective
@quick
@given(batch=batches(), band=bands, data=st.data())
def test_order_of_tokens_in_a_sequence(name: str, batch: Batch, band: tuple[float, float], data: st.DataObject) -> None:
    order, start = [], 0
    for length in batch.lengths:
        order += [start + place for place in data.draw(st.permutations(range(length)))]
        start += length
    loss, gradient = run(name, batch, band)
    moved = replace(
        batch,
        logprobs=batch.logprobs[order],
        old_logprobs=batch.old_logprobs[order],
        completion_mask=batch.completion_mask[order],
    )
    moved_loss, moved_gradient = run(name, moved, band)
    same(moved_loss, loss)
    same(moved_gradient, gradient[order])


@every_objective
@quick
@given(batch=batches(), band=bands, junk=st.sampled_from([float("nan"), float("inf"), float("-inf"), 1e30, 0.0]))
def test_content_under_the_mask(name: str, batch: Batch, band: tuple[float, float], junk: float) -> None:
    hidden = ~batch.completion_mask
    filled = replace(
        batch,
        logprobs=batch.logprobs.masked_fill(hidden, junk),
        old_logprobs=batch.old_logprobs.masked_fill(hidden, -junk),
        token_advantages=batch.token_advantages.masked_fill(hidden, junk),
    )
    (loss, gradient), (filled_loss, filled_gradient) = run(name, batch, band), run(name, filled, band)
    assert torch.equal(filled_loss, loss) and torch.equal(filled_gradient, gradient)
    assert not filled_gradient[hidden].any()


@every_objective
@quick
@given(batch=batches(), band=bands, seed=seeds)
def test_masked_tokens_left_out(name: str, batch: Batch, band: tuple[float, float], seed: int) -> None:
    """Tokens that are not the policy's may as well not be there."""
    keep = batch.completion_mask
    counts = [int(part.sum()) for part in keep.split(batch.lengths)]
    short = Batch(
        batch.logprobs[keep],
        batch.old_logprobs[keep],
        keep[keep],
        batch.advantages,
        cumulative(counts),
        batch.token_advantages[keep],
    )
    (loss, gradient), (short_loss, short_gradient) = run(name, batch, band), run(name, short, band)
    same(short_loss, loss)
    same(short_gradient, gradient[keep])


@quick
@given(count=st.integers(1, 8), seed=seeds, band=bands)
def test_sequences_of_one_token(count: int, seed: int, band: tuple[float, float]) -> None:
    batch = random_batch([1] * count, seed=seed)
    (loss, gradient), (token_loss, token_gradient) = run("gspo", batch, band), run("grpo", batch, band)
    same(token_loss, loss)
    same(token_gradient, gradient)


@quick
@given(batch=batches(), band=bands)
def test_first_update(batch: Batch, band: tuple[float, float]) -> None:
    fresh = replace(batch, logprobs=batch.old_logprobs.clone())
    _, expected = run("gspo", fresh, band)
    for name in ("gspo_token", "grpo"):
        same(run(name, fresh, (0.2, 0.27))[1], expected)


@quick
@given(
    groups=st.lists(st.integers(0, 3), min_size=1, max_size=12),
    scale=st.sampled_from(["group_std", "none", "batch_std"]),
    seed=seeds,
    data=st.data(),
)
def test_advantages(groups: list[int], scale: str, seed: int, data: st.DataObject) -> None:
    """They follow their rows, add up to 0 in a group, and know neither the rewards' zero nor (scaled) their unit."""
    rewards = torch.randn(len(groups), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    ids = torch.tensor(groups)

    def advantages(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return group_advantages(values, ids, scale=scale, eps=1e-12)  # type: ignore[arg-type]

    expected = advantages(rewards, ids)
    order = data.draw(st.permutations(range(len(groups))))
    torch.testing.assert_close(advantages(rewards[order], ids[order]), expected[order], rtol=1e-5, atol=1e-6)
    for group in set(groups):
        assert abs(float(expected[ids == group].sum())) < 1e-5
    unit = 1.0 if scale == "none" else 3.0
    torch.testing.assert_close(advantages(unit * rewards + 5.0, ids), expected, rtol=1e-5, atol=1e-6)


@quick
@given(tokens=st.integers(0, 9), vocabulary=st.integers(1, 40), chunk=st.integers(1, 45), seed=seeds)
def test_tiles_of_the_head(tokens: int, vocabulary: int, chunk: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = (
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in ((tokens, 3), (vocabulary, 3))
    )
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator)
    found, whole = (token_logprobs(hidden, weight, targets, vocab_chunk=size) for size in (chunk, vocabulary))
    same(found.logprobs, whole.logprobs)
    assert found.entropy is not None and whole.entropy is not None
    same(found.entropy, whole.entropy)
    slopes = [torch.autograd.grad(values.logprobs.sum(), [hidden, weight]) for values in (found, whole)]
    for first, second in zip(*slopes, strict=True):
        same(first, second)
