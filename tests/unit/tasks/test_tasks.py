"""Prompts and rewards: order, splits, and TRL's form of a reward function."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gspo.config import Config
from gspo.errors import DataError, RewardError
from gspo.tasks import RewardSuite, load_task
from gspo.tasks.builtin import BUILTIN, BuiltinSource, heldout_prompts, is_heldout
from gspo.tasks.lists import ListSource, prompt_key, split_heldout
from gspo.types import Prompt


def prompts(count: int) -> list[Prompt]:
    return [Prompt(str(n), f"question {n}", {"answer": str(n)}) for n in range(count)]


@pytest.mark.parametrize("name", BUILTIN)
def test_train_and_held_out_never_share_a_problem(name: str) -> None:
    task = BUILTIN[name]
    train = BuiltinSource(task, 0).take(1500)
    heldout = heldout_prompts(task, 256)
    assert len({prompt.content for prompt in heldout}) == 256
    assert not {prompt.content for prompt in train} & {prompt.content for prompt in heldout}
    assert all(is_heldout(prompt.prompt_id.removeprefix(f"{name}/")) for prompt in heldout)


@pytest.mark.parametrize("name", BUILTIN)
def test_the_worked_solution_is_fully_right_and_junk_is_not(name: str) -> None:
    task = BUILTIN[name]
    asked = BuiltinSource(task, 0).take(50)
    suite = RewardSuite(task.rewards, task.weights)
    gold = suite.score(asked, [prompt.columns["solution"] for prompt in asked], [[0]] * 50)
    junk = suite.score(asked, ["I do not know the answer, sorry 7"] * 50, [[0]] * 50)
    assert all(score.reward == pytest.approx(1.0) and next(iter(score.terms.values())) == 1.0 for score in gold)
    assert all(next(iter(score.terms.values())) == 0.0 and score.reward < 0.6 for score in junk)
    empty = suite.score(asked, [""] * 50, [[0]] * 50)
    assert all(score.reward == 0.0 for score in empty)


@pytest.mark.parametrize(
    ("name", "shortest", "longest"),
    [("sort_letters", 8, 16), ("insertion_sort", 43, 118), ("fibonacci_long", 335, 839)],
)
def test_how_long_answers_get(name: str, shortest: int, longest: int) -> None:
    lengths = [len(prompt.columns["solution"]) for prompt in BuiltinSource(BUILTIN[name], 0).take(400)]
    assert min(lengths) == shortest and max(lengths) == longest


def test_worked_solutions_are_right_work() -> None:
    """Checked by other means than the tasks use."""
    for prompt in BuiltinSource(BUILTIN["insertion_sort"], 0).take(20):
        given = prompt.columns["solution"].splitlines()
        asked = str(prompt.content).split()[-1]
        assert all(sorted(line) == list(line) and set(line) == set(asked[: n + 1]) for n, line in enumerate(given))
    for prompt in BuiltinSource(BUILTIN["fibonacci"], 0).take(20):
        lines = [str(prompt.content).removeprefix("go on to 00: "), *prompt.columns["solution"].splitlines()]
        rows = [[int(word) for word in re.split("[ +=]", line)] for line in lines]
        assert [line[:2] for line in lines] == [f"{left:02d}" for left in range(len(lines))][::-1]
        assert all((a + b - c) % 10 == 0 and (a // 10 + b // 10 - c // 10) % 10 == 0 for _, a, b, c in rows)
        assert [(a, b) for _, a, b, _ in rows[1:]] == [(b, c) for _, _, b, c in rows[:-1]]


def test_part_of_the_work_is_part_of_the_reward() -> None:
    for name in ("insertion_sort", "fibonacci"):
        task, prompt = BUILTIN[name], BuiltinSource(BUILTIN[name], 0).take(1)[0]
        lines = prompt.columns["solution"].splitlines()
        wrong = [*lines[:3], lines[3][::-1] + "x", *lines[4:]]
        found = RewardSuite(task.rewards, task.weights).score(
            [prompt] * 2, ["\n".join(wrong), "\n".join(lines[:-1])], [[0]] * 2
        )
        assert [score.terms["right_lines"] for score in found] == [3 / len(lines), 1 - 1 / len(lines)]
        assert [score.terms["correct"] for score in found] == [1.0, 0.0]


def test_running_total_runs_to_hundreds_of_tokens() -> None:
    lengths = [len(prompt.columns["solution"]) for prompt in BuiltinSource(BUILTIN["running_total"], 0).take(50)]
    assert min(lengths) > 120 and max(lengths) > 250


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("addition", "12 + 30 = 42", [1.0, 1.0, 1.0]),
        ("addition", "42\nI am sure.", [1.0, 1.0, 0.0]),
        ("addition", "The answer is 43.", [0.0, 0.5, 1.0]),
        ("addition", "142", [0.0, 0.0, 1.0]),
        ("sort_words", "Apple, zebra", [1.0, 1.0]),
        ("sort_words", "apple zebra zebra", [0.0, 2 / 3]),
        ("vowels", "aei", [1.0, 1.0]),
        ("vowels", "aebb", [0.0, 0.5]),
    ],
)
def test_what_the_built_in_rewards_count(name: str, text: str, expected: list[float]) -> None:
    answer = {"addition": "42", "sort_words": "apple zebra", "vowels": "a"}[name]
    found = [reward(completions=[text], answer=[answer]) for reward in BUILTIN[name].rewards]
    assert [value for values in found for value in values] == pytest.approx(expected)


@pytest.mark.parametrize(
    "make", [lambda seed: ListSource(prompts(7), seed), lambda seed: BuiltinSource(BUILTIN["addition"], seed)]
)
def test_a_source_goes_on_exactly_where_it_was(make: Any) -> None:
    """Stopped inside an epoch, at its very end, and inside the next."""
    straight = make(0).take(40)
    for cut in (3, 7, 10, 14):
        first = make(0)
        before = first.take(cut)
        second = make(0)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert before + second.take(40 - cut) == straight
    assert make(1).take(40) != straight
    assert make(0).fingerprint == make(0).fingerprint != make(1).fingerprint


def test_an_epoch_has_every_prompt_once_in_a_new_order() -> None:
    source = ListSource(prompts(20), 0)
    first, second = source.take(20), source.take(20)
    assert {p.prompt_id for p in first} == {p.prompt_id for p in second} == {str(n) for n in range(20)}
    assert first != second


def test_the_order_is_the_same_in_another_process() -> None:
    code = (
        "from tests.unit.tasks.test_tasks import *; "
        "print([p.prompt_id for p in ListSource(prompts(20), 3).take(30)], "
        "[p.content for p in BuiltinSource(BUILTIN['sort_words'], 3).take(5)])"
    )
    root = str(Path(__file__).resolve().parents[3])
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            cwd=root,
            env=os.environ | {"PYTHONHASHSEED": str(n)},
            check=True,
        ).stdout
        for n in (1, 2)
    }
    assert len(outputs) == 1


def test_equal_prompts_land_on_one_side_of_the_split() -> None:
    rows = [*prompts(100), *[Prompt(f"again{n}", f"question {n}", {}) for n in range(100)]]
    train, heldout = split_heldout(rows, 256, "rows")
    assert len(heldout) == 10
    assert not {prompt_key(p) for p in train} & {prompt_key(p) for p in heldout}
    with pytest.raises(DataError, match="one distinct prompt"):
        split_heldout([*prompts(1), *prompts(1)], 5, "rows")


def test_columns_reach_rewards_unchanged_and_absent_ones_stay_absent(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text(
        '{"prompt": "a", "answer": {"x": [1, 2]}, "id": 5}\n'
        '{"prompt": [{"role": "user", "content": "b"}]}\n'
        '{"prompt": "c"}\n'
    )
    (tmp_path / "r.py").write_text("def f(completions, **columns):\n    return [1.0] * len(completions)\n")
    config = Config().with_values(
        {"task.prompts": str(tmp_path / "p.jsonl"), "task.reward": (f"{tmp_path}/r.py:f",), "eval.every": 0}
    )
    task = load_task(config)
    rows = {prompt.prompt_id: prompt for prompt in task.train.take(3)}
    assert rows["5"].columns == {"answer": {"x": [1, 2]}, "id": 5}
    assert rows["p/2"].columns == {} and rows["p/2"].content == [{"role": "user", "content": "b"}]


def test_a_reward_function_written_for_trl_runs_unchanged() -> None:
    """Chat prompts: completions are message lists; text prompts: strings; columns by name; extra ones in **kwargs."""
    seen: dict[str, Any] = {}

    def reward(prompts: Any, completions: Any, answer: Any, **kwargs: Any) -> list[float]:
        seen.update(prompts=prompts, completions=completions, answer=answer, kwargs=kwargs)
        return [1.0 for _ in completions]

    chat = Prompt("1", [{"role": "user", "content": "hi"}], {"answer": "x", "level": 3})
    RewardSuite([reward], [1.0]).score([chat], ["hello"], [[5, 6]])
    assert seen["completions"] == [[{"role": "assistant", "content": "hello"}]]
    assert seen["prompts"] == [[{"role": "user", "content": "hi"}]]
    assert seen["answer"] == ["x"] and seen["kwargs"] == {"level": [3], "completion_ids": [[5, 6]]}
    RewardSuite([reward], [1.0]).score([Prompt("2", "hi", {"answer": "x"})], ["hello"], [[5]])
    assert seen["completions"] == ["hello"] and seen["prompts"] == ["hi"]


def test_declared_names_only_and_async() -> None:
    """trl#4939: without **kwargs a function gets what it declares."""

    async def later(completions: list[str]) -> list[float]:
        return [float(len(text)) for text in completions]

    def plain(completions: list[str], answer: list[str]) -> list[bool]:
        return [a == b for a, b in zip(completions, answer, strict=True)]

    asked = [Prompt("1", "q", {"answer": "ab", "other": 1})] * 2
    scores = RewardSuite([later, plain], [1.0, 10.0]).score(asked, ["ab", "c"], [[1], [1]])
    assert [score.reward for score in scores] == [12.0, 1.0]
    assert scores[0].terms == {"later": 2.0, "plain": 1.0}


def test_unscored_terms_and_answers() -> None:
    def sometimes(completions: list[str]) -> list[float | None]:
        return [None, float("nan"), 1.0]

    def always(completions: list[str]) -> list[float]:
        return [0.5] * 3

    rows = [Prompt(str(n), "q") for n in range(3)]
    alone = RewardSuite([sometimes], [1.0]).score(rows, ["", "", ""], [[1]] * 3)
    assert [score.reward for score in alone] == [None, None, 1.0]
    both = RewardSuite([sometimes, always], [1.0, 1.0]).score(rows, ["", "", ""], [[1]] * 3)
    assert [score.reward for score in both] == [0.5, 0.5, 1.5]
    assert both[0].terms == {"sometimes": None, "always": 0.5}


def test_every_function_is_called_and_names_are_distinct() -> None:
    """trl#3876: two of three functions were dropped by a short zip."""

    def make(value: float) -> Any:
        def same(completions: list[str]) -> list[float]:
            return [value]

        return same

    def own(completions: list[str]) -> list[float]:
        return [0.0]

    own.__name__ = "same_3"
    (score,) = RewardSuite([own, make(1.0), make(2.0), make(4.0)], [1.0] * 4).score([Prompt("1", "q")], [""], [[1]])
    assert score.reward == 7.0 and list(score.terms) == ["same_3", "same", "same_2", "same_4"]
    (score,) = RewardSuite([make(1.0), make(2.0), make(4.0)], [1.0, 1.0, 1.0]).score([Prompt("1", "q")], [""], [[1]])
    assert score.reward == 7.0 and list(score.terms) == ["same", "same_2", "same_3"]
    with pytest.raises(RewardError, match="3 reward functions and 2 weights"):
        RewardSuite([make(1.0)] * 3, [1.0, 1.0])


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ([1.0], "returned 1 scores for 4 completions"),
        ([1.0] * 3, "returned 3 scores"),
        ([1.0] * 5, "returned 5 scores"),
        (1.0, "must return a list of 4 numbers"),
        ("good", "must return a list of 4 numbers"),
        (None, "must return a list of 4 numbers"),
        (["good"] * 4, "gave 'good' for an answer to prompt 0"),
        ([0.0, 1.0, float("inf"), 0.0], "gave inf for an answer to prompt 2"),
        ([{}] * 4, "gave {}"),
    ],
)
def test_what_is_not_a_list_of_scores_is_an_error(returned: Any, expected: str) -> None:
    """trl#6533: one score for four answers was broadcast."""

    def odd(completions: list[str]) -> Any:
        return returned

    with pytest.raises(RewardError, match="reward function odd") as error:
        RewardSuite([odd], [1.0]).score(prompts(4), [""] * 4, [[1]] * 4)
    assert expected in str(error.value)


def test_arrays_ints_and_bools_are_scores() -> None:
    import numpy as np
    import torch

    for returned in (np.array([1.0, 0.0]), torch.tensor([1, 0]), [True, False], (1, 0), [np.float32(1), np.int64(0)]):
        scores = RewardSuite([lambda completions, value=returned: value], [2.0]).score(prompts(2), ["", ""], [[1]] * 2)
        assert [score.reward for score in scores] == [2.0, 0.0]
