"""The whole run, on one page."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from gspo.config import Config
from gspo.errors import CheckpointError, DivergenceError, Interrupted
from gspo.evaluation.run import evaluate_system
from gspo.policy.load import load_policy
from gspo.records import RunDirectory
from gspo.rollout.collect import collect
from gspo.rollout.system import System, load_system
from gspo.sync.publish import Publisher
from gspo.training.callbacks import Callback, RunInfo
from gspo.training.checkpoint import Place, RunState, load_moments, prune, read_state, save_checkpoint, saved, set_aside
from gspo.training.environment import environment
from gspo.training.iteration import Iteration, IterationResult, run_iteration
from gspo.training.observe import band_note, nothing_learned
from gspo.training.resume import ResumePoint, find_resume_point, random_states, restore_random_states
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
    first_answers: list[dict[str, Any]] = field(default_factory=list, repr=False)
    last_answers: list[dict[str, Any]] = field(default_factory=list, repr=False)
    metrics: list[dict[str, Any]] = field(default_factory=list, repr=False)


def train(
    config: Config, *, resume: str | None = None, callbacks: Sequence[Callback] = (), system: System | None = None
) -> RunResult:
    """Train ``config.model`` on ``config.task`` with GSPO and write everything to the run directory.

    ``resume``: go on with that run (its folder, its name, or 'auto' for the newest of this name, else a new one) from
    its newest whole checkpoint, as if it had never stopped. ``system``: of ``load_system``, when that is done already.

    Raises ConfigError, DataError, RewardError or CheckpointError before anything is trained when the run cannot start;
    later EngineError, RewardError, WeightSyncError, DivergenceError or CheckpointError. Ctrl-C or SIGTERM finishes the
    present piece, saves, and raises Interrupted; a second one stops at once.
    """
    config = config.resolved()
    point = find_resume_point(config, resume) if resume is not None else None
    torch.manual_seed(config.run.seed)
    with ExitStack() as held:
        held.enter_context(torch.enable_grad())  # notebooks switch it off for their own work
        if point:
            held.enter_context(point.directory.only_writer())
        if system is None:
            system = held.enter_context(closing(load_system(config)))
        directory = point.directory if point else RunDirectory.create(config.run.directory, config.run.name or "run")
        if not point:
            held.enter_context(directory.only_writer())
        system.engine.log_to(directory.path)
        reference = system.starting_policy() if config.algorithm.kl_weight > 0 else None
        trainer = held.enter_context(closing(Trainer(system.policy, config, reference)))
        return _Run(config, system, directory, callbacks, trainer, point).train()


class _Run:
    def __init__(
        self,
        config: Config,
        system: System,
        directory: RunDirectory,
        callbacks: Sequence[Callback],
        trainer: Trainer,
        point: ResumePoint | None,
    ) -> None:
        self.config, self.system, self.directory, self.callbacks = config, system, directory, callbacks
        self.trainer = trainer
        self.result = RunResult(directory.path)
        self.under_way: Iteration | None = None
        self.stop_requested = False
        source = system.task.train
        self.state = RunState(0, 0, source.state_dict(), source.fingerprint)
        self.notes = self._go_on_from(point) if point else []
        if point:
            system.engine.load_weights(self.state.updates)
        self.publisher = Publisher(system.policy, system.engine)
        if point:
            self.publisher.noise = self.state.engine_noise
            restore_random_states(self.state.random)

    def _go_on_from(self, point: ResumePoint) -> list[str]:
        """Take over a checkpoint's state; returns lines for the user."""
        self.state, self.under_way = read_state(point.folder)
        source, optimizer = self.system.task.train, self.trainer.optimizer
        if source.fingerprint != self.state.data_fingerprint:
            raise CheckpointError(
                f"--resume: the prompts of {self.config.task.prompts} are not those that {point.directory.path} "
                "trained on (their fingerprint differs), so its place in them means nothing. Restore them, or start a "
                f"new run from its weights: --model.path {point.folder}"
            )
        source.load_state_dict(self.state.cursor)
        saved_model = load_policy(replace(self.config.model, path=str(point.folder))).model
        optimizer.load_weights(dict(saved_model.named_parameters()))
        load_moments(point.folder, optimizer)
        optimizer.updates = self.state.updates
        set_aside(point.directory.checkpoints, after=point.place)
        point.directory.cut_after(self.state.iterations)
        evals = point.directory.evals()
        self.result.iterations = self.state.iterations
        self.result.metrics = point.directory.metrics()
        if evals:
            first, last = evals[0], evals[-1]
            self.result.first_eval, self.result.last_eval = first, last
            self.result.first_answers = point.directory.eval_answers(first["iteration"])
            self.result.last_answers = point.directory.eval_answers(last["iteration"])
        notes = [*point.notes, f"resumed from checkpoint {point.place.name}"]
        if self.state.iterations >= self.config.run.iterations:
            notes.append(f"all {self.state.iterations} iterations are done already; a larger run.iterations goes on")
        return notes

    def train(self) -> RunResult:
        start = time.perf_counter()
        self.directory.write_environment(environment(self.config, self.system.policy.dtype))
        self.directory.write_config(self.config.to_toml())
        info = RunInfo(self.config, self.directory.path, self.system.facts, self.result.iterations)
        self.system.task.rewards.log, self.system.task.rewards.say = self.directory.log, self._say
        self._tell("on_start", info)
        for fact in self.system.facts:
            self.directory.log(fact)
        for note in self.notes:
            self._say(note)
        reason = "failed"
        try:
            with self._stop_signals():
                self._loop()
            reason = "finished"
        except _Stopped:
            reason = "interrupted"
            self._save()
            raise Interrupted(self.directory.path) from None
        except (CheckpointError, DivergenceError):
            raise
        except (Exception, SystemExit):  # rich exits when the reader of our output has left
            self._save_after_failure()
            raise
        finally:
            self.system.task.rewards.close()
            self.result.seconds = time.perf_counter() - start
            self.directory.log(f"run {reason} after {self.result.iterations} iterations")
            self._tell("on_end", reason)
        return self.result

    def _loop(self) -> None:
        if self.under_way is None:
            self._evaluate_and_save()
        while self.result.iterations < self.config.run.iterations:
            done = self._iterate(self.result.iterations + 1)
            self.directory.write_rollouts(self.result.iterations + 1, done.rows)
            self.directory.append_metrics(done.metrics)
            self.result.metrics.append(done.metrics)
            self._next_iteration()
            notes = [*self._learn_noise(done.metrics), *self._count_not_finite(done.metrics)]
            self._tell("on_iteration", done.metrics, done.groups)  # may raise: the state is whole by now
            for note in notes:
                self._say(note)
            self._give_up_if_diverged()
            self._stop_if_requested()
            self._evaluate_and_save()
        if self.result.iterations > 1 and self.result.metrics:
            for note in self._band_notes(self.result.metrics[-1]):
                self._say(note)
        if nothing := nothing_learned(self.result.metrics):
            self._say(nothing)

    def _iterate(self, number: int) -> IterationResult:
        if self.under_way is None:
            collected = collect(self.system, self.config, number, self._progress)
            self.under_way = Iteration(number, collected, self._old_source())
            self.state.cursor = self.system.task.train.state_dict()
        return run_iteration(self.under_way, self.trainer, self.publisher, self.config, self._progress)

    def _old_source(self) -> str:
        setting = self.config.algorithm.old_logprobs
        return setting if setting != "auto" else self.state.old_source or "trainer"

    def _next_iteration(self) -> None:
        self.under_way = None
        self.result.iterations += 1

    def _learn_noise(self, metrics: dict[str, Any]) -> list[str]:
        """What the first iteration shows of rounding, the engine and the clip band decides 'auto'; returns lines."""
        state, gap, notes = self.state, metrics.get("mismatch/sequence_p99"), []
        if metrics["iteration"] == 1:
            state.noise_floor = metrics.get("noise/floor")
            notes += self._band_notes(metrics)
        if self.config.algorithm.old_logprobs == "auto" and state.old_source is None and gap is not None:
            limit = min(self.config.clip) / 3
            state.old_source = "engine" if gap < limit else "trainer"
            notes.append(
                f"algorithm.old_logprobs = auto: {state.old_source}, because 99 of 100 answers differ by at most "
                f"{gap:.1e} between engine and trainer, and a third of the clip band is {limit:.1e}"
            )
        return notes

    def _band_notes(self, metrics: dict[str, Any]) -> list[str]:
        note = band_note(metrics, self.state.noise_floor, self.config)
        return [note] if note else []

    def _evaluate_and_save(self) -> None:
        """What is due after the iterations done so far, unless a run that this one goes on from has done it."""
        run, iteration = self.config.run, self.result.iterations
        last = iteration == run.iterations
        if iteration == 0:
            self._save()  # before any work: a disk that is full or read-only shows now
        better = False
        if (last or _due(iteration, self.config.eval.every)) and iteration not in self._accuracies():
            better = self._evaluate(iteration)
        if better or last or _due(iteration, run.checkpoint_every):
            self._save()
        self._stop_if_requested()

    def _evaluate(self, iteration: int) -> bool:
        """Returns whether it is the best trained policy so far."""
        if not self.config.eval.every:
            return False
        before = self._accuracies()
        record, answers = evaluate_system(self.system, self.config, iteration, self._progress)
        self.directory.append_eval(record, answers)
        if self.result.first_eval is None:
            self.result.first_eval, self.result.first_answers = record, answers
        self.result.last_eval, self.result.last_answers = record, answers
        self._tell("on_eval", record, answers)
        earlier = [accuracy for number, accuracy in before.items() if number > 0]
        return iteration > 0 and (record["accuracy"] or 0.0) > max(earlier, default=-1.0)

    def _accuracies(self) -> dict[int, float]:
        """Held-out accuracy of the evaluations so far, by iteration."""
        return {record["iteration"]: record["accuracy"] or 0.0 for record in self.directory.evals()}

    def _save(self) -> None:
        """The present state, between two updates or two iterations, unless it is on the disk already."""
        checkpoints, optimizer = self.directory.checkpoints, self.trainer.optimizer
        place = Place(self.result.iterations, self.under_way.updates_done if self.under_way else -1)
        if place in saved(checkpoints):
            return
        self.state.iterations, self.state.updates = self.result.iterations, optimizer.updates
        self.state.engine_noise, self.state.random = self.publisher.noise, random_states()
        folder = save_checkpoint(
            checkpoints, place, self.system.policy, optimizer, self.state, self.config.to_toml(), self.under_way
        )
        trained = {number: accuracy for number, accuracy in self._accuracies().items() if number > 0}
        left = prune(checkpoints, self.config.run.keep, best=max(trained, key=trained.__getitem__, default=None))
        if left:
            self._say(f"checkpoints {', '.join(left)} cannot be deleted; run.keep does not hold")
        self.directory.log(f"checkpoint {folder}")

    def _save_after_failure(self) -> None:
        """What led up to a failure is kept: the reward function mended, the run goes on from here."""
        if not self.trainer.optimizer.intact:
            return
        try:
            self._save()
            self._say(f"saved what was done; go on with: gspo train --resume {self.directory.path}")
        except Exception as error:  # the failure itself is what the user must hear
            self.directory.log(f"not saved: {error}")

    def _count_not_finite(self, metrics: dict[str, Any]) -> list[str]:
        """Updates thrown away for NaN or infinite gradients since one was made; returns lines on those left out."""
        bad = metrics["optimizer/updates_not_finite"]
        masked = metrics.get("optimizer/updates_masked", 0)
        made = self.config.algorithm.updates_per_rollout - bad - masked - metrics["optimizer/updates_without_signal"]
        self.state.not_finite = 0 if made else self.state.not_finite + bad
        notes = [f"{bad} update(s) left out: the gradient was not finite"] if bad else []
        if masked:
            notes.append(f"{masked} update(s) left out: {self.config.algorithm.correction} masked every answer in them")
        return notes

    def _give_up_if_diverged(self) -> None:
        if self.state.not_finite >= MAX_NOT_FINITE:
            raise DivergenceError(
                f"The last {self.state.not_finite} gradients were not finite, so no update was made. Lower "
                "optimizer.learning_rate, set model.dtype = 'float32', or start from an earlier checkpoint."
            )

    def _progress(self, stage: str, done: int, total: int) -> None:
        self._tell("on_progress", stage, done, total)
        if stage != "reward" or done < total:  # what is unfinished is abandoned, updates done are saved
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

    def _say(self, text: str) -> None:
        self.directory.log(text)
        self._tell("on_message", text)

    def _tell(self, event: str, *details: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(*details)


class _Stopped(Exception):
    """Carries a stop request out of nested calls."""


def _due(iteration: int, every: int) -> bool:
    """0 is due too: before the first iteration."""
    return every > 0 and iteration % every == 0
