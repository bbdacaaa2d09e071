"""A number added over and over, one written sum a line: 14 tokens for each time, so that long answers stay easy steps.

Digits are written from the lowest, as a model that writes from left to right needs the carry before the digit it goes
into; of the sum, three are kept. Each line starts with how many more are to come: in ``02 342+18=423``, 81 was added to
243, and two more lines follow. The prompt gives the line to go on from, so that the first step is one like the others.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

WORDING = "go on to 00: {line}"
DIGITS = 3


def make(fewest: int, most: int) -> Callable[[random.Random], tuple[str, str, Mapping[str, Any]]]:
    """A two-digit number, ``fewest`` to ``most`` times (below 100): a function that draws (key, prompt, columns)."""

    def draw(rng: random.Random) -> tuple[str, str, Mapping[str, Any]]:
        start, number, times = rng.randrange(10**DIGITS), rng.randint(10, 99), rng.randint(fewest, most)
        step = f"{number}"[::-1]
        sums = [_written(start + count * number) for count in range(times + 2)]
        given, *lines = (f"{times - n:02d} {sums[n]}+{step}={sums[n + 1]}" for n in range(times + 1))
        columns = {"answer": lines[-1], "solution": "\n".join(lines)}
        return f"{start}+{number}*{times}", WORDING.format(line=given), columns

    return draw


def correct(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """1 if the last line has nothing left to add and the right sum."""
    lasts = [text.strip().splitlines()[-1:] for text in completions]
    return [float(last == [right]) for last, right in zip(lasts, answer, strict=True)]


def _written(number: int) -> str:
    return f"{number % 10**DIGITS:0{DIGITS}d}"[::-1]
