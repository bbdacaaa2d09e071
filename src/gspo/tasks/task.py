"""config -> a Task: prompts to train on, held-out prompts, rewards."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gspo.config import Config
from gspo.errors import ConfigError
from gspo.tasks.builtin import BUILTIN, BuiltinSource, builtin, heldout_prompts
from gspo.tasks.jsonl import ListSource, read_prompts, split_heldout
from gspo.tasks.rewards import RewardSuite, load_reward
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


@dataclass
class Task:
    """``heldout`` shares no prompt with ``train``."""

    name: str
    train: PromptSource
    heldout: tuple[Prompt, ...]
    rewards: RewardSuite


def load_task(config: Config) -> Task:
    """Read prompts and import rewards. Raises ConfigError, DataError or RewardError, each saying what to do."""
    spec, seed = config.task.prompts, config.run.seed
    if spec.startswith("builtin:"):
        own = builtin(spec.removeprefix("builtin:"))
        train: PromptSource = BuiltinSource(own, seed)
        heldout = heldout_prompts(own, config.eval.num_prompts)
        rewards = RewardSuite(own.rewards, own.weights)
    else:
        prompts = _read(spec, "task.prompts")
        if config.eval.every and not config.eval.prompts:
            prompts, heldout = split_heldout(prompts, config.eval.num_prompts, spec)
        else:
            heldout = ()
        train = ListSource(prompts, seed)
        rewards = None
    if config.eval.prompts:
        heldout = _heldout(config)
    if config.task.reward:
        functions = [load_reward(name) for name in config.task.reward]
        rewards = RewardSuite(functions, config.task.reward_weights or (1.0,) * len(functions))
    if rewards is None:
        raise ConfigError(
            f"task.prompts = {spec!r} comes without a way to score answers: set task.reward to a function, such as "
            "'rewards.py:correct' (file and name) or 'package.module:correct'."
        )
    return Task(spec, train, heldout, rewards)


def _heldout(config: Config) -> tuple[Prompt, ...]:
    spec = config.eval.prompts
    if spec.startswith("builtin:"):
        return heldout_prompts(builtin(spec.removeprefix("builtin:")), config.eval.num_prompts)
    return tuple(_read(spec, "eval.prompts")[: config.eval.num_prompts])


def _read(spec: str, key: str) -> list[Prompt]:
    if spec.endswith((".jsonl", ".json")):
        return read_prompts(Path(spec).expanduser())
    raise ConfigError(
        f"{key} = {spec!r} is not a source of prompts. Give a .jsonl file (one JSON object a line, with a 'prompt'), "
        f"or one of: {', '.join('builtin:' + name for name in BUILTIN)}."
    )
