"""Multiplication by adding over and over, one numbered line a step: 9 tokens for each unit of the second factor."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

WORDING = "multiply {a} by {b}, adding line by line"


def make(fewest: int, most: int) -> Callable[[random.Random], tuple[str, str, Mapping[str, Any]]]:
    """Three-digit numbers times ``fewest`` to ``most`` (below 100): a function that draws (key, prompt, columns)."""

    def draw(rng: random.Random) -> tuple[str, str, Mapping[str, Any]]:
        a, b = rng.randint(101, 999), rng.randint(fewest, most)
        lines = [f"{count:02d} {count * a:05d}" for count in range(1, b + 1)]
        return f"{a}*{b}", WORDING.format(a=a, b=f"{b:02d}"), {"answer": lines[-1], "solution": "\n".join(lines)}

    return draw


def correct(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """1 if the last line has the right number of additions and the product."""
    lasts = [text.strip().splitlines()[-1:] for text in completions]
    return [float(last == [right]) for last, right in zip(lasts, answer, strict=True)]
