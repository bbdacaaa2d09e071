"""Trains the smoke recipe in forked children that are killed with SIGKILL, one after the other, until one finishes.

Run as a script with the runs folder and the number of kills. The first children kill themselves at chosen places
(between updates, inside an update, inside a checkpoint write, inside an evaluation); the others are killed by the
clock. Prints one line a child: where it was killed.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

import gspo.training.checkpoint
from gspo.config import Config
from gspo.training.callbacks import Callback
from gspo.training.loop import train
from gspo.training.optimizer import MasterOptimizer

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "tiny.toml"


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class DieAt(Callback):
    """At the ``count``-th progress report of a stage."""

    def __init__(self, stage: str, count: int) -> None:
        self.stage, self.count = stage, count

    def on_progress(self, stage: str, done: int, total: int) -> None:
        if stage == self.stage:
            self.count -= 1
            if self.count == 0:
                die()


def die_in(owner: Any, name: str, count: int) -> None:
    """In the middle of the ``count``-th call of a function."""
    original = getattr(owner, name)
    calls = 0

    def dying(*arguments: Any, **keywords: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == count:
            die()
        return original(*arguments, **keywords)

    setattr(owner, name, dying)


CHOSEN: list[tuple[str, Any]] = [
    ("a checkpoint being flushed", lambda: die_in(gspo.training.checkpoint, "_flush", 4)),
    ("rollouts", lambda: DieAt("rollout", 5)),
    ("an update", lambda: die_in(MasterOptimizer, "copy_to_model", 3)),
    ("updates", lambda: DieAt("update", 7)),
    ("a checkpoint's checksums", lambda: die_in(gspo.training.checkpoint, "_facts", 30)),
    ("an evaluation", lambda: DieAt("eval", 3)),
    ("a checkpoint being pruned", lambda: die_in(gspo.training.checkpoint, "prune", 2)),
    ("updates", lambda: DieAt("update", 3)),
]


def child(folder: Path, number: int) -> None:
    config = Config.load(RECIPE).with_values({"run.directory": str(folder), "run.name": "killed", "run.keep": 2})
    watch = CHOSEN[number][1]() if number < len(CHOSEN) else None
    train(config, resume="auto", callbacks=[watch] if watch else [])


def main(folder: Path, kills: int) -> int:
    torch.set_num_threads(1)
    clock = random.Random(0)
    for number in range(1000):
        pid = os.fork()
        if pid == 0:
            try:
                child(folder, number)
            except BaseException as error:
                print(f"child {number}: {type(error).__name__}: {error}", flush=True)
                os._exit(1)
            os._exit(0)
        if len(CHOSEN) <= number < kills:
            delay = clock.uniform(0.2, 2.0)
            timer = threading.Timer(delay, os.kill, (pid, signal.SIGKILL))
            timer.start()
        _, status = os.waitpid(pid, 0)
        if number >= len(CHOSEN) and number < kills:
            timer.cancel()
        if os.WIFSIGNALED(status):
            where = CHOSEN[number][0] if number < len(CHOSEN) else f"after {delay:.2f} s"
            print(f"child {number}: killed in {where}", flush=True)
            continue
        code = os.WEXITSTATUS(status)
        print(f"child {number}: ended with {code}", flush=True)
        if code or number >= kills:
            return code
        time.sleep(0)
    return 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
