"""Built-in tasks: endless seeded problems with train and held-out sides that never share a problem.

Which side a problem is on is a property of the problem (a hash of its key), not of the order it is drawn in. Held-out
prompts are the same for every run, so that runs can be compared.
"""

from __future__ import annotations

import difflib
import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gspo.errors import ConfigError
from gspo.tasks.builtin import (
    addition,
    fibonacci,
    insertion_sort,
    running_total,
    sort_letters,
    sort_words,
    vowels,
)
from gspo.tasks.builtin.lines import right_lines
from gspo.tasks.functions import RewardFunction
from gspo.types import Prompt

HELDOUT_ONE_IN = 8
"""One problem in this many is held out."""


@dataclass(frozen=True)
class Problem:
    """``key`` is equal for equal problems; ``columns`` has at least ``answer`` and a worked ``solution``."""

    key: str
    prompt: str
    columns: Mapping[str, Any]


@dataclass(frozen=True)
class BuiltinTask:
    """``make`` draws a problem; the first of ``rewards`` is 1.0 exactly for a fully right answer."""

    name: str
    make: Callable[[random.Random], tuple[str, str, Mapping[str, Any]]]
    rewards: Sequence[RewardFunction]
    weights: Sequence[float]

    def problem(self, side: str, seed: int, number: int) -> Problem:
        """Problem ``number`` of a side ('train' or 'heldout'); depends on nothing else."""
        rng = random.Random(f"{self.name}/{side}/{seed}/{number}")
        while True:
            problem = Problem(*self.make(rng))
            if is_heldout(problem.key) == (side == "heldout"):
                return problem


def _worked(name: str, module: Any, fewest: int, most: int) -> BuiltinTask:
    """Half of the reward is for the part of the work that is right: one slip in hundreds of tokens is common."""
    return BuiltinTask(name, module.make(fewest, most), (module.correct, right_lines), (0.5, 0.5))


BUILTIN: Mapping[str, BuiltinTask] = {
    task.name: task
    for task in (
        BuiltinTask("addition", addition.make, (addition.correct, addition.digits, addition.one_line), (0.7, 0.2, 0.1)),
        BuiltinTask("sort_words", sort_words.make, (sort_words.correct, sort_words.in_order), (0.7, 0.3)),
        BuiltinTask("sort_letters", sort_letters.make, (sort_letters.correct,), (1.0,)),
        BuiltinTask("running_total", running_total.make, (running_total.correct, right_lines), (0.7, 0.3)),
        _worked("insertion_sort", insertion_sort, 8, 14),
        _worked("fibonacci", fibonacci, 5, 15),
        _worked("fibonacci_long", fibonacci, 28, 70),
        BuiltinTask("vowels", vowels.make, (vowels.correct, vowels.share), (0.2, 0.8)),
    )
}


def is_heldout(key: str) -> bool:
    return hashlib.sha256(key.encode()).digest()[0] % HELDOUT_ONE_IN == 0


def builtin(name: str) -> BuiltinTask:
    """By name. Raises ConfigError naming the nearest."""
    if name in BUILTIN:
        return BUILTIN[name]
    near = difflib.get_close_matches(name, BUILTIN, 1) or list(BUILTIN)
    raise ConfigError(f"There is no built-in task {name!r}; there is: {', '.join(near)}.")


def heldout_prompts(task: BuiltinTask, count: int) -> tuple[Prompt, ...]:
    """The first ``count`` distinct held-out problems, the same for every run."""
    found: dict[str, Prompt] = {}
    number = 0
    while len(found) < count and number < 50 * (len(found) + 1):  # a task may have fewer problems than that
        problem = task.problem("heldout", 0, number)
        found.setdefault(problem.key, _prompt(task, problem))
        number += 1
    return tuple(found.values())


class BuiltinSource:
    """Problems of the train side, number after number."""

    def __init__(self, task: BuiltinTask, seed: int) -> None:
        self.task, self.seed, self.position = task, seed, 0
        self.fingerprint = f"builtin:{task.name}/{seed}"

    def take(self, count: int) -> list[Prompt]:
        numbers = range(self.position, self.position + count)
        self.position += count
        return [_prompt(self.task, self.task.problem("train", self.seed, number)) for number in numbers]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def _prompt(task: BuiltinTask, problem: Problem) -> Prompt:
    return Prompt(f"{task.name}/{problem.key}", problem.prompt, problem.columns)
