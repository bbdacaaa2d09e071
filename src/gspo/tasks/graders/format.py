"""``format``: the answer has the form ``<think>...</think><answer>...</answer>``, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from gspo.tasks.graders.answers import text_of

_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_FORM = re.compile(r"\s*<think>.*</think>\s*<answer>\s*\S.*</answer>\s*", re.DOTALL)


def format(completions: Sequence[Any], prompts: Sequence[Any]) -> list[float]:
    """1 for an answer of that form, else 0.

    Each tag comes once and in this order, between them is whatever text (also line ends), the answer is not blank, and
    only blanks stand before, between and after. ``<think>`` may be missing: chat templates of thinking models end the
    prompt with it. Where the prompt can be seen to end with it, the completion must not open it again.
    """
    return [
        float(well_formed(text_of(completion), _end_of(prompt)))
        for completion, prompt in zip(completions, prompts, strict=True)
    ]


def well_formed(text: str, prompt_end: str = "") -> bool:
    opened = prompt_end.rstrip().endswith("<think>")
    if opened or (not text.lstrip().startswith("<think>") and "</think>" in text):
        text = "<think>" + text
    return all(text.count(tag) == 1 for tag in _TAGS) and _FORM.fullmatch(text) is not None


def _end_of(prompt: Any) -> str:
    """The end of a text prompt, or of an assistant message that the completion continues."""
    if isinstance(prompt, str):
        return prompt[-100:]
    last = prompt[-1] if prompt else {}
    content = last.get("content") if last.get("role") == "assistant" else ""
    return content[-100:] if isinstance(content, str) else ""
