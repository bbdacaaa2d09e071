"""Two-digit addition."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

WORDING = "Calculate {a} + {b}. Reply with just the number."


def make(rng: random.Random) -> tuple[str, str, Mapping[str, Any]]:
    """(key, prompt, columns) of one problem."""
    a, b = rng.randint(10, 99), rng.randint(10, 99)
    answer = str(a + b)
    return f"{a}+{b}", WORDING.format(a=a, b=b), {"answer": answer, "solution": answer}


def last_number(text: str) -> str:
    """The last run of digits, or nothing."""
    found = re.findall(r"\d+", text)
    return found[-1] if found else ""


def correct(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """1 if the last number of the text is the sum."""
    return [float(last_number(text) == right) for text, right in zip(completions, answer, strict=True)]


def digits(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """Share of the sum's digits that the last number has in place; 0 if it is longer or shorter than the sum."""
    return [_digits(last_number(text), right) for text, right in zip(completions, answer, strict=True)]


def one_line(completions: Sequence[str], **_: Any) -> list[float]:
    """1 if the answer is one line that ends with a number, working allowed before it."""
    return [float(bool(re.fullmatch(r"[^\n]*\d\.?", text.strip()))) for text in completions]


def _digits(found: str, right: str) -> float:
    if len(found) != len(right):
        return 0.0
    return sum(a == b for a, b in zip(found, right, strict=True)) / len(right)
