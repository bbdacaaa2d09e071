"""Put words in alphabetical order: the answer is text."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

WORDS = [
    "apple",
    "bread",
    "cloud",
    "dance",
    "eagle",
    "flame",
    "grape",
    "house",
    "island",
    "jungle",
    "kettle",
    "lemon",
    "mountain",
    "needle",
    "ocean",
    "paper",
    "queen",
    "river",
    "stone",
    "table",
    "umbrella",
    "valley",
    "window",
    "yellow",
    "zebra",
    "anchor",
    "bridge",
    "candle",
    "desert",
    "engine",
    "forest",
    "garden",
    "hammer",
    "insect",
    "jacket",
    "kitten",
    "ladder",
    "market",
    "night",
    "orange",
    "pencil",
    "quiet",
    "rabbit",
    "silver",
    "tiger",
    "uncle",
    "violin",
    "water",
]


def make(rng: random.Random) -> tuple[str, str, Mapping[str, Any]]:
    """(key, prompt, columns) of one problem."""
    words = rng.sample(WORDS, rng.randint(3, 5))
    answer = " ".join(sorted(words))
    prompt = f"Write these words in alphabetical order, separated by spaces, and nothing else: {' '.join(words)}"
    return " ".join(words), prompt, {"answer": answer, "solution": answer}


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z]+", text.lower())


def correct(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """1 if the answer is these words in this order and nothing else."""
    return [float(_words(text) == right.split()) for text, right in zip(completions, answer, strict=True)]


def in_order(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """Share of places that hold the right word; words too many count as wrong places."""
    return [_in_order(_words(text), right.split()) for text, right in zip(completions, answer, strict=True)]


def _in_order(found: list[str], right: list[str]) -> float:
    same = sum(a == b for a, b in zip(found, right, strict=False))
    return same / max(len(found), len(right))
