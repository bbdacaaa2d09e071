"""The other side of ``gspo.tasks.pool``: a small process, without torch, in which reward functions run.

It is two processes. The guard only waits: when the worker ends, when the trainer is gone (its end of the pipe closes,
even by SIGKILL) or on SIGTERM it kills the worker and everything that came from it. The worker may be stuck in C code
that never returns to Python; the guard is not.
"""

from __future__ import annotations

import ctypes
import os
import random
import select
import signal
import sys
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from gspo.errors import ConfigError, RewardError
from gspo.tasks.calls import Failure, call
from gspo.tasks.functions import RewardFunction, load_reward

GRACE_SECONDS = 1.0
"""For the worker to end by itself when the trainer has closed the pipe."""
MOST_SWEEPS = 1000
"""Some milliseconds each; a process that cannot be killed must not keep the guard."""
PR_SET_CHILD_SUBREAPER = 36


def main(requests_fd: int, replies_fd: int) -> None:
    """Entry of the process: answer requests from one pipe on the other until it is closed."""
    for descriptor in (requests_fd, replies_fd):
        os.set_inheritable(descriptor, False)  # what the user's code starts must not hold the pipes open
    signal.signal(signal.SIGTERM, lambda *_: _leave(0))
    with suppress(OSError, AttributeError):  # Linux: orphans of orphans come to the guard
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    worker = os.fork()
    if worker == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setpgid(0, 0)
        serve(Connection(requests_fd, writable=False), Connection(replies_fd, readable=False))
        return
    with suppress(OSError):  # whoever comes first; the worker may have ended
        os.setpgid(worker, worker)
    signal.signal(signal.SIGTERM, lambda *_: _leave(0, worker))
    os.close(replies_fd)
    guard(worker, requests_fd)


def serve(requests: Connection, replies: Connection) -> None:
    """('load', names) and ('call', ...) -> what ``pool.Worker`` reads, until the pipe is closed."""
    functions: list[RewardFunction] = []
    while True:
        try:
            kind, *details = requests.recv()
        except EOFError:
            return
        answer = _load(functions, details[0]) if kind == "load" else _call(functions, *details)
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # user code may have replaced or closed them
                stream.flush()
        try:
            replies.send(answer)
        except BrokenPipeError:
            return


def _load(functions: list[RewardFunction], names: list[str]) -> tuple[str, str]:
    for name in names:
        try:
            functions.append(load_reward(name))
        except ConfigError as error:
            return "refused", str(error)
        except BaseException as error:  # a module that calls sys.exit
            return "refused", f"task.reward: {name} cannot be imported: {type(error).__name__}: {error}"
    return "loaded", ""


def _call(
    functions: list[RewardFunction], index: int, name: str, given: Any, settings: Any, prompt_ids: list[str], seed: int
) -> tuple[str, Any]:
    _seed(seed)
    try:
        return "scores", call(name, functions[index], given, settings, prompt_ids)
    except RewardError as error:
        return "wrong", str(error)
    except BaseException as error:  # whatever a user's function raises, sys.exit and KeyboardInterrupt too
        return "failure", Failure.of(error)


def _seed(seed: int) -> None:
    """The same draws for the same answers, whenever they are scored: a resumed run scores as one that never stopped."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


def guard(worker: int, requests_fd: int) -> NoReturn:
    """Wait until the worker ends or the trainer is gone, then leave nothing behind."""
    threading.Thread(target=_watch_trainer, args=(requests_fd,), daemon=True).start()
    while True:
        try:
            ended, status = os.waitpid(-1, 0)
        except ChildProcessError:
            _leave(1)
        if ended == worker:
            code = os.waitstatus_to_exitcode(status)
            _leave(code if code >= 0 else 128 - code, worker)


def _watch_trainer(requests_fd: int) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # the main thread's, whose wait it must interrupt
    poll = select.poll()
    poll.register(requests_fd, 0)  # nothing but the other end's closing
    poll.poll()
    time.sleep(GRACE_SECONDS)
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    signal.pthread_kill(main_thread, signal.SIGTERM)


def _leave(code: int, worker: int | None = None) -> NoReturn:
    """End with all that was ever started from here: the worker's process group, then what left that group."""
    if worker:
        with suppress(OSError):
            os.killpg(worker, signal.SIGKILL)
    for _ in range(MOST_SWEEPS):
        found = descendants(os.getpid())
        if not found:
            break
        for process in found:
            with suppress(OSError):
                os.kill(process, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.002)
    os._exit(code)


def descendants(ancestor: int) -> list[int]:
    """Ids of all processes below one, nearest first; from /proc, so on Linux."""
    children: dict[int, list[int]] = {}
    try:
        ids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []
    for process in ids:
        with suppress(OSError), open(f"/proc/{process}/stat", "rb") as file:
            parent = int(file.read().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(process)
    found = list(children.get(ancestor, []))
    for process in found:  # grows while it is walked
        found += children.get(process, [])
    return found
