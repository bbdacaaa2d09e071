"""The whole run, on one page."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gspo.config import Config
from gspo.errors import DivergenceError, Interrupted
from gspo.evaluation.run import evaluate_system
from gspo.records import RunDirectory
from gspo.rollout.system import System, copy_policy, load_system
from gspo.sync.publish import Publisher
from gspo.training.callbacks import Callback, RunInfo
from gspo.training.checkpoint import prune, save_policy
from gspo.training.environment import environment
from gspo.training.iteration import run_iteration
from gspo.training.trainer import Trainer

MAX_NOT_FINITE = 5
"""Updates with a gradient that is not finite, in a row, before the run is given up."""


@dataclass
class RunResult:
    """What a run leaves: ``metrics`` are the lines of metrics.jsonl, answers those of the first and last evaluation."""

    directory: Path
    iterations: int = 0
    seconds: float = 0.0
    first_eval: dict[str, Any] | None = None
    last_eval: dict[str, Any] | None = None
    first_answers: list[dict[str, Any]] = field(default_factory=list)
    last_answers: list[dict[str, Any]] = field(default_factory=list)
    metrics: list[dict[str, Any]] = field(default_factory=list)


def train(config: Config, *, callbacks: Sequence[Callback] = ()) -> RunResult:
    """Train ``config.model`` on ``config.task`` with GSPO and write everything to the run directory.

    Raises ConfigError, DataError or RewardError before anything is written when the run cannot start; later
    EngineError, RewardError, WeightSyncError, DivergenceError or CheckpointError. Ctrl-C or SIGTERM finishes the
    present piece, saves, and raises Interrupted; a second one stops at once.
    """
    config = config.resolved()
    torch.manual_seed(config.run.seed)
    system = load_system(config)
    directory = RunDirectory.create(config.run.directory, config.run.name or "run")
    return _Run(config, system, directory, callbacks).train()


class _Run:
    def __init__(self, config: Config, system: System, directory: RunDirectory, callbacks: Sequence[Callback]) -> None:
        self.config, self.system, self.directory, self.callbacks = config, system, directory, callbacks
        reference = None
        if config.algorithm.kl_weight > 0:
            reference = copy_policy(system.policy, system.policy.dtype)
        self.trainer = Trainer(system.policy, config, reference)
        self.publisher = Publisher(system.policy, system.engine)
        self.result = RunResult(directory.path)
        self.best: tuple[float, int | None] = (-1.0, None)
        self.not_finite = 0
        self.stop_requested = False

    def train(self) -> RunResult:
        start = time.perf_counter()
        self.directory.write_environment(environment(self.config, self.system.policy.dtype))
        self.config.save(self.directory.path / "config.toml")
        self._tell("on_start", RunInfo(self.config, self.directory.path, self.system.facts))
        for fact in self.system.facts:
            self.directory.log(fact)
        reason = "failed"
        try:
            with self._stop_signals():
                self._loop()
            reason = "finished"
        except _Stopped:
            reason = "interrupted"
            self._save(self.result.iterations)
            raise Interrupted(self.directory.path) from None
        finally:
            self.result.seconds = time.perf_counter() - start
            self.directory.log(f"run {reason} after {self.result.iterations} iterations")
            self._tell("on_end", reason)
        return self.result

    def _loop(self) -> None:
        run = self.config.run
        self._evaluate(0)
        for iteration in range(1, run.iterations + 1):
            done = run_iteration(self.system, self.trainer, self.publisher, self.config, iteration, self._progress)
            self.directory.write_rollouts(iteration, done.rows)
            self.directory.append_metrics(done.metrics)
            self.result.metrics.append(done.metrics)
            self.result.iterations = iteration
            self._tell("on_iteration", done.metrics, done.groups)
            self._check_finite(done.metrics)
            self._stop_if_requested()
            last = iteration == run.iterations
            if last or _due(iteration, self.config.eval.every):
                self._evaluate(iteration)
            if last or _due(iteration, run.checkpoint_every):
                self._save(iteration)
            self._stop_if_requested()

    def _evaluate(self, iteration: int) -> None:
        if not self.config.eval.every:
            return
        record, answers = evaluate_system(self.system, self.config, iteration, self._progress)
        self.directory.append_eval(record, answers)
        if self.result.first_eval is None:
            self.result.first_eval, self.result.first_answers = record, answers
        self.result.last_eval, self.result.last_answers = record, answers
        if iteration and (record["accuracy"] or 0.0) > self.best[0]:
            self.best = (record["accuracy"] or 0.0, iteration)
        self._tell("on_eval", record, answers)

    def _save(self, iteration: int) -> None:
        folder = save_policy(self.system.policy, self.trainer.optimizer, self.directory.checkpoints / str(iteration))
        prune(self.directory.checkpoints, self.config.run.keep, self.best[1])
        self.directory.log(f"checkpoint {folder}")

    def _check_finite(self, metrics: dict[str, Any]) -> None:
        """Count updates thrown away for NaN or infinite gradients; give up when nothing else happens."""
        bad = metrics["optimizer/updates_not_finite"]
        made = self.config.algorithm.updates_per_rollout - bad - metrics["optimizer/updates_without_signal"]
        self.not_finite = 0 if made else self.not_finite + bad
        if self.not_finite >= MAX_NOT_FINITE:
            raise DivergenceError(
                f"The last {self.not_finite} gradients were not finite, so no update was made. Lower "
                "optimizer.learning_rate, set model.dtype = 'float32', or start from an earlier checkpoint."
            )
        if bad:
            self._tell("on_message", f"{bad} update(s) left out: the gradient was not finite")

    def _progress(self, stage: str, done: int, total: int) -> None:
        self._tell("on_progress", stage, done, total)
        if stage in ("rollout", "eval"):  # nothing is lost by abandoning these
            self._stop_if_requested()

    def _stop_if_requested(self) -> None:
        if self.stop_requested:
            raise _Stopped

    @contextmanager
    def _stop_signals(self) -> Iterator[None]:
        """First Ctrl-C or SIGTERM: stop at the next safe point. Second: at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def handler(number: int, frame: Any) -> None:
            if self.stop_requested:
                raise KeyboardInterrupt
            self.stop_requested = True
            self._tell("on_message", "stopping at the next safe point and saving; once more to stop at once")

        before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, old in before.items():
                signal.signal(number, old)

    def _tell(self, event: str, *details: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(*details)


class _Stopped(Exception):
    """Carries a stop request out of nested calls."""


def _due(iteration: int, every: int) -> bool:
    return every > 0 and iteration % every == 0
