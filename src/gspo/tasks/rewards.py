"""Reward functions in TRL's form: ``f(completions, prompts, **columns) -> list[float | None]``, plain or async."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gspo.config import as_path
from gspo.errors import ConfigError, RewardError, brief, first_line
from gspo.types import Prompt

RewardFunction = Callable[..., Any]
LARGEST = 1e30
"""No score is larger; sums and squares of scores stay finite."""


@dataclass(frozen=True)
class Score:
    """One answer's reward: the weighted sum of its terms. None: unscored."""

    reward: float | None
    terms: dict[str, float | None] = field(default_factory=dict)
    error: str | None = None


class RewardSuite:
    """Reward functions with their weights."""

    def __init__(self, functions: Sequence[RewardFunction], weights: Sequence[float]) -> None:
        if not functions or len(functions) != len(weights):
            raise RewardError(
                f"There are {len(functions)} reward functions and {len(weights)} weights; give one for each."
            )
        self.functions, self.weights = list(functions), list(weights)
        self.names = _distinct([_name(function) for function in functions])

    def score(self, prompts: Sequence[Prompt], texts: Sequence[str], token_ids: Sequence[Sequence[int]]) -> list[Score]:
        """Score answers, one a prompt (a prompt is repeated for each of its answers).

        A term that is None or NaN is unscored and left out of the sum; with no term scored the reward is None. Raises
        RewardError when a function raises or returns something other than one finite number or None an answer.
        """
        arguments = _arguments(prompts, texts, token_ids)
        terms = {
            name: self._call(name, function, arguments, prompts)
            for name, function in zip(self.names, self.functions, strict=True)
        }
        return [self._sum({name: values[row] for name, values in terms.items()}) for row in range(len(prompts))]

    def _sum(self, terms: dict[str, float | None]) -> Score:
        scored = [
            weight * value for weight, value in zip(self.weights, terms.values(), strict=True) if value is not None
        ]
        return Score(sum(scored) if scored else None, terms)

    def _call(
        self, name: str, function: RewardFunction, arguments: dict[str, list[Any]], prompts: Sequence[Prompt]
    ) -> list[float | None]:
        accepted = _accepted(name, function, arguments)
        try:
            returned = function(**accepted)
            if inspect.isawaitable(returned):
                returned = _run(returned)
        except (Exception, SystemExit) as error:  # whatever a user's function raises
            raise RewardError(
                f"The reward function {name} raised {type(error).__name__}: {first_line(error)}."
            ) from error
        return _values(name, returned, prompts)


def load_reward(spec: str) -> RewardFunction:
    """Import 'module:function' or 'file.py:function'; modules are also looked for in the current directory.

    Raises ConfigError saying what was looked for and where.
    """
    module_name, colon, attribute = spec.rpartition(":")
    if not colon or not module_name or not attribute:
        raise ConfigError(f"task.reward: {spec!r} must be 'module:function' or 'file.py:function'.")
    module = _import_file(as_path(module_name)) if module_name.endswith(".py") else _import_module(module_name)
    function = getattr(module, attribute, None)
    if function is None:
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ConfigError(
            f"task.reward: {module_name} has no {attribute!r}; it has: {', '.join(names) or 'no function'}."
        )
    if not callable(function):
        raise ConfigError(f"task.reward: {spec!r} is a {type(function).__name__}, not a function.")
    return function


def _import_file(path: Path) -> Any:
    if not path.is_file():
        raise ConfigError(f"task.reward: the file {path.absolute()} does not exist.")
    name = f"gspo_reward_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the user's module runs here
        raise ConfigError(
            f"task.reward: {path} cannot be imported: {type(error).__name__}: {first_line(error)}."
        ) from error
    return module


def _import_module(name: str) -> Any:
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"task.reward: there is no module {error.name!r} (looked for {name!r} in {here} and the environment)."
        ) from error
    except (Exception, SystemExit) as error:  # the user's module runs here
        raise ConfigError(
            f"task.reward: {name} cannot be imported: {type(error).__name__}: {first_line(error)}."
        ) from error
    finally:
        sys.path.remove(here)


def _arguments(
    prompts: Sequence[Prompt], texts: Sequence[str], token_ids: Sequence[Sequence[int]]
) -> dict[str, list[Any]]:
    """What TRL passes: chat prompts go with completions as messages, text with text; one list a column."""
    chat = [not isinstance(prompt.content, str) for prompt in prompts]
    arguments: dict[str, list[Any]] = {
        "prompts": [list(p.content) if is_chat else p.content for p, is_chat in zip(prompts, chat, strict=True)],
        "completions": [
            [{"role": "assistant", "content": text}] if is_chat else text
            for text, is_chat in zip(texts, chat, strict=True)
        ],
        "completion_ids": [list(ids) for ids in token_ids],
    }
    for column in dict.fromkeys(key for prompt in prompts for key in prompt.columns):
        arguments[column] = [prompt.columns.get(column) for prompt in prompts]
    return arguments


def _accepted(name: str, function: RewardFunction, arguments: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """The arguments a function declares; all of them when it takes **kwargs."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a built-in that does not say what it takes
        return arguments
    missing = [
        p.name
        for p in parameters
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in arguments
    ]
    if missing:
        raise RewardError(
            f"The reward function {name} needs {missing[0]!r}, which no prompt has. Besides prompts, completions and "
            f"completion_ids there are the columns: {', '.join(k for k in arguments if k not in _FIXED) or 'none'}."
        )
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return arguments
    declared = {p.name for p in parameters}
    return {key: value for key, value in arguments.items() if key in declared}


_FIXED = ("prompts", "completions", "completion_ids")


def _values(name: str, returned: Any, prompts: Sequence[Prompt]) -> list[float | None]:
    with suppress(Exception):  # what cannot say its values is not a list of scores
        returned = returned.tolist()
    if not isinstance(returned, (list, tuple)):
        raise RewardError(
            f"The reward function {name} must return a list of {len(prompts)} numbers (or None), one for each "
            f"completion; it returned a {type(returned).__name__}: {brief(returned)}."
        )
    if len(returned) != len(prompts):
        raise RewardError(
            f"The reward function {name} returned {len(returned)} scores for {len(prompts)} completions; it must "
            "return one for each."
        )
    return [_value(name, value, prompt) for value, prompt in zip(returned, prompts, strict=True)]


def _value(name: str, value: Any, prompt: Prompt) -> float | None:
    with suppress(Exception):  # scalars of numpy and torch
        value = value.item()
    if value is None:
        return None
    number = math.inf
    if isinstance(value, (int, float)):
        with suppress(Exception):  # an integer beyond all floats
            number = float(value)
    if math.isnan(number):
        return None
    if not abs(number) < LARGEST:
        raise RewardError(
            f"The reward function {name} gave {brief(value)} for an answer to prompt {prompt.prompt_id}; a score is a "
            "finite number, or None for unscored."
        )
    return number


def _run(awaitable: Any) -> Any:
    async def wait() -> Any:
        return await awaitable

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(wait())
    from concurrent.futures import ThreadPoolExecutor  # in a notebook a loop is running already

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, wait()).result()


def _name(function: RewardFunction) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _distinct(names: Sequence[str]) -> list[str]:
    """a, a -> a, a_2."""
    result: list[str] = []
    for name in names:
        same = sum(1 for earlier in result if earlier == name or earlier.startswith(f"{name}_"))
        result.append(name if name not in result else f"{name}_{same + 1}")
    return result
