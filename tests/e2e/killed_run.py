"""Trains the smoke recipe in forked children that are killed with SIGKILL, one after the other; the last is left alone.

Run as a script with the runs folder and the number of kills. The first children die at chosen places (between updates,
inside an update, inside a checkpoint write, inside an evaluation), the others after a random number of progress
reports. Prints one line a child: where it died.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import gspo.training.checkpoint
import gspo.training.loop
from gspo.config import Config
from gspo.training.callbacks import Callback
from gspo.training.loop import train
from gspo.training.optimizer import MasterOptimizer

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "tiny.toml"


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class DieAt(Callback):
    """At the ``count``-th progress report of a stage, or of any."""

    def __init__(self, stage: str | None, count: int) -> None:
        self.stage, self.count = stage, count

    def on_progress(self, stage: str, done: int, total: int) -> None:
        if self.stage in (stage, None):
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


CHOSEN: list[tuple[str, Callable[[], Callback | None]]] = [
    ("a checkpoint being flushed", lambda: die_in(gspo.training.checkpoint, "_flush", 16)),
    ("rollouts", lambda: DieAt("rollout", 5)),
    ("an update", lambda: die_in(MasterOptimizer, "copy_to_model", 3)),
    ("updates", lambda: DieAt("update", 4)),
    ("checkpoints being pruned", lambda: die_in(gspo.training.loop, "prune", 2)),
    ("a checkpoint's checksums", lambda: die_in(gspo.training.checkpoint, "_facts", 14)),
    ("an evaluation", lambda: DieAt("eval", 2)),
    ("updates", lambda: DieAt("update", 3)),
]


def child(folder: Path, watch: Callback | None) -> None:
    config = Config.load(RECIPE).with_values({"run.directory": str(folder), "run.name": "killed", "run.keep": 2})
    train(config, resume="auto", callbacks=[watch] if watch else [])


def main(folder: Path, kills: int) -> int:
    torch.set_num_threads(1)
    dice = random.Random(0)
    for number in range(kills + 1):
        count = dice.randint(1, 25)  # an iteration has about twenty reports
        where = CHOSEN[number][0] if number < len(CHOSEN) else f"report {count}"
        pid = os.fork()
        if pid == 0:
            try:
                at_random = DieAt(None, count) if number < kills else None
                child(folder, CHOSEN[number][1]() if number < len(CHOSEN) else at_random)
            except BaseException as error:
                print(f"child {number}: {type(error).__name__}: {error}", flush=True)
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        if os.WIFEXITED(status) and (number < kills or os.WEXITSTATUS(status)):
            print(f"child {number} was not killed in {where}", flush=True)
            return 1
        print(f"child {number}: killed in {where}" if number < kills else "the last one finished", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
