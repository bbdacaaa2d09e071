"""A chain of additions and subtractions, worked line by line: right answers run to hundreds of tokens."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

WORDING = (
    "Start at {start}. Then, in this order: {steps}. Work line by line, writing one line for each step like "
    "'7 + 5 = 12', and end with a line 'Answer: N'."
)


def make(rng: random.Random) -> tuple[str, str, Mapping[str, Any]]:
    """(key, prompt, columns) of one problem of 12 to 24 steps that stays between 0 and 99."""
    total = start = rng.randint(10, 50)
    steps: list[str] = []
    lines: list[str] = []
    for _ in range(rng.randint(12, 24)):
        change = rng.randint(1, 9)
        add = total < 10 or (total < 90 and rng.random() < 0.5)
        after = total + change if add else total - change
        steps.append(f"{'add' if add else 'subtract'} {change}")
        lines.append(f"{total} {'+' if add else '-'} {change} = {after}")
        total = after
    lines.append(f"Answer: {total}")
    prompt = WORDING.format(start=start, steps=", ".join(steps))
    return f"{start}: {', '.join(steps)}", prompt, {"answer": str(total), "solution": "\n".join(lines)}


def correct(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """1 if the last line that says 'Answer: N' has the right N."""
    found = [re.findall(r"^Answer:\s*(-?\d+)\s*$", text, re.MULTILINE) for text in completions]
    return [float(bool(numbers) and numbers[-1] == right) for numbers, right in zip(found, answer, strict=True)]
