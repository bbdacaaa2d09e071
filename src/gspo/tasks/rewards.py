"""Reward functions in TRL's form: ``f(completions, prompts, **columns) -> list[float | None]``, plain or async.

Those that can be imported run in processes of their own (``gspo.tasks.pool``) with a time limit; built-in ones, lambdas
and what a notebook defines run in this one.
"""

from __future__ import annotations

import hashlib
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from gspo.errors import RewardError
from gspo.tasks.calls import Arguments, Failure, arguments
from gspo.tasks.functions import RewardFunction, function_name, load_reward
from gspo.tasks.here import call_here
from gspo.tasks.pool import Worker
from gspo.types import Prompt

HEARTBEAT_SECONDS = 1.0
"""Time between reports of progress while functions run in other processes."""

Values = dict[int, "float | Failure | None"]
"""By row: a score, None for unscored, or why there is none."""


def to_stderr(text: str) -> None:
    print(text, file=sys.stderr)


@dataclass(frozen=True)
class Score:
    """One answer's reward: the weighted sum of its terms. None: unscored. ``error``: the failure that made it so."""

    reward: float | None
    terms: dict[str, float | None] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True)
class Limits:
    """``timeout``: seconds a call, 0 for none. ``workers``: processes, 0 to run everything in this one. ``settings``:
    facts of the run for functions that name them."""

    timeout: float = 0.0
    workers: int = 0
    on_error: Literal["stop", "unscored"] = "stop"
    seed: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Term:
    """A function and where it runs: in this process (``here``), or at a place in the workers' list."""

    name: str
    weight: float
    here: RewardFunction | None
    place: int = -1


class RewardSuite:
    """Reward functions with their weights.

    A function is a callable, which runs in this process, or a name (see ``load_reward``), which with ``limits.workers``
    runs in others. ``log`` gets tracebacks and what functions print; ``say`` gets what the user should know.
    """

    def __init__(
        self, functions: Sequence[RewardFunction | str], weights: Sequence[float], limits: Limits | None = None
    ) -> None:
        if not functions or len(functions) != len(weights):
            raise RewardError(
                f"There are {len(functions)} reward functions and {len(weights)} weights; give one for each."
            )
        self.limits = limits or Limits()
        self.log = self.say = to_stderr
        self._traced: set[str] = set()
        self._terms = _terms(functions, weights, self.limits.workers > 0)
        far = [f for f in functions if isinstance(f, str)] if self.limits.workers else []
        self.workers = [Worker(far, self._log) for _ in range(self.limits.workers if far else 0)]
        if self.workers:  # what cannot be imported shows now
            self.workers[0].start()

    @property
    def names(self) -> list[str]:
        """The terms, in order."""
        return [term.name for term in self._terms]

    def score(
        self,
        prompts: Sequence[Prompt],
        texts: Sequence[str],
        token_ids: Sequence[Sequence[int]],
        progress: Callable[[int, int], None] = lambda *_: None,
    ) -> list[Score]:
        """Score answers, one a prompt (a prompt is repeated for each of its answers, which stand together).

        A term that is None or NaN is unscored and left out of the sum; with no term scored the reward is None. Raises
        RewardError when a function returns something other than one finite number or None an answer; when it raises,
        hangs or dies it is an error too, or with ``on_error = 'unscored'`` the answers at fault have no reward.
        ``progress``: (answers done, all) at the start and each second.
        """
        batch = _Batch(prompts, arguments(prompts, texts, token_ids), texts)
        found: dict[str, Values] = {term.name: {} for term in self._terms}
        progress(0, len(prompts))
        with self._other_processes(batch, found) as jobs:
            for term in self._terms:
                if term.here:
                    found[term.name] = self._values(term, batch, range(len(prompts)), None)
            while wait(jobs, HEARTBEAT_SECONDS, FIRST_EXCEPTION).not_done and not _failed(jobs):
                done = sum(len(found[term.name]) for term in self._terms)
                progress(done // len(self._terms), len(prompts))
            for job in jobs:
                job.result()
        for name, values in found.items():
            failed = {row: value for row, value in values.items() if isinstance(value, Failure)}
            if failed:
                self._report(name, batch, failed)
        return [self._sum({n: values[row] for n, values in found.items()}) for row in range(len(prompts))]

    @contextmanager
    def _other_processes(self, batch: _Batch, found: Mapping[str, Values]) -> Iterator[list[Future[None]]]:
        """A job for each worker: its part of the groups, all terms in turn. A block that fails ends the processes."""
        far = [term for term in self._terms if not term.here]
        if not far:
            yield []
            return

        def job(rows: Sequence[int], worker: Worker) -> None:
            for term in far:
                found[term.name].update(self._values(term, batch, rows, worker))

        parts = split(batch.groups, len(self.workers))
        with ThreadPoolExecutor(len(parts), "gspo-rewards") as threads:
            try:
                yield [threads.submit(job, rows, worker) for rows, worker in zip(parts, self.workers, strict=False)]
            except BaseException:
                for worker in self.workers:
                    worker.kill()
                raise

    def close(self) -> None:
        """End the processes; the next call starts them again."""
        for worker in self.workers:
            worker.close()

    def _log(self, text: str) -> None:
        self.log(text)  # whoever is listening by then

    def _values(self, term: _Term, batch: _Batch, rows: Sequence[int], worker: Worker | None) -> Values:
        """Scores by row; with ``on_error = 'stop'`` a failure is raised."""
        values = self._attempt(term, batch, rows, worker)
        failed = {row: value for row, value in values.items() if isinstance(value, Failure)}
        if failed and self.limits.on_error == "stop":
            trace = next(iter(failed.values())).traceback
            advice = "Mend it, or set task.on_reward_error = 'unscored' to go on without such answers."
            raise RewardError(f"{_sentence(term.name, batch, failed)} {advice}") from (
                _FarTraceback(trace) if trace else None
            )
        return values

    def _attempt(self, term: _Term, batch: _Batch, rows: Sequence[int], worker: Worker | None) -> Values:
        """After an exception the answers are scored one by one, after a hang or a crash group by group, so that only
        those at fault go without. To stop, the first one at fault is enough."""
        outcome = self._call(term, batch, rows, worker)
        if not isinstance(outcome, Failure):
            return dict(zip(rows, outcome, strict=True))
        stop, raised = self.limits.on_error == "stop", outcome.kind == "raised"
        parts = [[row] for row in rows] if raised else batch.by_group(rows)
        found: Values = {}
        if len(parts) > 1 and (raised or not stop):
            for part in parts:
                found |= self._attempt(term, batch, part, worker)
                if stop and isinstance(found[part[0]], Failure):
                    return found
        return found if found and not stop else dict.fromkeys(rows, outcome)

    def _call(
        self, term: _Term, batch: _Batch, rows: Sequence[int], worker: Worker | None
    ) -> list[float | None] | Failure:
        given, ids = batch.of(rows), [batch.prompts[row].prompt_id for row in rows]
        timeout, settings = self.limits.timeout, self.limits.settings
        if worker is None:
            assert term.here is not None
            return call_here(term.name, term.here, given, settings, ids, timeout)
        seed = batch.seed(rows, f"{self.limits.seed}/{term.name}")
        return worker.call(term.place, term.name, given, settings, ids, seed, timeout)

    def _sum(self, terms: Mapping[str, float | Failure | None]) -> Score:
        values = {n: None if isinstance(v, Failure) else v for n, v in terms.items()}
        failures = [f"{name} {value.summary}" for name, value in terms.items() if isinstance(value, Failure)]
        if failures:  # the other terms alone would rank it against answers that have them all
            return Score(None, values, "; ".join(failures))
        scored = [t.weight * v for t, v in zip(self._terms, values.values(), strict=True) if v is not None]
        return Score(sum(scored) if scored else None, values)

    def _report(self, name: str, batch: _Batch, failed: Mapping[int, Failure]) -> None:
        """Say what is unscored the first time, with a traceback in the log; then only to the log."""
        text = f"{_sentence(name, batch, failed)} {len(failed)} of {len(batch.prompts)} answers are unscored."
        if name in self._traced:
            self.log(text)
            return
        self._traced.add(name)
        self.say(f"{text} From now on the log says so.")
        trace = next(iter(failed.values())).traceback
        if trace:
            self.log(trace)


def _sentence(name: str, batch: _Batch, failed: Mapping[int, Failure]) -> str:
    first = next(iter(failed.values()))
    alike = [row for row, failure in failed.items() if failure.summary == first.summary]
    what = "an answer" if len(alike) == 1 else f"{len(alike)} answers, the first"
    limit = " (task.reward_timeout)" if first.kind == "hung" else ""
    return (
        f"The reward function {name} {first.summary}{limit} while scoring {what} to prompt "
        f"{batch.prompts[alike[0]].prompt_id}."
    )


def _failed(jobs: Sequence[Future[None]]) -> bool:
    return any(job.done() and job.exception() is not None for job in jobs)


class _FarTraceback(Exception):
    """Shows another process's traceback above the error that it caused."""

    def __str__(self) -> str:
        return "\n" + str(self.args[0])


class _Batch:
    """Answers to be scored: their arguments by row, and which rows belong to one group."""

    def __init__(self, prompts: Sequence[Prompt], given: Arguments, texts: Sequence[str]) -> None:
        self.prompts, self.given, self.texts = prompts, given, texts
        runs = itertools.groupby(range(len(prompts)), key=lambda row: id(prompts[row]))
        self.groups = [list(rows) for _, rows in runs]

    def of(self, rows: Sequence[int]) -> Arguments:
        return {key: [values[row] for row in rows] for key, values in self.given.items()}

    def by_group(self, rows: Sequence[int]) -> list[list[int]]:
        wanted = set(rows)
        return [kept for group in self.groups if (kept := [row for row in group if row in wanted])]

    def seed(self, rows: Sequence[int], start: str) -> int:
        """Depends on what is scored and not on when."""
        digest = hashlib.sha256(start.encode())
        for row in rows:
            digest.update(f"\0{self.prompts[row].prompt_id}\0{self.texts[row]}".encode("utf-8", "surrogatepass"))
        return int.from_bytes(digest.digest()[:8])


def _terms(functions: Sequence[RewardFunction | str], weights: Sequence[float], others: bool) -> list[_Term]:
    """``others``: functions given by name run in other processes."""
    far = itertools.count()
    names = _distinct([f.rpartition(":")[2] if isinstance(f, str) else function_name(f) for f in functions])
    terms = []
    for name, weight, function in zip(names, weights, functions, strict=True):
        if isinstance(function, str) and others:
            terms.append(_Term(name, weight, None, next(far)))
        else:
            terms.append(_Term(name, weight, load_reward(function) if isinstance(function, str) else function))
    return terms


def _distinct(names: Sequence[str]) -> list[str]:
    """a, a -> a, a_2."""
    result: list[str] = []
    for name in names:
        numbered = (f"{name}_{number}" for number in itertools.count(2))
        result.append(name if name not in result else next(n for n in numbered if n not in result))
    return result


def split(groups: Sequence[list[int]], count: int) -> list[list[int]]:
    """The groups' rows in at most ``count`` parts of about as many groups each, in order."""
    count = max(1, min(count, len(groups)))
    edges = [len(groups) * number // count for number in range(count + 1)]
    return [[row for group in groups[low:high] for row in group] for low, high in itertools.pairwise(edges)]
