"""Rows of any origin become Prompts by one rule."""

from __future__ import annotations

import datetime
import decimal
import fractions
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from gspo.errors import DataError
from gspo.tasks import prompts_from_rows
from gspo.tasks.lists import ListSource
from gspo.types import Prompt


def test_lists_generators_and_prompts_are_rows() -> None:
    ready = Prompt("mine", "c", {"answer": 3})

    def rows() -> Iterator[Any]:
        yield {"prompt": "a", "answer": 1}
        yield {"prompt": [{"role": "user", "content": "b"}], "id": 7}
        yield ready

    found = prompts_from_rows(rows(), "rows")
    assert [prompt.prompt_id for prompt in found] == ["rows/1", "7", "mine"]
    assert found[1].content == [{"role": "user", "content": "b"}] and found[2] is ready
    assert [dict(prompt.columns) for prompt in found] == [{"answer": 1}, {"id": 7}, {"answer": 3}]


def test_absent_is_not_none() -> None:
    absent, none = prompts_from_rows([{"prompt": "a"}, {"prompt": "b", "answer": None}], "rows")
    assert "answer" not in absent.columns and none.columns == {"answer": None}


def test_values_become_plain_and_plain_ones_stay() -> None:
    same = {"text": "é", "nested": {"list": [1, 2.5, None, True, {"deep": []}]}, "big": 10**30}
    odd = {
        "scalar": np.float32(0.5),
        "whole": np.int64(3),
        "flag": np.bool_(True),
        "word": np.str_("x"),
        "array": np.array([[1, 2], [3, 4]]),
        "objects": np.array(["a", None], dtype=object),
        "pair": (1, np.int8(2)),
        "date": datetime.date(2024, 5, 1),
        "moment": datetime.datetime(2024, 5, 1, 12, 30, tzinfo=datetime.UTC),
        "time": datetime.time(9, 15),
        "lapse": datetime.timedelta(minutes=1.5),
        "money": decimal.Decimal("0.10"),
        "part": fractions.Fraction(1, 3),
        "day": np.datetime64("2024-05-01"),
        "fine": np.array(["2024-05-01T12:30:00.5", "NaT"], dtype="datetime64[ns]"),
        "tensor": torch.tensor([1, 2]),
        "keys": {1: "one"},
    }
    expected = {
        "scalar": 0.5,
        "whole": 3,
        "flag": True,
        "word": "x",
        "array": [[1, 2], [3, 4]],
        "objects": ["a", None],
        "pair": [1, 2],
        "date": "2024-05-01",
        "moment": "2024-05-01T12:30:00+00:00",
        "time": "09:15:00",
        "lapse": 90.0,
        "money": "0.10",
        "part": "1/3",
        "day": "2024-05-01",
        "fine": ["2024-05-01T12:30:00.500000", None],
        "tensor": [1, 2],
        "keys": {"1": "one"},
    }
    (prompt,) = prompts_from_rows([{"prompt": np.str_("q")} | same | odd], "rows")
    assert prompt.columns == same | expected
    assert json.loads(json.dumps(prompt.columns)) == prompt.columns and type(prompt.content) is str
    assert all(type(prompt.columns[key]) is type(value) for key, value in expected.items())


BAD: dict[str, tuple[Any, str]] = {
    "no prompt": ([{"prompt": "a"}, {"answer": 1}], "rows, row 2: the row has no 'prompt'; its keys are ['answer']."),
    "another name": ([{"question": "a", "x": 1}], "Set task.prompt_column = 'question' to use that one."),
    "a slip": ([{"promt": "a"}], "Set task.prompt_column = 'promt'"),
    "not a row": ([{"prompt": "a"}, "b"], "rows, row 2: expected a JSON object"),
    "a number": ([{"prompt": 5}], "row 1: 'prompt' must be text or a list of messages with 'role' and 'content'"),
    "blank": ([{"prompt": " \n"}], "row 1: 'prompt' must be text"),
    "message without a role": ([{"prompt": [{"content": "a"}]}], "row 1: 'prompt' must be text"),
    "role of a wrong type": ([{"prompt": [{"role": None, "content": "a"}]}], "row 1: 'prompt' must be text"),
    "an object": ([{"prompt": "a", "image": object()}], "row 1: the column 'image' holds a object"),
    "bytes deep inside": ([{"prompt": "a", "x": [{"y": b"z"}]}], "row 1: the column 'x' holds a bytes"),
    "a reserved name": ([{"prompt": "a", "completion_ids": 1}], "row 1: the column 'completion_ids' is reserved"),
    "an empty Prompt": ([Prompt("1", "")], "row 1: 'prompt' must be text"),
    "no rows": ([], "rows has no rows"),
    "a dictionary of columns": ({"prompt": ["a"]}, "rows: expected rows"),
    "text": ("prompt", "rows: expected rows"),
    "nothing": (None, "rows: expected rows"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_row_is_named(case: str) -> None:
    rows, expected = BAD[case]
    with pytest.raises(DataError) as error:
        prompts_from_rows(rows, "rows")
    assert expected in str(error.value)


def test_the_prompt_may_have_another_name() -> None:
    (prompt,) = prompts_from_rows([{"question": "a", "answer": 1}], "rows", "question")
    assert prompt.content == "a" and prompt.columns == {"answer": 1}
    with pytest.raises(DataError, match="has no 'question'"):
        prompts_from_rows([{"prompt": "a"}], "rows", "question")


def test_the_fingerprint_changes_with_anything_that_a_run_sees() -> None:
    def of(*rows: dict[str, Any], seed: int = 0, shuffle: bool = True) -> str:
        return ListSource(prompts_from_rows(rows, "rows"), seed, shuffle).fingerprint

    a, b = {"prompt": "a", "id": 1, "answer": {"x": [1]}}, {"prompt": "b", "id": 2, "answer": {"x": [2]}}
    others = [
        of(b, a),
        of(a),
        of(a, b, a),
        of(a, b | {"answer": {"x": [3]}}),
        of(a, b | {"level": None}),
        of(a, b | {"id": 3}),
        of(a, b | {"prompt": "c"}),
        of(a, b, seed=1),
        of(a, b, shuffle=False),
    ]
    assert of(a, b) == of(dict(reversed(a.items())), b)
    assert len({of(a, b), *others}) == 1 + len(others)


def test_without_shuffle_every_epoch_has_the_order_of_the_list() -> None:
    """trl#2998: shuffle off -> the file's order; on -> repeatable, other each epoch and for another seed."""
    rows = prompts_from_rows([{"prompt": str(n)} for n in range(30)], "rows")
    plain = [prompt.content for prompt in ListSource(rows, 0, shuffle=False).take(60)]
    assert plain == [str(n) for n in range(30)] * 2
    first, again, other = ([p.content for p in ListSource(rows, seed).take(60)] for seed in (0, 0, 1))
    assert first == again != other
    assert len({tuple(first[:30]), tuple(first[30:]), tuple(other[:30]), tuple(plain[:30])}) == 4
    assert sorted(first[:30]) == sorted(first[30:]) == sorted(plain[:30])
