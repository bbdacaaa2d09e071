"""``math``: mathematical equality by the math-verify library, in a process of its own.

The library bounds its time with SIGALRM, which works in the main thread only and does not stop a long computation
inside C. Here that is switched off; a timer of the kernel ends the process instead, from whatever thread it is asked.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gspo.errors import RewardError
from gspo.tasks.graders.answers import answer_part, golds, text_of

SECONDS = 5.0
"""Processor time for one comparison."""

LONGEST = 10_000
"""Characters at the end of an answer that are searched."""


def math(
    completions: Sequence[Any], answer: Sequence[Any] | None = None, solution: Sequence[Any] | None = None
) -> list[float | None]:
    """1 when the answer is mathematically the gold one. A gold value that cannot be read leaves the row unscored.

    What counts as the answer is math-verify's rule: the last ``\\boxed{}``, else a LaTeX formula or number after words
    such as "the answer is", else the last formula or number. An answer that takes too long to compare scores 0.
    """
    scores: dict[tuple[str, str], float | None] = {}
    rows = []
    for completion, gold in zip(
        completions, golds("math", len(completions), ("answer", answer), ("solution", solution)), strict=True
    ):
        row = (answer_part(text_of(completion)), "" if gold is None or isinstance(gold, bool) else str(gold))
        if row not in scores:
            scores[row] = grade(*row)
        rows.append(row)
    return [scores[row] for row in rows]


def grade(text: str, gold: str, seconds: float = SECONDS) -> float | None:
    """1.0 or 0.0 for one answer; None when ``gold`` is not mathematics."""
    gold = gold.rpartition("####")[2].strip()
    if not gold or not _ask(gold, None, seconds):
        return None
    return float(bool(text) and bool(_ask(gold, text[-LONGEST:], seconds)))


_worker: subprocess.Popen[bytes] | None = None
_lock = threading.Lock()
_parents: list[Any] = []


def _ask(gold: str, text: str | None, seconds: float) -> bool:
    """Is ``text`` the same as ``gold``? With None: can gold be read? False when that takes longer than ``seconds``."""
    global _worker
    with _lock:
        for _ in range(2):  # once more when it ended for another reason than its time
            if _worker is None:
                _worker = _start()
            if line := _exchange(_worker, [gold, text, seconds]):
                return bool(json.loads(line))
            ended, _worker = _stop(_worker), None
            if ended in (-signal.SIGPROF, -signal.SIGALRM):
                break
        return False


def _exchange(worker: subprocess.Popen[bytes], request: Any) -> bytes:
    """One line there, one line back; empty when the process is gone."""
    assert worker.stdin is not None and worker.stdout is not None
    try:
        worker.stdin.write(json.dumps(request).encode() + b"\n")
        worker.stdin.flush()
    except OSError:
        return b""
    return worker.stdout.readline()


def _start() -> subprocess.Popen[bytes]:
    script = Path(__file__).with_name("math_worker.py")
    worker = subprocess.Popen(
        [sys.executable, "-P", "-W", "ignore", str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    if worker.stdout is None or worker.stdout.readline() != b"ready\n":
        _stop(worker)
        raise RewardError(
            "The process of the grader math ended at its start. See why with: python -c 'import math_verify'"
        )
    return worker


def _stop(worker: subprocess.Popen[bytes]) -> int:
    """Its exit code."""
    worker.kill()
    for stream in (worker.stdin, worker.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
    return worker.wait()


def _forget() -> None:
    """In a forked process: the worker is the parent's, and the lock may be held by a thread that is not here."""
    global _worker, _lock
    _parents.append(_worker)
    _worker, _lock = None, threading.Lock()


def _close() -> None:
    if _worker is not None:
        _stop(_worker)


os.register_at_fork(after_in_child=_forget)
atexit.register(_close)
