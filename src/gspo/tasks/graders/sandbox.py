"""Runs a Python program that nobody has read, in a process of its own with limits, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gspo.errors import RewardError

LEVELS = {
    "namespaces": "",
    "user": (
        "Candidate programs run as a user of their own, with limits, but with the network, and can read what all users "
        "may read: this machine does not allow new namespaces."
    ),
    "plain": (
        "Candidate programs run as the same user as gspo, with limits, but with the network, and can read, write and "
        "signal whatever that user can: this machine does not allow new namespaces."
    ),
}
"""How candidates are kept apart, strongest first, and what is said about it. docs/graders.md."""

SPARE_SECONDS = 10.0
"""What starting and cleaning up may take on top of a program's own limit."""


@dataclass(frozen=True)
class Limits:
    """For one run of a program. Memory is per process, and in the level ``namespaces`` also for all together."""

    seconds: float = 10.0
    """Wall-clock time."""
    cpu_seconds: int = 5
    """Processor time of each process."""
    memory_bytes: int = 2**30
    """Address space of each process."""
    processes: int = 32
    """Processes and threads at a time."""
    file_bytes: int = 2**24
    """One file; in the level ``namespaces`` all files together."""
    output_bytes: int = 2**20
    """Standard output and standard error together."""


@dataclass(frozen=True)
class Run:
    """How one run ended. ``exit_code``: negative for a signal, None when it was killed."""

    stdout: str
    stderr: str
    """Its end."""
    exit_code: int | None
    reason: str
    """The limit that ended it: time, memory or output; empty for none."""


Runner = Callable[[str, Sequence[str], Limits], Iterable[Run]]
"""(Python source, standard input of each run, limits) -> one Run for each input, in order. Whoever needs fewer stops
iterating."""


def run(source: str, inputs: Sequence[str], limits: Limits | None = None, level: str | None = None) -> Iterator[Run]:
    """Run a program once for each input, each time in a new empty folder. The default ``Runner``.

    ``level`` is one of ``LEVELS``; None takes the strongest that this machine allows. Raises RewardError when no
    sandbox can be made.
    """
    limits = limits or Limits()
    level = level or best_level()
    token = f"gspo-{secrets.token_hex(8)}"
    with tempfile.TemporaryDirectory(prefix=f"{token}-") if level != "namespaces" else _nothing() as folder:
        guard, received = _start(_job(source, inputs, limits, level, token, folder)), bytearray()
        try:
            for _ in inputs:
                yield _read(guard, received, limits.seconds + SPARE_SECONDS)
        finally:
            _end(guard)
            if level == "plain":
                _kill_marked(token)


@functools.cache
def best_level() -> str:
    """The strongest level that works here; tried once, and said when it is not ``namespaces``."""
    problems = []
    for level, shortfall in LEVELS.items():
        if level == ("plain" if os.geteuid() == 0 else "user"):  # root would not be limited; others cannot change user
            continue
        try:
            (tried,) = run("print('ran')", [""], level=level)
        except RewardError as error:
            problems.append(f"{level}: {error}")
            continue
        if tried.stdout == "ran\n":
            if shortfall:
                logging.getLogger("gspo").warning("%s", shortfall)
            return level
        problems.append(f"{level}: {tried.stderr.strip()[-200:] or tried}")
    raise RewardError(
        f"No candidate program can be run on this machine. Its Python is {sys.executable}; as root, other users must "
        f"be able to read it (chmod o+x on the folders above it). What was tried: {'; '.join(problems)}"
    )


def _job(
    source: str, inputs: Sequence[str], limits: Limits, level: str, token: str, folder: str | None
) -> dict[str, Any]:
    prefixes = {sys.prefix, sys.base_prefix, sys.exec_prefix, str(Path(sys.executable).resolve().parent.parent)}
    return {
        "source": source,
        "inputs": list(inputs),
        "limits": asdict(limits),
        "level": level,
        "token": token,
        "folder": folder,
        "interpreter": sys.executable,
        "prefixes": sorted(prefixes | {os.path.realpath(path) for path in prefixes}),
    }


def _start(job: dict[str, Any]) -> subprocess.Popen[bytes]:
    script = Path(__file__).with_name("guard") / "supervise.py"
    guard = subprocess.Popen(
        [sys.executable, "-I", "-S", str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={"GSPO_SANDBOX": job["token"]},
        start_new_session=True,
        bufsize=0,
    )
    data = json.dumps(job).encode()
    assert guard.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        _write(guard.stdin, b"%d\n" % len(data) + data)
    return guard


def _write(stream: Any, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[stream.write(view) :]


def _read(guard: subprocess.Popen[bytes], received: bytearray, seconds: float) -> Run:
    """The next run's result; ``received`` holds what came with the one before. A guard that is late or gone was killed
    by the program: that ends the run."""
    assert guard.stdout is not None
    end = time.monotonic() + seconds
    with selectors.DefaultSelector() as ready:
        ready.register(guard.stdout, selectors.EVENT_READ)
        while b"\n" not in received:
            if not ready.select(max(0.0, end - time.monotonic())):
                return Run("", "", None, "time")
            if not (data := guard.stdout.read(2**16)):
                return Run("", "", None, "killed")
            received += data
    line, _, rest = bytes(received).partition(b"\n")
    received[:] = rest
    found = json.loads(line)
    if "error" in found:
        raise RewardError(f"The sandbox for candidate programs cannot be made here: {found['error']}.")
    return Run(**found)


def _end(guard: subprocess.Popen[bytes]) -> None:
    """The end of its input tells the guard to kill all and go."""
    assert guard.stdin is not None and guard.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        guard.stdin.close()
    try:
        guard.wait(SPARE_SECONDS)
    except subprocess.TimeoutExpired:
        guard.kill()
        guard.wait()
    guard.stdout.close()


def _kill_marked(token: str) -> None:
    """A program of the same user can kill its guard; what it started still has the mark in its environment."""
    mark, found = token.encode(), True
    while found:
        found = False
        for place in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (place / "environ").read_bytes():
                    os.kill(int(place.name), signal.SIGKILL)
                    found = True


def _nothing() -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()
