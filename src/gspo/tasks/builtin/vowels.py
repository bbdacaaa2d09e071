"""Write only letters of a kind: a task that a randomly initialised character model can start to learn at once."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def make(rng: random.Random) -> tuple[str, str, Mapping[str, Any]]:
    """(key, prompt, columns) of one problem; the word is there for variety."""
    word = "".join(rng.choice(LETTERS) for _ in range(rng.randint(3, 6)))
    answer = "".join(letter for letter in word if letter in "aeiou") or "a"
    return word, f"vowels only: {word}", {"answer": answer, "solution": answer}


def share(completions: Sequence[str], **_: Any) -> list[float]:
    """Share of the answer's characters that are lower-case vowels; 0 for an empty answer."""
    return [sum(character in "aeiou" for character in text) / max(len(text), 1) for text in completions]


def correct(completions: Sequence[str], **_: Any) -> list[float]:
    """1 if the answer has at least one character and only vowels."""
    return [float(bool(text) and set(text) <= set("aeiou")) for text in completions]
