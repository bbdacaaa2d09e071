"""exact, text, number, choice: what is read from an answer, and what never pays."""

from __future__ import annotations

import string
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo.errors import ConfigError, RewardError
from gspo.tasks.functions import load_reward
from gspo.tasks.graders import GRADERS, find
from gspo.tasks.graders.answers import answer_part, text_of
from gspo.tasks.graders.choice import choice, chosen
from gspo.tasks.graders.text import exact, last_number, normalized, number, text

anything = st.text(st.sampled_from(string.ascii_letters + string.digits + " \n.,:-()[]<>/\\{}*$#="), max_size=60)


@pytest.mark.parametrize("name", GRADERS)
def test_a_short_name_loads_the_grader(name: str) -> None:
    assert load_reward(name) is find(name)
    assert find(name).__name__ == name


def test_an_unknown_name_is_told_the_others() -> None:
    with pytest.raises(ConfigError, match=r"'maths' must be .*: math, exact, text, number, choice, format, json, code"):
        load_reward("maths")


def test_a_missing_library_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for name in ("math", "json"):
        with pytest.raises(ConfigError, match=r"pip install 'gspo\[graders\]'"):
            find(name)
    assert find("choice") is choice


def test_the_text_of_a_completion() -> None:
    assert text_of("4") == "4"
    assert text_of([{"role": "assistant", "content": "4"}]) == "4"
    assert text_of([{"role": "assistant", "content": None}]) == ""
    assert text_of([]) == ""
    for mark in ("<|im_end|>", "</s>", "<|endoftext|>\n<|endoftext|>"):
        assert text_of("4" + mark) == "4"
    assert text_of("<|im_end|> 4") == "<|im_end|> 4"


@pytest.mark.parametrize(
    ("said", "part"),
    [
        ("42", "42"),
        ("Well\n<answer>\n42\n</answer>.", "42"),
        ("<answer>1</answer> no, <answer>42</answer>", "42"),
        ("<think>is it 7?</think>42", "42"),
        ("is it 7?</think>\n42", "42"),  # the prompt opened it
        ("<think><answer>7</answer></think><answer>42</answer>", "42"),
        ("<think><answer>7</answer></think>42", "42"),
        ("<think>it is 42", ""),  # cut while thinking
        ("<think>a</think>b<think>42", ""),
        ("<answer>42", "<answer>42"),
    ],
)
def test_the_answer_part(said: str, part: str) -> None:
    assert answer_part(said) == part


def test_exact_and_text() -> None:
    said = ["Lima", " Lima\n", "lima", "Lima.", "", "Lima is it", '"**Lima**"', "Ｌｉｍａ"]
    gold = ["Lima"] * len(said)
    assert exact(said, gold) == [1, 1, 0, 0, 0, 0, 0, 0]
    assert text(said, gold) == [1, 1, 1, 1, 0, 0, 1, 1]
    assert text(["new  york\ncity"], ["New York City"]) == [1]
    assert text(["1.5"], ["15"]) == [0]


def test_gold_values() -> None:
    assert exact(["a"] * 4, [["b", "a"], "a", None, ""]) == [1, 1, None, None]
    assert exact(["a", "b"], None, ["a", "a"]) == [1, 0]
    assert exact(["a", "b"], [None, "b"], ["a", "a"]) == [1, 1]
    assert exact(["7"], [7]) == [1]
    with pytest.raises(RewardError, match="exact needs a column 'answer' or 'solution'"):
        exact(["a"])


@given(anything)
def test_text_is_equal_to_itself_and_nothing_is_never_right(value: str) -> None:
    assert normalized(normalized(value)) == normalized(value)
    for grader in (exact, text):
        assert grader([""], [value]) in ([0.0], [None])
    if "<" not in value and normalized(value):
        assert text([value], [value]) == [1]


@pytest.mark.parametrize(
    ("said", "value"),
    [
        ("72", 72), ("The answer is 72.", 72), ("#### 72", 72), ("= 72 apples", 72), ("$1,234.50", Fraction(2469, 2)),
        ("-3", -3), ("−3", -3), ("5-3", 3), ("x=-3", -3), ("1e3", 1000), ("2.5E-1", Fraction(1, 4)),
        (".5", Fraction(1, 2)),
        ("50%", 50), ("3/4", Fraction(3, 4)), ("-3/4", Fraction(-3, 4)), ("3 + 4 = 7", 7), ("1,2", 2), ("007", 7),
        ("8/0 or 4", 4), ("no number", None), ("", None), ("x2", None), ("1" * 61, None), ("1e9999", None),
        ("**12**", 12), ("\\boxed{12}", 12), ("12,", 12),
    ],
)  # fmt: skip
def test_the_last_number(said: str, value: Fraction | None) -> None:
    assert last_number(said) == value


def test_number() -> None:
    said = ["so 72", "72.0", "71", "none", "<think>72", "72 or 73"]
    assert number(said, ["72"] * 6) == [1, 1, 0, 0, 0, 0]
    assert number(["72"] * 5, ["6*12 = 72 #### 72", 72, 72.0, None, "many"]) == [1, 1, 1, None, None]


@given(st.fractions(max_denominator=1000), anything)
def test_a_number_is_read_back(value: Fraction, before: str) -> None:
    assert last_number(f"{before}: {value}") == value


@pytest.mark.parametrize(
    ("said", "letter"),
    [
        ("B", "B"), ("b", "B"), ("(B)", "B"), ("B.", "B"), ("**B**", "B"), ("Answer: B", "B"), ("answer: (B)", "B"),
        ("The answer is B.", "B"), ("The correct answer is: **B**", "B"), ("the answer is (B) because A is wrong", "B"),
        ("I pick option C", "C"), ("A? The answer is A. No: the answer is B", "B"), ("\\boxed{B}", "B"),
        ("\\boxed{\\text{B}}", "B"), ("It must be (B), Paris", "B"), ("B. Paris", "B"), ("B) Paris", "B"),
        ("So:\nB. Paris", "B"), ("(B) and again (B)", "B"), ("Answer: B\nA, C and D are wrong.", "B"),
        ("", None), ("Paris", None), ("A B C D", None), ("A, B, C, D", None), ("(A) (B) (C) (D)", None),
        ("A. x\nB. y\nC. z\nD. w", None), ("Answer: A, B, C, D", None), ("Answer: A or B", None),
        ("The answer is (A) or (B)", None), ("Answer: A/B/C", None), ("The answer is not B", None),
        ("I don't know", None),
        ("The answer is I don't know", None), ("Answer: ABCD", None), ("A cat", None),
    ],
)  # fmt: skip
def test_the_chosen_letter(said: str, letter: str | None) -> None:
    assert chosen(said) == letter


def test_choice() -> None:
    assert choice(["B"] * 8, ["B", "(B)", "b", "B. Paris", 1, "A", None, "Paris"]) == [1, 1, 1, 1, 1, 0, None, None]
    assert choice(["B", "B"], [True, -1]) == [None, None]


@given(
    st.one_of(
        anything, st.lists(st.sampled_from(["A", "(B)", "C.", "Answer: D", " or ", ", ", "\n", "option "])).map("".join)
    )
)
def test_no_text_is_right_for_two_letters(said: str) -> None:
    assert sum(score or 0 for score in choice([said] * 26, list(string.ascii_uppercase))) <= 1
