"""Prompts from JSON-lines files: one object a line, ``prompt`` and any other columns."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gspo.errors import DataError
from gspo.types import Prompt

HELDOUT_SHARE = 10
"""One prompt in this many is held out when no held-out set is given."""


def read_prompts(path: Path) -> list[Prompt]:
    """Rows of a file. ``prompt`` is text or chat messages; ``id`` or ``prompt_id`` names the row, else its line does.

    Raises DataError with file and line for anything that is not such a row.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DataError(f"The prompt file {path} does not exist.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"The prompt file {path} cannot be read: {error}.") from None
    prompts = [
        _prompt(line, f"{path}, line {number}", f"{path.stem}/{number}")
        for number, line in enumerate(text.split("\n"), 1)
        if line.strip()
    ]
    if not prompts:
        raise DataError(f"The prompt file {path} is empty; it needs one JSON object a line, with a 'prompt'.")
    return prompts


def _prompt(line: str, where: str, name: str) -> Prompt:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not valid JSON ({error.msg} at column {error.colno}).") from None
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected a JSON object with a 'prompt', found {type(row).__name__}.")
    if "prompt" not in row:
        raise DataError(f"{where}: the row has no 'prompt'; its keys are {sorted(row)}.")
    content = row.pop("prompt")
    check_content(content, where)
    for reserved in ("completions", "prompts", "completion_ids"):
        if reserved in row:
            raise DataError(f"{where}: the column {reserved!r} is reserved for what reward functions get; rename it.")
    found = row.get("prompt_id", row.get("id", name))
    return Prompt(str(found), content, row)


def check_content(content: Any, where: str) -> None:
    """Raise DataError unless ``content`` is non-empty text or a list of chat messages."""
    if isinstance(content, str) and content.strip():
        return
    if (
        isinstance(content, list)
        and content
        and all(isinstance(m, dict) and "role" in m and "content" in m for m in content)
    ):
        return
    raise DataError(
        f"{where}: 'prompt' must be text or a list of messages with 'role' and 'content', found {str(content)[:60]!r}."
    )


def prompt_key(prompt: Prompt) -> str:
    """The same for prompts that ask the same."""
    return prompt.content if isinstance(prompt.content, str) else json.dumps(list(prompt.content), sort_keys=True)


def split_heldout(prompts: Sequence[Prompt], most: int, name: str) -> tuple[list[Prompt], tuple[Prompt, ...]]:
    """(train, held out): about a tenth of the distinct prompts, at most ``most``, chosen by a hash of their text.

    Equal prompts land on the same side, and adding rows does not move others across. Raises DataError when there are
    not two distinct prompts.
    """
    ranked = sorted({prompt_key(prompt) for prompt in prompts}, key=_hash)
    if len(ranked) < 2:
        raise DataError(
            f"{name} has one distinct prompt, so none can be held out. Set eval.prompts to other prompts, or "
            "eval.every = 0 to train without evaluation."
        )
    chosen = set(ranked[: max(1, min(most, len(ranked) // HELDOUT_SHARE))])
    train = [prompt for prompt in prompts if prompt_key(prompt) not in chosen]
    seen: dict[str, Prompt] = {}
    for prompt in prompts:
        if prompt_key(prompt) in chosen:
            seen.setdefault(prompt_key(prompt), prompt)
    return train, tuple(seen.values())


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class ListSource:
    """Prompts of a list, in a new seeded order each epoch, without end."""

    def __init__(self, prompts: Sequence[Prompt], seed: int) -> None:
        self.prompts, self.seed = list(prompts), seed
        self.epoch = self.position = 0
        content = "\n".join(f"{prompt.prompt_id}\t{prompt_key(prompt)}" for prompt in self.prompts)
        self.fingerprint = _hash(f"{seed}\n{content}")[:16]

    def take(self, count: int) -> list[Prompt]:
        taken: list[Prompt] = []
        while len(taken) < count:
            order = self._order()
            step = order[self.position : self.position + count - len(taken)]
            taken += [self.prompts[number] for number in step]
            self.position += len(step)
            if self.position == len(order):
                self.epoch, self.position = self.epoch + 1, 0
        return taken

    def _order(self) -> list[int]:
        order = list(range(len(self.prompts)))
        random.Random(f"{self.seed}/{self.epoch}").shuffle(order)
        return order

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]
