"""``choice``: one letter out of several. The letter is read without a look at the right one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from gspo.tasks.graders.answers import answer_part, golds, text_of

_LETTER = r"[*_`]{0,2}[(\[]?[*_`]{0,2}([A-Z])[*_`]{0,2}[)\]]?[*_`]{0,2}(?!['’\w]|(?<=I)\s+[a-z])"
_BOXED = re.compile(r"\\boxed\{\s*(?:\\text(?:bf)?\{)?\s*\(?([A-Z])\)?\s*\}")
_SAID = re.compile(rf"(?i:\b(?:answer|option|choice)\b(?:\s+(?:is|option|choice))*)[*_`]{{0,2}}\s*[:=]?\s*{_LETTER}")
_ALONE = re.compile(r"[*_`\s]*[(\[]?[*_`]*([A-Za-z])[*_`]*[)\]]?[*_`\s.:]*")
_MARKED = re.compile(
    r"(?<![\w(\[])(?:[(\[]([A-Z])[)\]]|\*\*([A-Z])[.):]?\*\*)(?!\w)|^\s*([A-Z])[.):](?=\s)", re.MULTILINE
)
_MORE = re.compile(r"\s*(?:,|/|&|\bor\b|\band\b)\s*(?:\bor\b\s*|\band\b\s*)?[*_`]{0,2}[(\[]?[A-Z](?![\w'’])")


def choice(
    completions: Sequence[Any], answer: Sequence[Any] | None = None, solution: Sequence[Any] | None = None
) -> list[float | None]:
    """1 when ``chosen`` reads the gold letter. Gold: B, (B), "B. Paris", or a place counted from 0."""
    right = [
        _gold_letter(gold) for gold in golds("choice", len(completions), ("answer", answer), ("solution", solution))
    ]
    found = [chosen(answer_part(text_of(completion))) for completion in completions]
    return [None if gold is None else float(said == gold) for said, gold in zip(found, right, strict=True)]


def chosen(text: str) -> str | None:
    """The one letter that a text chooses, upper case; None when it chooses none or several.

    By the first of these that finds anything: the last ``\\boxed{B}``; a text that is nothing but a letter; the last
    "answer is B" / "Answer: (B)" / "option B", unless it goes on with more letters; the only letter in parentheses, in
    bold, or before a full stop at the start of a line.
    """
    if boxed := _BOXED.findall(text):
        return str(boxed[-1])
    if alone := _ALONE.fullmatch(text):
        return alone[1].upper()
    if said := list(_SAID.finditer(text)):
        return None if _MORE.match(text, said[-1].end()) else said[-1][1]
    letters = {letter for match in _MARKED.findall(text) for letter in match if letter}
    return letters.pop() if len(letters) == 1 else None


def _gold_letter(gold: Any) -> str | None:
    if isinstance(gold, int) and not isinstance(gold, bool):
        return chr(ord("A") + gold) if 0 <= gold < 26 else None
    match = re.match(r"\s*[(\[]?([A-Za-z])[)\].:]*(?:\s|$)", gold) if isinstance(gold, str) else None
    return match[1].upper() if match else None
