"""Ready-made rewards about the length of an answer. They are terms beside one that says what is right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

BUFFER_SHARE = 5
"""DAPO's buffer is a fifth of the longest answer (4,096 of 20,480 tokens)."""


def soft_overlong(num_tokens: Sequence[int], max_tokens: int, buffer: int) -> list[float]:
    """DAPO's soft overlong punishment (arXiv 2503.14476, equation 13), in [-1, 0].

    0 up to ``max_tokens - buffer`` tokens; from there it falls in a straight line to -1 at ``max_tokens``. Raises
    ValueError unless 0 < buffer <= max_tokens.
    """
    if not 0 < buffer <= max_tokens:
        raise ValueError(f"buffer must be at least 1 and at most max_tokens = {max_tokens}, found {buffer}.")
    return [-min(1.0, max(0.0, (count - (max_tokens - buffer)) / buffer)) for count in num_tokens]


def overlong(completion_ids: Sequence[Sequence[int]], max_tokens: int, **_: Any) -> list[float]:
    """``soft_overlong`` with the last fifth of ``rollout.max_tokens`` as the buffer."""
    return soft_overlong([len(ids) for ids in completion_ids], max_tokens, max(1, max_tokens // BUFFER_SHARE))


def length(completion_ids: Sequence[Sequence[int]], max_tokens: int, **_: Any) -> list[float]:
    """A price for every token: minus the answer's share of ``rollout.max_tokens``, in [-1, 0]."""
    return [-min(1.0, len(ids) / max_tokens) for ids in completion_ids]
