"""One call of one reward function in TRL's form: what it is given, and what it must return."""

from __future__ import annotations

import functools
import inspect
import math
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from gspo.config import LARGEST
from gspo.errors import RewardError, brief, first_line
from gspo.tasks.functions import RewardFunction
from gspo.types import Prompt

if TYPE_CHECKING:
    import asyncio

FIXED = ("prompts", "completions", "completion_ids")
"""Arguments that every call has; the others are columns."""
MOST_TRACEBACK = 20_000
"""Characters kept of a traceback: an error may quote a whole answer."""
MOST_SUMMARY = 300

Arguments = dict[str, list[Any]]


class TookTooLong(BaseException):
    """The time limit of a call is over. Not an Exception, so that a function that catches those does not stop it."""


@dataclass(frozen=True)
class Failure:
    """Why a call gave no scores. raised: it ended with an exception. hung: it took too long. died: its process ended.

    ``summary`` follows "The reward function NAME" in a sentence.
    """

    kind: Literal["raised", "hung", "died"]
    summary: str
    traceback: str = ""

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        text = "".join(traceback.format_exception(error))
        if len(text) > MOST_TRACEBACK:
            text = f"{text[: MOST_TRACEBACK // 2]}\n ...\n{text[-MOST_TRACEBACK // 2 :]}"
        summary = " ".join(f"raised {type(error).__name__}: {first_line(error)}"[:MOST_SUMMARY].split())
        return cls("raised", summary.rstrip(".:"), text)


def arguments(prompts: Sequence[Prompt], texts: Sequence[str], token_ids: Sequence[Sequence[int]]) -> Arguments:
    """What TRL passes: chat prompts go with completions as messages, text with text; one list a column."""
    chat = [not isinstance(prompt.content, str) for prompt in prompts]
    found: Arguments = {
        "prompts": [list(p.content) if is_chat else p.content for p, is_chat in zip(prompts, chat, strict=True)],
        "completions": [
            [{"role": "assistant", "content": text}] if is_chat else text
            for text, is_chat in zip(texts, chat, strict=True)
        ],
        "completion_ids": [list(ids) for ids in token_ids],
    }
    for column in dict.fromkeys(key for prompt in prompts for key in prompt.columns):
        found[column] = [prompt.columns.get(column) for prompt in prompts]
    return found


def call(
    name: str,
    function: RewardFunction,
    given: Arguments,
    settings: Mapping[str, Any],
    prompt_ids: Sequence[str],
    timeout: float | None = None,
) -> list[float | None]:
    """The function's scores, one for each of ``prompt_ids``; None where it did not score.

    ``settings`` are facts of the run that a function gets when it names them (``max_tokens``). ``timeout``: seconds,
    for async functions only. Raises RewardError for a wrong signature or return value, and TookTooLong; what the
    function raises passes through.
    """
    returned = function(**_accepted(name, function, given, settings))
    if inspect.isawaitable(returned):
        returned = _wait(returned, timeout)
    return _values(name, returned, prompt_ids)


def _accepted(name: str, function: RewardFunction, given: Arguments, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments a function declares; all of them, without the settings it does not name, when it has **kwargs."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a built-in that does not say what it takes
        return dict(given)
    declared = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    named = {key: value for key, value in settings.items() if key in declared and key not in given}
    missing = [p.name for p in parameters if p.name in declared and p.default is p.empty and p.name not in given]
    missing = [key for key in missing if key not in named]
    if missing:
        raise RewardError(
            f"The reward function {name} needs {missing[0]!r}, which no prompt has. Besides prompts, completions and "
            f"completion_ids there are the columns: {', '.join(k for k in given if k not in FIXED) or 'none'}."
        )
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return given | named
    return {key: value for key, value in given.items() if key in declared} | named


def _values(name: str, returned: Any, prompt_ids: Sequence[str]) -> list[float | None]:
    with suppress(Exception):  # what cannot say its values is not a list of scores
        returned = returned.tolist()
    if not isinstance(returned, (list, tuple)):
        raise RewardError(
            f"The reward function {name} must return a list of {len(prompt_ids)} numbers (or None), one for each "
            f"completion; it returned a {type(returned).__name__}: {brief(returned)}."
        )
    if len(returned) != len(prompt_ids):
        raise RewardError(
            f"The reward function {name} returned {len(returned)} scores for {len(prompt_ids)} completions; it must "
            "return one for each."
        )
    return [_value(name, value, prompt) for value, prompt in zip(returned, prompt_ids, strict=True)]


def _value(name: str, value: Any, prompt_id: str) -> float | None:
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
            f"The reward function {name} gave {brief(value)} for an answer to prompt {prompt_id}; a score is a finite "
            "number, or None for unscored."
        )
    return number


def _wait(awaitable: Any, timeout: float | None) -> Any:
    """The result of a coroutine, run on a loop that outlives the call: clients that it made stay usable."""
    import asyncio  # 90 ms that a process for plain functions does not need

    async def result() -> Any:
        try:
            async with asyncio.timeout(timeout) as limit:
                return await awaitable
        except TimeoutError:
            if limit.expired():
                raise TookTooLong from None
            raise

    return asyncio.run_coroutine_threadsafe(result(), _loop()).result()


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    import asyncio

    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="gspo-rewards", daemon=True).start()
    return loop
