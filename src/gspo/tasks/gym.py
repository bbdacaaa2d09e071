"""Problems of the reasoning-gym library: made as they are drawn, scored by each task's own scorer."""

from __future__ import annotations

import ast
import difflib
import functools
import hashlib
import json
import re
from collections.abc import Collection, Sequence
from dataclasses import fields
from typing import Any

from gspo.errors import ConfigError, DataError
from gspo.tasks.lists import HELDOUT_SHARE, fingerprint, prompt_key, split_heldout
from gspo.tasks.rows import plain
from gspo.types import Prompt

CHUNK = 500
"""Problems made from one seed; some tasks lay out a whole chunk at once."""

ENTRIES_KEPT = 2048
"""Problems kept as the library made them; others are made again when an answer is scored."""

MANY = 0.9
"""Share of distinct problems among those drawn from which a task counts as having enough of them."""

MAX_SKIPS = 1000
"""Held-out problems that may be drawn in a row before it is an error."""

_NEXT_SETTING = re.compile(r",(?=\s*\w+\s*=)")


class GymTask:
    """``reasoning-gym:TASK[,key=value,...]``: a task of the library with its settings.

    Raises ConfigError when the library is missing, the task unknown, or a setting unknown or refused.
    """

    def __init__(self, spec: str) -> None:
        self.spec = spec
        self.name, *settings = _NEXT_SETTING.split(spec.removeprefix("reasoning-gym:"))
        self._factory = _library(spec)
        if self.name not in self._factory.DATASETS:
            near = difflib.get_close_matches(self.name, self._factory.DATASETS, 3) or sorted(self._factory.DATASETS)
            raise ConfigError(f"reasoning-gym has no task {self.name!r}; there is: {', '.join(near)}.")
        self.settings = dict(self._setting(text) for text in settings)
        self._chunks: dict[str, Any] = {}
        self._scorer = self._dataset("scorer")
        self.entry = functools.lru_cache(ENTRIES_KEPT)(self._entry)

    def prompt(self, side: str, seed: int, number: int) -> Prompt:
        """Problem ``number`` of a side ('train' or 'heldout') and a seed; depends on nothing else.

        Its columns are the library's ``answer`` and ``metadata`` in plain values, and ``problem``, which names it.
        """
        entry, name = self.entry(side, seed, number), f"{self.spec}/{side}/{seed}/{number}"
        columns = {key: plain(entry[key], name, key) for key in ("answer", "metadata")}
        return Prompt(name, entry["question"], columns | {"problem": name})

    def heldout(self, count: int) -> tuple[Prompt, ...]:
        """At most ``count`` distinct problems, the same for every run; a tenth of those there are when they repeat."""
        drawn = [self.prompt("heldout", 0, number) for number in range(count)]
        distinct = {prompt_key(prompt): prompt for prompt in drawn}
        if len(distinct) < MANY * count:  # there are few problems, and training needs most of them
            drawn += [self.prompt("heldout", 0, number) for number in range(count, HELDOUT_SHARE * count)]
            return split_heldout(drawn, count, self.spec)[1]
        return tuple(distinct.values())

    def score(self, side: str, seed: int, number: int, completion: str) -> float:
        """The task's score of an answer, 1.0 for a fully right one. What the scorer cannot parse scores 0."""
        entry = self.entry(side, seed, number)
        try:
            return float(self._scorer.score_answer(answer_of(completion, entry["answer"]), entry))
        except Exception:  # scorers parse what the model wrote, and not all expect just anything
            return 0.0

    def _entry(self, side: str, seed: int, number: int) -> dict[str, Any]:
        """What the library made: scorers need it as it is, since some compare tuples with tuples."""
        chunk, place = divmod(number, CHUNK)
        dataset = self._dataset(f"{side}/{seed}/{chunk}")
        try:
            entry: dict[str, Any] = dataset[place]
        except Exception as error:  # some settings leave a task without a problem to make
            raise DataError(f"{self.spec}: the task cannot make problem {number}: {error}.") from error
        return entry

    def _dataset(self, place: str) -> Any:
        """The library's data set for a chunk; the newest few are kept."""
        if place not in self._chunks:
            seed = int.from_bytes(hashlib.sha256(f"{self.spec}/{place}".encode()).digest()[:4])
            try:
                made = self._factory.create_dataset(self.name, **self.settings, seed=seed, size=CHUNK)
            except Exception as error:  # settings are checked by assertions and by what they do
                raise ConfigError(f"{self.spec}: the task refuses its settings: {error}.") from error
            self._chunks = dict(list(self._chunks.items())[-1:]) | {place: made}
        return self._chunks[place]

    def _setting(self, text: str) -> tuple[str, Any]:
        key, _, value = (part.strip() for part in text.partition("="))
        known = [item.name for item in fields(self._factory.DATASETS[self.name][1])]
        known = [name for name in known if name not in ("seed", "size")]
        if key in ("seed", "size"):
            raise ConfigError(f"{self.spec}: leave out {key!r}: run.seed is the seed, and problems do not run out.")
        if key not in known:
            near = difflib.get_close_matches(key, known, 1) or known
            raise ConfigError(f"{self.spec}: the task has no setting {key!r}; there is: {', '.join(near)}.")
        return key, _value(value)


class GymSource:
    """Problems of the train side, number after number, without those whose question is in ``skip``."""

    def __init__(self, task: GymTask, seed: int, skip: Collection[str] = ()) -> None:
        self.task, self.seed, self.skip, self.position = task, seed, frozenset(skip), 0
        first = [task.prompt("train", seed, number) for number in range(4)]  # changes with the library's version
        self.fingerprint = fingerprint(first, task.spec, seed, sorted(self.skip))

    def take(self, count: int) -> list[Prompt]:
        taken: list[Prompt] = []
        skipped = 0
        while len(taken) < count:
            prompt = self.task.prompt("train", self.seed, self.position)
            self.position += 1
            if prompt_key(prompt) not in self.skip:
                taken.append(prompt)
                skipped = 0
            elif (skipped := skipped + 1) == MAX_SKIPS:
                raise DataError(f"{self.task.spec}: nearly all problems are held out. Lower eval.num_prompts.")
        return taken

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def score(completions: Sequence[str], problem: Sequence[str]) -> list[float]:
    """The reward that comes with the problems: each is scored by its own task."""
    return [_score(text, name) for text, name in zip(completions, problem, strict=True)]


def _score(completion: str, problem: str) -> float:
    spec, side, seed, number = problem.rsplit("/", 3)
    return gym_task(spec).score(side, int(seed), int(number), completion)


@functools.lru_cache(8)
def gym_task(spec: str) -> GymTask:
    """The task, made once."""
    return GymTask(spec)


def answer_of(completion: str, gold: Any) -> str:
    """What counts as the answer: the last ``<answer>...</answer>``; without one the last line that is not blank, or
    the whole text when the task's own answer has several lines."""
    from reasoning_gym.utils import extract_answer

    tagged = extract_answer(completion)
    if tagged is not None:
        return str(tagged)
    text = completion.strip()
    return text if "\n" in str(gold).strip() else text.rpartition("\n")[2].strip()


def _value(text: str) -> Any:
    """JSON or a Python literal; anything else is text."""
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text)
        except (ValueError, SyntaxError):
            continue
    return text


def _library(spec: str) -> Any:
    try:
        import reasoning_gym
        import reasoning_gym.factory
    except ImportError as error:
        raise ConfigError(
            f"{spec} needs the library 'reasoning-gym', which is not installed. Run: pip install 'gspo[reasoning-gym]'"
        ) from error
    return reasoning_gym.factory
