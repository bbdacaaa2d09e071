"""Each number the sum of the two before it, one written sum a line of 12 tokens: long answers out of easy steps.

Numbers have two digits, added without carry (each sum modulo 10), as carries take a tiny model long to learn. Each line
starts with how many more are to come: in ``02 18+53=61`` two more lines follow. The prompt is the line to go on from,
so that the first step is one like the others.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

WORDING = "go on to 00: {line}"


def make(fewest: int, most: int) -> Callable[[random.Random], tuple[str, str, Mapping[str, Any]]]:
    """Answers of ``fewest`` to ``most`` lines (below 100): a function that draws (key, prompt, columns)."""

    def draw(rng: random.Random) -> tuple[str, str, Mapping[str, Any]]:
        numbers, count = [f"{rng.randrange(100):02d}", f"{rng.randrange(100):02d}"], rng.randint(fewest, most)
        while len(numbers) < count + 3:
            numbers.append(_sum(numbers[-2], numbers[-1]))
        given, *lines = (f"{count - n:02d} {numbers[n]}+{numbers[n + 1]}={numbers[n + 2]}" for n in range(count + 1))
        key = f"{numbers[0]}+{numbers[1]}*{count}"
        return key, WORDING.format(line=given), {"answer": lines[-1], "solution": "\n".join(lines)}

    return draw


def correct(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """1 if the last line has nothing left to come and the right sum."""
    lasts = [text.strip().splitlines()[-1:] for text in completions]
    return [float(last == [right]) for last, right in zip(lasts, answer, strict=True)]


def _sum(first: str, second: str) -> str:
    """Without carry."""
    return "".join(str((int(a) + int(b)) % 10) for a, b in zip(first, second, strict=True))
