"""Put letters in order, without working: answers of about a dozen characters."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

LETTERS = "abcdefghijklmnopqrst"


def make(rng: random.Random) -> tuple[str, str, Mapping[str, Any]]:
    """(key, prompt, columns) of one problem: 8 to 16 letters, some of them more than once."""
    letters = "".join(rng.choice(LETTERS) for _ in range(rng.randint(8, 16)))
    answer = "".join(sorted(letters))
    return letters, f"sort {letters}", {"answer": answer, "solution": answer}


def correct(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """1 if the answer is the letters in order and nothing else."""
    return [float(text.strip() == right) for text, right in zip(completions, answer, strict=True)]
