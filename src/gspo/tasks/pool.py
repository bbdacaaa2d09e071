"""Processes in which reward functions run, so that one that hangs or crashes costs a call and not the run."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from gspo.errors import ConfigError, RewardError
from gspo.tasks.calls import Arguments, Failure

LOADING_SECONDS = 600.0
"""Longest time for a reward module to be imported; some load a model."""
ENDING_SECONDS = 5.0
"""For a process to end with all its children before it is killed from here."""
MOST_OUTPUT = 20_000
"""Characters kept of what a call prints."""
MOST_READS = 100


class Worker:
    """One process with some reward functions in it. It starts when it is needed, and again after a failure.

    ``log`` gets what the functions print. Everything that a function starts is killed with the process; nothing
    outlives the trainer, however that ends.
    """

    def __init__(self, functions: Sequence[str], log: Callable[[str], None]) -> None:
        self.functions, self.log = list(functions), log
        self.folder = Path.cwd()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process and import the functions, unless that is done. Raises ConfigError."""
        if self._process is not None:
            return
        theirs_in, self._requests = multiprocessing.Pipe(duplex=False)
        self._replies, theirs_out = multiprocessing.Pipe(duplex=False)
        self._output, their_output = os.pipe()
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from gspo.tasks.worker import main; "
            f"main({theirs_in.fileno()}, {theirs_out.fileno()})"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=their_output,
            stderr=their_output,
            pass_fds=(theirs_in.fileno(), theirs_out.fileno()),
            start_new_session=True,  # Ctrl-C in the terminal is the trainer's business
            cwd=self.folder,
            env=os.environ | {"PYTHONHASHSEED": "0"},  # what depends on the order of a set repeats
        )
        theirs_in.close()
        theirs_out.close()
        os.close(their_output)
        self._printed, self._hidden = "", 0
        self._closed = weakref.finalize(
            self, _end, self._process, self._requests, self._replies, self._output, os.getpid()
        )
        answer = self._ask(("load", self.functions), LOADING_SECONDS)
        if isinstance(answer, Failure):
            printed = f" It printed: {self._printed.strip()[-300:]}" if self._printed.strip() else ""
            raise ConfigError(f"task.reward: importing {', '.join(self.functions)} {answer.summary}.{printed}")
        if answer[0] == "refused":
            self.close()
            raise ConfigError(answer[1])

    def call(
        self,
        index: int,
        name: str,
        given: Arguments,
        settings: Mapping[str, Any],
        prompt_ids: Sequence[str],
        seed: int,
        timeout: float,
    ) -> list[float | None] | Failure:
        """Scores of ``functions[index]``; after a hang or a crash the process is gone, with all its children.

        ``timeout`` in seconds, 0 for none. Raises RewardError for what is wrong with the function itself.
        """
        self.start()
        answer = self._ask(("call", index, name, given, settings, list(prompt_ids), seed), timeout)
        if self._printed.strip():
            more = f"\n... and {self._hidden} characters more" if self._hidden else ""
            self.log(f"printed by the reward function {name}:\n{self._printed.rstrip()}{more}")
        self._printed, self._hidden = "", 0
        if isinstance(answer, Failure):
            return answer
        kind, value = answer
        if kind == "wrong":
            raise RewardError(value)
        result: list[float | None] | Failure = value
        return result

    def kill(self) -> None:
        """End the process now, from any thread; a call that is under way there comes back as a failure."""
        if self._process is not None:
            with suppress(OSError):
                self._process.terminate()  # the guard takes everything with it

    def close(self) -> None:
        """End the process: by itself if it is idle, else after a second. It may be started again."""
        if self._process is not None:
            self._process = None
            self._closed()

    def _ask(self, request: tuple[Any, ...], timeout: float) -> tuple[str, Any] | Failure:
        process = self._process
        assert process is not None
        try:
            message = pickle.dumps(request)
        except Exception as error:  # a column of a Prompt made in Python may hold anything
            raise RewardError(f"The prompts' columns cannot be sent to a reward function's process: {error}") from error
        try:
            self._requests.send_bytes(message)
            answer = self._answer(time.monotonic() + timeout if timeout else float("inf"))
        except (EOFError, OSError):
            with suppress(subprocess.TimeoutExpired):
                process.wait(ENDING_SECONDS)
            self._drain()
            self.close()
            return Failure("died", _how_it_ended(process.returncode))
        except BaseException:  # a second Ctrl-C
            self.kill()
            self.close()
            raise
        if answer is None:
            self.kill()
            self.close()
            return Failure("hung", f"took longer than {timeout:g} s")
        self._drain()
        return answer

    def _answer(self, deadline: float) -> tuple[str, Any] | None:
        """What the process replies; None when it does not in time. Reads what it prints meanwhile."""
        sources: list[Connection | int] = [self._replies, self._output]
        while (left := deadline - time.monotonic()) > 0:
            ready = wait(sources, None if left == float("inf") else left)
            if self._replies in ready:
                answer: tuple[str, Any] = self._replies.recv()
                return answer
            if self._output in ready and not self._read_output():
                sources.remove(self._output)
        return None

    def _drain(self) -> None:
        """What was printed before the reply; something left behind may print for ever."""
        for _ in range(MOST_READS):
            if not wait([self._output], 0) or not self._read_output():
                return

    def _read_output(self) -> bool:
        data = os.read(self._output, 1 << 16)
        text = data.decode("utf-8", "replace")
        kept = text[: max(0, MOST_OUTPUT - len(self._printed))]
        self._printed += kept
        self._hidden += len(text) - len(kept)
        return bool(data)


def _end(process: subprocess.Popen[bytes], requests: Connection, replies: Connection, output: int, owner: int) -> None:
    if os.getpid() != owner:  # a fork of the trainer: not its processes
        return
    requests.close()
    replies.close()
    os.close(output)
    try:
        process.wait(ENDING_SECONDS)
    except subprocess.TimeoutExpired:
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _how_it_ended(code: int | None) -> str:
    """``code``: as a shell gives it, 128 + signal."""
    if code is None or code < 0:
        return "ended its process"
    if code > 128:
        number = code - 128
        name = signal.Signals(number).name if number in list(signal.Signals) else f"signal {number}"
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        return f"was ended by {name}{hint}"
    return f"ended its process with exit code {code}"
