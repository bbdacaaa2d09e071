"""format and json: the form of an answer."""

from __future__ import annotations

import json as standard_json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo.errors import RewardError
from gspo.tasks.graders.format import format
from gspo.tasks.graders.json import json

GOOD = "<think>\nfirst\n\nthen\n</think>\n<answer>\n42\n</answer>\n"


@pytest.mark.parametrize(
    ("said", "score"),
    [
        (GOOD, 1),  # line ends inside the tags
        ("<think></think><answer>42</answer>", 1),
        (GOOD + "<|im_end|>", 1),  # an end token after it
        ("first</think><answer>42</answer>", 1),  # the chat template opened the thinking
        ("", 0),
        ("42", 0),
        ("<answer>42</answer>", 0),
        ("<think>a</think>42", 0),
        ("<think>a</think><answer> \n</answer>", 0),
        (GOOD + GOOD, 0),  # many pairs
        ("<think>a</think>" + GOOD, 0),
        ("<think>a</think><answer>1</answer><answer>2</answer>", 0),
        ("<think><think>a</think><answer>42</answer>", 0),
        ("<answer>42</answer><think>a</think>", 0),
        ("<think>a<answer>42</answer></think>", 0),
        ("Sure! " + GOOD, 0),
        (GOOD + "So it is 42.", 0),
        ("<think>a</think> so <answer>42</answer>", 0),
        ("<think>a</think><answer>42", 0),
    ],
)
def test_the_form(said: str, score: float) -> None:
    assert format([said], ["What?"]) == [score]
    assert format([[{"role": "assistant", "content": said}]], [[{"role": "user", "content": "What?"}]]) == [score]


def test_a_tag_in_the_prompt_counts() -> None:
    rest = GOOD.removeprefix("<think>")
    for prompt in ("What?\n<think>\n", [{"role": "user", "content": "?"}, {"role": "assistant", "content": "<think>"}]):
        assert format([rest, GOOD, "", "</think>"], [prompt] * 4) == [1, 0, 0, 0]
    assert format([rest], [[{"role": "user", "content": "Begin with <think>"}]]) == [1]
    assert format(["a <answer>42</answer>"], ["What?<think>"]) == [0]


@given(st.lists(st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", "x", " ", "\n"]), max_size=9))
def test_against_a_scanner(pieces: list[str]) -> None:
    """The same form, told by taking tags off one by one."""
    said = "".join(pieces)
    state, content, right = 0, "", True
    body = [piece for piece in pieces if piece.strip()]
    if body and body[0] != "<think>" and "</think>" in body:
        body.insert(0, "<think>")
    for piece in body:
        wanted = ("<think>", "</think>", "<answer>", "</answer>", None)[state]
        if piece == wanted:
            state += 1
        elif piece == "x" and state in (1, 3):
            content += "x" if state == 3 else ""
        else:
            right = False
    assert format([said], ["?"]) == [float(right and state == 4 and content != "")]


SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}


@pytest.mark.parametrize(
    ("said", "score"),
    [
        ('{"age": 3}', 1),
        ('Here:\n```json\n{"age": 3}\n```\nDone.', 1),
        ('```\n{"age": "x"}\n```\nor\n```\n{"age": 3}\n```', 1),
        ('<think>hm</think> {"age": 3}', 1),
        ('<answer>{"age": 3}</answer>', 1),
        ('{"age": "3"}', 0),
        ("{}", 0),
        ('{"age": 3} and more', 0),
        ("{'age': 3}", 0),
        ('{"age": NaN}', 0),
        ("", 0),
        ("[" * 100_000, 0),
        ('{"age": ' + "9" * 5000 + "}", 0),
    ],
)
def test_json(said: str, score: float) -> None:
    assert json([said], [SCHEMA]) == [score]
    assert json([said], [standard_json.dumps(SCHEMA)]) == [score]


def test_schemas_that_are_none_are_unscored() -> None:
    assert (
        json(["3"] * 5, [None, "not json", {"type": "strange"}, 5, {"$ref": "https://example.org/s.json"}])
        == [None] * 5
    )
    assert json(["3", "3"], [True, False]) == [1, 0]
    with pytest.raises(RewardError, match="json needs a column 'schema'"):
        json(["3"], None)  # type: ignore[arg-type]
