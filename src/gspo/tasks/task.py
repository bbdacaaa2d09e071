"""config -> a Task: prompts to train on, held-out prompts, rewards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from gspo.config import Config, as_path
from gspo.errors import ConfigError, brief
from gspo.tasks.builtin import BUILTIN, BuiltinSource, builtin, heldout_prompts
from gspo.tasks.functions import PYTHON, RewardFunction, function_name, importable_as
from gspo.tasks.gym import GymSource, gym_task
from gspo.tasks.hub import StreamSource, open_dataset, read_dataset, read_parquet
from gspo.tasks.jsonl import read_jsonl
from gspo.tasks.lists import HELDOUT_SHARE, ListSource, prompt_key, split_heldout
from gspo.tasks.rewards import Limits, RewardSuite
from gspo.tasks.rows import prompts_from_rows
from gspo.types import Prompt


class PromptSource(Protocol):
    """Endless prompts in a seeded order that can be continued exactly."""

    fingerprint: str
    """Changes when the prompts or their order do."""

    def take(self, count: int) -> list[Prompt]:
        """The next ``count`` prompts."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The cursor, JSON-able."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a cursor."""
        ...


Rows = Iterable[Mapping[str, Any] | Prompt]


@dataclass
class Task:
    """``heldout`` shares no prompt with ``train``, unless ``eval.prompts`` names files or data sets that do. ``notes``
    are lines for the user."""

    name: str
    train: PromptSource
    heldout: tuple[Prompt, ...]
    rewards: RewardSuite
    notes: list[str] = field(default_factory=list)


Opened = tuple[PromptSource, tuple[Prompt, ...], RewardSuite | None]
"""Prompts to train on, held-out prompts, and the rewards that come with them (None: none do)."""
Given = tuple[Prompt, ...] | None
"""Held-out prompts from ``eval.prompts``; None when it is not set."""


def load_task(
    config: Config,
    *,
    rows: Rows | None = None,
    heldout_rows: Rows | None = None,
    functions: Sequence[RewardFunction | str] = (),
) -> Task:
    """Read prompts and import rewards. Raises ConfigError, DataError or RewardError, each saying what to do.

    From Python: ``rows`` instead of ``task.prompts``, ``heldout_rows`` instead of ``eval.prompts``, ``functions``
    instead of ``task.reward``.
    """
    spec = config.task.prompts
    _check_order(config)
    given = _heldout(config) if config.eval.prompts and heldout_rows is None else None
    if heldout_rows is not None:
        given = tuple(_from_python(heldout_rows, config)[: config.eval.num_prompts])
    if rows is not None:
        train, heldout, rewards = _listed(_from_python(rows, config), config, given)
    else:
        train, heldout, rewards = _opener(config)(config, given)
    notes: list[str] = []
    if config.task.reward_weights and not (functions or config.task.reward):
        raise ConfigError(
            f"task.reward_weights = {list(config.task.reward_weights)} needs task.reward: the rewards that come with "
            f"{brief(spec, 300)} have weights of their own. Name the reward functions too, or remove the weights."
        )
    if functions or config.task.reward:
        rewards, notes = _rewards(config, functions or config.task.reward)
    if rewards is None:
        raise ConfigError(
            f"task.prompts = {brief(spec, 300)} comes without a way to score answers: set task.reward to a function, "
            "such as 'rewards.py:correct' (file and name) or 'package.module:correct'."
        )
    return Task(spec, train, heldout, rewards, notes)


def _rewards(config: Config, functions: Sequence[RewardFunction | str]) -> tuple[RewardSuite, list[str]]:
    """Functions that can be imported go to processes of their own; a line says which cannot."""
    weights, limits = config.task.reward_weights or (1.0,) * len(functions), _limits(config)
    moved = [function if isinstance(function, str) else importable_as(function) or function for function in functions]
    try:
        suite = RewardSuite(moved, weights, limits)
    except ConfigError:
        if all(isinstance(function, str) for function in functions):
            raise
        moved = list(functions)  # a module that only this process can import
        suite = RewardSuite(moved, weights, limits)
    stay = [function_name(function) for function in moved if not isinstance(function, str)]
    note = (
        f"rewards: {', '.join(stay)} cannot be imported by another process and runs in this one: "
        "task.reward_timeout can interrupt Python code only, task.reward_workers does not apply"
    )
    return suite, [note] if stay else []


def _limits(config: Config) -> Limits:
    task = config.task
    settings = {"max_tokens": config.rollout.max_tokens}
    return Limits(task.reward_timeout, task.reward_workers, task.on_reward_error, config.run.seed, settings)


def _from_python(rows: Rows, config: Config) -> list[Prompt]:
    return prompts_from_rows(rows, "rows", config.task.prompt_column)


def _check_order(config: Config) -> None:
    """Refuse settings of order that the source has no use for."""
    spec = config.task.prompts
    if config.task.streaming and not spec.startswith("hf:"):
        raise ConfigError(f"task.streaming is for hf: data sets; task.prompts = {spec!r} is not one. Remove it.")
    if not config.task.shuffle and spec.startswith(tuple(_OPEN)):
        raise ConfigError(f"task.shuffle = false is for files and data sets: {spec!r} has no order to keep. Remove it.")


def _open_builtin(config: Config, given: Given) -> Opened:
    own = builtin(config.task.prompts.removeprefix("builtin:"))
    heldout = heldout_prompts(own, config.eval.num_prompts) if given is None else given
    return BuiltinSource(own, config.run.seed), heldout, RewardSuite(own.rewards, own.weights)


def _open_gym(config: Config, given: Given) -> Opened:
    task = gym_task(config.task.prompts)
    heldout = task.heldout(config.eval.num_prompts) if given is None else given
    source = GymSource(task, config.run.seed, [prompt_key(prompt) for prompt in heldout])
    return source, heldout, RewardSuite(["gspo.tasks.gym:score"], [1.0], _limits(config))


def _open_stream(config: Config, given: Given) -> Opened:
    """The held-out prompts come from the first rows, ten for each one wanted."""
    task, spec = config.task, config.task.prompts
    heldout, skip = given or (), []
    if given is None and config.eval.every:
        most = config.eval.num_prompts
        head = read_dataset(spec, task.prompt_column, streaming=True, most=HELDOUT_SHARE * most)
        _, heldout = split_heldout(head, most, spec)
        skip = [prompt_key(prompt) for prompt in heldout]
    rows = open_dataset(spec, streaming=True)
    return StreamSource(rows, spec, config.run.seed, task.shuffle, task.prompt_column, skip), heldout, None


def _open_rows(config: Config, given: Given) -> Opened:
    return _listed(_read(config.task.prompts, "task.prompts", config), config, given)


def _listed(prompts: list[Prompt], config: Config, given: Given) -> Opened:
    heldout = given or ()
    if given is None and config.eval.every:
        prompts, heldout = split_heldout(prompts, config.eval.num_prompts, config.task.prompts)
    return ListSource(prompts, config.run.seed, config.task.shuffle), heldout, None


def _opener(config: Config) -> Callable[[Config, Given], Opened]:
    for start, opener in _OPEN.items():
        if config.task.prompts.startswith(start):
            return opener
    return _open_stream if config.task.streaming else _open_rows


_OPEN: Mapping[str, Callable[[Config, Given], Opened]] = {
    "builtin:": _open_builtin,
    "reasoning-gym:": _open_gym,
}


def _heldout(config: Config) -> tuple[Prompt, ...]:
    """The first ``eval.num_prompts`` prompts of ``eval.prompts``."""
    spec, most = config.eval.prompts, config.eval.num_prompts
    if spec.startswith("builtin:"):
        return heldout_prompts(builtin(spec.removeprefix("builtin:")), most)
    if spec.startswith("reasoning-gym:"):
        return gym_task(spec).heldout(most)
    if spec.startswith("hf:") and config.task.streaming:
        return tuple(read_dataset(spec, config.task.prompt_column, streaming=True, most=most))
    return tuple(_read(spec, "eval.prompts", config)[:most])


def _read(spec: str, key: str, config: Config) -> list[Prompt]:
    column = config.task.prompt_column
    if spec.startswith(PYTHON):
        raise ConfigError(
            f"{key} = {spec!r} stands for rows that were given to GSPOTrainer from Python. Give them again (to go on "
            "with a run: trainer.train(resume='FOLDER')), or write them to a .jsonl file."
        )
    if spec.startswith("hf:"):
        return read_dataset(spec, column)
    if spec.endswith((".jsonl", ".json")):
        return read_jsonl(as_path(spec), column)
    if spec.endswith(".parquet"):
        return read_parquet(as_path(spec), column)
    raise ConfigError(
        f"{key} = {brief(spec, 300)} is not a source of prompts. Give a .jsonl file (one JSON object a line, with a "
        "'prompt'), a .parquet file, hf:NAME[:SPLIT], reasoning-gym:TASK, or one of: "
        f"{', '.join('builtin:' + name for name in BUILTIN)}."
    )
