"""Reward functions in a module that imports nothing, so that their process starts quickly."""

from __future__ import annotations

from typing import Any


def vowels(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """Share of six characters that are vowels."""
    return [sum(map(text.count, "aeiou")) / 6 for text in completions]
