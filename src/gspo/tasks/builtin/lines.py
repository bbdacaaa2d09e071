"""Part of the reward for part of the work: shared by tasks whose solutions are worked line by line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def right_lines(completions: Sequence[str], solution: Sequence[str], **_: Any) -> list[float]:
    """Share of the worked lines that are there, in order from the first, before the first wrong one."""
    return [_right_lines(text, worked) for text, worked in zip(completions, solution, strict=True)]


def _right_lines(text: str, worked: str) -> float:
    expected = worked.splitlines()
    found = [line.strip() for line in text.splitlines() if line.strip()]
    right = 0
    for line, wanted in zip(found, expected, strict=False):
        if line != wanted:
            break
        right += 1
    return right / len(expected)
