"""Graders that compare text: ``exact``, ``text`` (normalised) and ``number``."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from gspo.tasks.graders.answers import answer_part, golds, text_of

_NUMBER = re.compile(
    r"(?<![\w.])(?P<sign>[-+−])?[$€£]?\s?(?P<whole>\d{1,3}(?:,\d{3})++(?!\d)|\d++)?(?P<rest>\.\d++)?"
    r"(?P<power>[eE][-+]?\d{1,3}(?!\d)|(?![eE][-+]?\d))(?P<under>\s?/\s?\d++(?!\w|\.\d|/))?"
)
_LONGEST = 60
"""Digits of the longest number that is compared; a longer one is none."""

_QUOTES = "\"'`“”‘’«»*"


def exact(
    completions: Sequence[Any], answer: Sequence[Any] | None = None, solution: Sequence[Any] | None = None
) -> list[float | None]:
    """1 when the answer part is the gold text, character by character, apart from blanks around both."""
    return _compare("exact", completions, answer, solution, str.strip)


def text(
    completions: Sequence[Any], answer: Sequence[Any] | None = None, solution: Sequence[Any] | None = None
) -> list[float | None]:
    """1 when both are equal after ``normalized``."""
    return _compare("text", completions, answer, solution, normalized)


def number(
    completions: Sequence[Any], answer: Sequence[Any] | None = None, solution: Sequence[Any] | None = None
) -> list[float | None]:
    """1 when the last number of the answer part equals the last number of the gold value, exactly."""
    right = [
        _last_gold_number(gold)
        for gold in golds("number", len(completions), ("answer", answer), ("solution", solution))
    ]
    found = [last_number(answer_part(text_of(completion))) for completion in completions]
    return [None if gold is None else float(said == gold) for said, gold in zip(found, right, strict=True)]


def normalized(value: str) -> str:
    """Compatibility characters replaced (NFKC), case folded, runs of blanks as one; quotes, asterisks and blanks
    around it and full stops at its end removed."""
    folded = " ".join(unicodedata.normalize("NFKC", value).casefold().split())
    return folded.strip(_QUOTES + " ").rstrip(".!?,;:" + _QUOTES + " ").strip(_QUOTES + " ")


def last_number(value: str) -> Fraction | None:
    """The last number: 12, -3.50, 1,234, 2e3, 3/4. Currency signs and % are left out; None when there is none."""
    for match in reversed(list(_NUMBER.finditer(value[-10_000:]))):
        if (match["whole"] or match["rest"]) and (found := _fraction(match)) is not None:
            return found
    return None


def _fraction(match: re.Match[str]) -> Fraction | None:
    digits = (match["whole"] or "0").replace(",", "") + (match["rest"] or "")
    under = int((match["under"] or "1").strip(" /")[:_LONGEST])
    if len(digits) > _LONGEST or under == 0:
        return None
    value = Fraction(digits + (match["power"] or "")) / under
    return -value if match["sign"] in ("-", "−") else value


def _last_gold_number(gold: Any) -> Fraction | None:
    if gold is None or isinstance(gold, bool):
        return None
    return last_number(str(gold).rpartition("####")[2])


def _compare(
    name: str,
    completions: Sequence[Any],
    answer: Sequence[Any] | None,
    solution: Sequence[Any] | None,
    rule: Callable[[str], str],
) -> list[float | None]:
    """A gold value that is a list names several right answers. Without any text in it the answer is unscored."""
    scores: list[float | None] = []
    for completion, gold in zip(
        completions, golds(name, len(completions), ("answer", answer), ("solution", solution)), strict=True
    ):
        accepted = {rule(str(value)) for value in (gold if isinstance(gold, list) else [gold]) if value is not None}
        accepted.discard("")
        said = rule(answer_part(text_of(completion)))
        scores.append(float(said in accepted) if accepted else None)
    return scores
