"""Prompts that are all at hand: their order, their cursor, and the held-out split."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from typing import Any

from gspo.errors import DataError
from gspo.types import Prompt

HELDOUT_SHARE = 10
"""One prompt in this many is held out when no held-out set is given."""


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


def fingerprint(prompts: Sequence[Prompt], *setting: object) -> str:
    """Changes with the prompts, their order, any of their columns, and ``setting``."""
    rows = (json.dumps([p.prompt_id, p.content, p.columns], sort_keys=True, default=repr) for p in prompts)
    return _hash("\n".join([repr(setting), *rows]))[:16]


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class ListSource:
    """Prompts of a list without end: each epoch in a new seeded order or, without ``shuffle``, in the list's."""

    def __init__(self, prompts: Sequence[Prompt], seed: int, shuffle: bool = True) -> None:
        self.prompts, self.seed, self.shuffle = list(prompts), seed, shuffle
        self.epoch = self.position = 0
        self.fingerprint = fingerprint(self.prompts, seed, shuffle)

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
        if self.shuffle:
            random.Random(f"{self.seed}/{self.epoch}").shuffle(order)
        return order

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]
