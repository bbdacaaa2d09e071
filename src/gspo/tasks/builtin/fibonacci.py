"""Each number the sum of the two before it, one written sum a line of 12 tokens: long answers out of easy steps.

Numbers have two digits (sums are taken modulo 100), the lower one first, as a model that writes from left to right needs
the carry before the digit it goes into. Each line starts with how many more are to come: in ``02 81+35=17`` the sum of 18
and 53 is 71, and two more lines follow. The prompt is the line to go on from, so that the first step is one like the
others. No step can be looked up further above: pairs of numbers do not come back within an answer.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

WORDING = "go on to 00: {line}"


def make(fewest: int, most: int) -> Callable[[random.Random], tuple[str, str, Mapping[str, Any]]]:
    """Answers of ``fewest`` to ``most`` lines (below 100): a function that draws (key, prompt, columns)."""

    def draw(rng: random.Random) -> tuple[str, str, Mapping[str, Any]]:
        numbers, count = [rng.randrange(100), rng.randrange(100)], rng.randint(fewest, most)
        while len(numbers) < count + 3:
            numbers.append((numbers[-2] + numbers[-1]) % 100)
        given, *lines = (
            f"{count - n:02d} {_written(numbers[n])}+{_written(numbers[n + 1])}={_written(numbers[n + 2])}"
            for n in range(count + 1)
        )
        key = f"{numbers[0]}+{numbers[1]}*{count}"
        return key, WORDING.format(line=given), {"answer": lines[-1], "solution": "\n".join(lines)}

    return draw


def correct(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """1 if the last line has nothing left to come and the right sum."""
    lasts = [text.strip().splitlines()[-1:] for text in completions]
    return [float(last == [right]) for last, right in zip(lasts, answer, strict=True)]


def _written(number: int) -> str:
    return f"{number:02d}"[::-1]
