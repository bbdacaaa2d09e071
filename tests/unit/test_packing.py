from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from gspo.errors import PackingError
from gspo.packing import Row, pack, pack_step
from gspo.types import Routing
from tests.helpers import random_rows


def test_the_example_of_the_docstring() -> None:
    rows = [Row([7, 8, 9], [1, 2], [True, True], 1.0, [-1.0, -2.0]), Row([7, 8, 9], [3], [True], -1.0, [-3.0])]
    batch = pack(rows, [0, 1], max_tokens=100)[0]
    assert batch.token_ids.tolist() == [7, 8, 9, 1]
    assert batch.position_ids.tolist() == [0, 1, 2, 3]
    assert batch.predict_index.tolist() == [2, 3, 2]
    assert batch.targets.tolist() == [1, 2, 3]
    assert batch.cu_seqlens.tolist() == [0, 2, 3]
    assert batch.rollout_logprobs.tolist() == [-1.0, -2.0, -3.0]


def test_a_group_costs_one_prompt() -> None:
    """Counted, not timed: 8 answers to a prompt of 100 tokens put 100 prompt tokens through the model, not 800."""
    rows = random_rows([[10] * 8], prompt_lengths=[100])
    step = pack_step(rows, max_tokens=4096)
    assert sum(batch.num_tokens for batch in step.batches) == 100 + 8 * 9
    repeated = pack_step(rows, max_tokens=4096, share_prompts=False)
    assert sum(batch.num_tokens for batch in repeated.batches) == 8 * (100 + 9)


def test_rows_without_signal_are_left_out_but_counted() -> None:
    rows = random_rows([[3, 4], [5, 6]])
    quiet = [Row(r.prompt_ids, r.token_ids, r.completion_mask, 0.0, r.rollout_logprobs) for r in rows[:2]]
    step = pack_step([*quiet, *rows[2:]], max_tokens=1000)
    assert sorted(row for batch in step.batches for row in batch.rows) == [2, 3]
    assert (step.num_sequences, step.num_completion_tokens) == (4, 18)


def test_fully_masked_rows_leave_the_denominator() -> None:
    rows = random_rows([[3, 4]])
    masked = Row(rows[0].prompt_ids, rows[0].token_ids, [False] * 3, 1.0, rows[0].rollout_logprobs)
    step = pack_step([masked, rows[1]], max_tokens=1000)
    assert step.num_sequences == 1
    assert [batch.rows for batch in step.batches] == [(1,)]


@pytest.mark.parametrize("max_tokens", [40, 64, 100, 1000])
def test_every_row_keeps_its_own_values_however_it_is_packed(max_tokens: int) -> None:
    """Row i carries advantage i and log-prob -i (tt-metal#46548, tunix#820); groups are larger than a pass."""
    base = random_rows([[3] * 9, [7] * 5, [1, 2, 20]])
    rows = [
        Row(r.prompt_ids, r.token_ids, r.completion_mask, float(i + 1), [-float(i)] * len(r.token_ids))
        for i, r in enumerate(base)
    ]
    seen = []
    for batch in pack(rows, range(len(rows)), max_tokens=max_tokens):
        assert batch.num_tokens <= max_tokens
        bounds = batch.cu_seqlens.tolist()
        for place, row in enumerate(batch.rows):
            span = slice(bounds[place], bounds[place + 1])
            assert batch.targets[span].tolist() == rows[row].token_ids
            assert batch.rollout_logprobs[span].tolist() == [-float(row)] * len(rows[row].token_ids)
            assert batch.advantages[place] == row + 1
            first = int(batch.predict_index[span][0])
            assert batch.token_ids[first] == rows[row].prompt_ids[-1]
            seen.append(row)
    assert sorted(seen) == list(range(len(rows)))


def test_passes_are_balanced() -> None:
    rows = random_rows([[20]] * 12, prompt_lengths=[10] * 12)
    loads = [batch.num_tokens for batch in pack(rows, range(12), max_tokens=120)]
    assert max(loads) - min(loads) <= 29


@pytest.mark.parametrize("field", ["completion_mask", "rollout_logprobs", "old_logprobs"])
def test_lists_out_of_step_are_refused(field: str) -> None:
    values = {"completion_mask": [True, True], "rollout_logprobs": [0.0, 0.0], "old_logprobs": [0.0, 0.0]}
    values[field] = values[field][:1]
    with pytest.raises(PackingError, match=f"Row 0: {field} has 1 entries for 2 completion tokens"):
        pack_step([Row([1], [2, 3], advantage=1.0, **values)], max_tokens=10)


def test_a_row_that_cannot_fit_says_what_to_change() -> None:
    with pytest.raises(PackingError, match=r"needs 12 tokens \(prompt 3 \+ completion 10\).*batch.max_tokens = 8"):
        pack_step([Row([1] * 3, [2] * 10, [True] * 10, 1.0, [0.0] * 10)], max_tokens=8)


def test_old_logprobs_for_some_rows_only_are_refused() -> None:
    rows = [Row([1], [2], [True], 1.0, [0.0], [0.0]), Row([1], [3], [True], 1.0, [0.0])]
    with pytest.raises(PackingError, match="Some rows of one pass have old_logprobs"):
        pack(rows, [0, 1], max_tokens=10)


def test_dtypes() -> None:
    rows = random_rows([[3]], drift=0.1)
    batch = pack(rows, [0], max_tokens=100)[0]
    assert batch.advantages.dtype == batch.rollout_logprobs.dtype == torch.float32
    assert batch.old_logprobs is not None and batch.old_logprobs.dtype == torch.float32
    assert batch.cu_seqlens.dtype == torch.int32


def routed(row: Row, start: int, prompt_start: int = 0) -> Row:
    """Two layers of one expert; the numbers say which token it is: prompt from ``prompt_start``, completion behind."""
    prompt = np.arange(prompt_start, prompt_start + len(row.prompt_ids), dtype=np.uint8)
    completion = np.concatenate([prompt[-1:], np.arange(start, start + len(row.token_ids) - 1, dtype=np.uint8)])
    experts = [np.repeat(numbers, 2).reshape(-1, 2, 1) for numbers in (prompt, completion)]
    return replace(row, routing=Routing(*experts))


def test_experts_lie_where_their_tokens_lie() -> None:
    prompt, other = [1, 2, 3], [7, 8]
    parts = [(prompt, [4, 5, 6, 9]), (prompt, [4]), (other, [5, 6]), (prompt, [6, 7])]
    rows = [Row(p, c, [True] * len(c), 1.0, [0.0] * len(c)) for p, c in parts]
    made = [routed(rows[0], 100), routed(rows[1], 110), routed(rows[2], 120, 50), routed(rows[3], 130)]
    (batch,) = pack(made, range(4), max_tokens=100)
    assert batch.rollout_experts is not None and batch.rollout_experts.shape == (batch.num_tokens, 2, 1)
    assert batch.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 6, 7, 8, 5]
    assert batch.rollout_experts[:, 0, 0].tolist() == [0, 1, 2, 100, 101, 102, 130, 50, 51, 120]
    predicted = batch.rollout_experts[batch.predict_index][:, 1, 0].tolist()
    expected = [row.routing.completion[:, 1, 0].tolist() for n in batch.rows for row in [made[n]]]  # type: ignore[union-attr]
    assert predicted == [number for numbers in expected for number in numbers]


def test_prompts_that_used_other_experts_are_not_shared() -> None:
    row = Row([1, 2, 3], [4, 5], [True] * 2, 1.0, [0.0] * 2)
    (batch,) = pack([routed(row, 100), routed(row, 110, 40)], range(2), max_tokens=100)
    assert batch.token_ids.tolist() == [1, 2, 3, 4, 1, 2, 3, 4]
    assert batch.rollout_experts[:, 0, 0].tolist() == [0, 1, 2, 100, 40, 41, 42, 110]  # type: ignore[index]


def shifted(routing: Routing) -> Routing:
    return Routing(routing.prompt, np.concatenate([routing.completion[1:], routing.completion[-1:]]))


CUTS = {
    "completion cut, experts not": (lambda r: Routing(r.prompt, r.completion[:-1]), "routing.completion has 3 entries"),
    "prompt cut": (lambda r: Routing(r.prompt[1:], r.completion), "routing.prompt has 2 entries for 3 prompt tokens"),
    "one token off": (shifted, "the experts are misaligned with the tokens"),
}


@pytest.mark.parametrize("case", CUTS)
def test_experts_not_cut_with_their_tokens_are_refused(case: str) -> None:
    """AReno#524: metadata lost in merging, and a prefix that no longer fits."""
    change, message = CUTS[case]
    row = routed(Row([1, 2, 3], [4, 5, 6, 7], [True] * 4, 1.0, [0.0] * 4), 100)
    with pytest.raises(PackingError, match=message):
        pack_step([replace(row, routing=change(row.routing))], max_tokens=100)


def test_experts_of_some_rows_only_or_of_two_models_are_refused() -> None:
    row = Row([1, 2, 3], [4, 5], [True] * 2, 1.0, [0.0] * 2)
    with pytest.raises(PackingError, match="Some rows of one pass have routing"):
        pack([row, routed(row, 100)], range(2), max_tokens=100)
    other = Routing(np.zeros((3, 4, 2), dtype=np.uint8), np.zeros((2, 4, 2), dtype=np.uint8))
    with pytest.raises(PackingError, match="experts of different models"):
        pack([replace(row, routing=other), routed(row, 100)], range(2), max_tokens=100)
