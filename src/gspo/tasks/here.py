"""A reward function called in this process: built-in ones, and those that no other process can import."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from gspo.errors import RewardError
from gspo.tasks.calls import Arguments, Failure, TookTooLong, call
from gspo.tasks.functions import RewardFunction


def call_here(
    name: str,
    function: RewardFunction,
    given: Arguments,
    settings: Mapping[str, Any],
    prompt_ids: Sequence[str],
    timeout: float,
) -> list[float | None] | Failure:
    """As ``pool.Worker.call``, but the limit only interrupts Python code, and only in the main thread.

    Raises RewardError for what is wrong with the function itself.
    """
    try:
        with _limit(timeout):
            return call(name, function, given, settings, prompt_ids, timeout or None)
    except TookTooLong:
        return Failure("hung", f"took longer than {timeout:g} s")
    except RewardError:
        raise
    except (Exception, SystemExit) as error:  # whatever a user's function raises
        return Failure.of(error)


@contextmanager
def _limit(seconds: float) -> Iterator[None]:
    """Raise TookTooLong inside the block when it takes longer; does nothing where no signal can."""
    usable = threading.current_thread() is threading.main_thread()
    if not seconds or not usable or signal.getitimer(signal.ITIMER_REAL)[0]:
        yield
        return
    before = signal.signal(signal.SIGALRM, _too_long)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _too_long(number: int, frame: Any) -> NoReturn:
    raise TookTooLong
