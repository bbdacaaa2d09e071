"""Insertion sort written out: line by line the part that is sorted so far. n characters take n (n + 3) / 2 tokens."""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

CHARACTERS = string.digits + string.ascii_uppercase + string.ascii_lowercase
"""In order. Each occurs at most once in a problem."""
WORDING = "insertion sort {characters}"


def make(shortest: int, longest: int) -> Callable[[random.Random], tuple[str, str, Mapping[str, Any]]]:
    """Problems of ``shortest`` to ``longest`` characters: a function that draws (key, prompt, columns)."""

    def draw(rng: random.Random) -> tuple[str, str, Mapping[str, Any]]:
        characters = rng.sample(CHARACTERS, rng.randint(shortest, longest))
        lines = ["".join(sorted(characters[:count])) for count in range(1, len(characters) + 1)]
        text = "".join(characters)
        return text, WORDING.format(characters=text), {"answer": lines[-1], "solution": "\n".join(lines)}

    return draw


def correct(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """1 if the last line is all the characters in order."""
    lasts = [text.strip().splitlines()[-1:] for text in completions]
    return [float(last == [right]) for last, right in zip(lasts, answer, strict=True)]
