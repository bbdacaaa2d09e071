"""One iteration: rollouts -> advantages -> updates -> published weights, and its numbers.

It can be left after any of its updates and gone on with in another process: all it has found is in ``Iteration``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from gspo.algorithm.advantages import group_advantages
from gspo.algorithm.batch import StepBatch
from gspo.config import Config
from gspo.metrics import Means, mean, percentile, std
from gspo.packing import Row, pack_step
from gspo.rollout.collect import Collected
from gspo.sync.publish import Publisher
from gspo.training.environment import peak_memory_bytes
from gspo.training.observe import mismatch_metrics, rollout_metrics, rollout_record
from gspo.training.trainer import OldScore, RowResult, Trainer
from gspo.types import Group, Rollout

Progress = Callable[[str, int, int], None]


@dataclass
class Iteration:
    """An iteration under way: its rollouts, and what its updates have found so far. Plain data, so it can be saved.

    ``old_source``: 'trainer' or 'engine', whose old log-probs the ratio is taken against. ``old``: by rollout
    number, of the rollouts that updates need it for; None before it is known. ``results``: by rollout
    number, what the updates made so far saw.
    """

    number: int
    collected: Collected
    old_source: str = "trainer"
    old: dict[int, OldScore] | None = None
    updates_done: int = 0
    results: dict[int, RowResult] = field(default_factory=dict)
    means: Means = field(default_factory=Means)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    skipped: int = 0
    not_finite: int = 0
    masked: int = 0
    noise_floor: float | None = None
    learning_rate: float = 0.0
    old_seconds: float = 0.0
    update_seconds: float = 0.0


@dataclass(frozen=True)
class IterationResult:
    """``metrics``: the line of metrics.jsonl; ``rows``: the lines of the rollout record."""

    metrics: dict[str, Any]
    rows: list[dict[str, Any]]
    groups: list[Group]


def run_iteration(
    iteration: Iteration, trainer: Trainer, publisher: Publisher, config: Config, progress: Progress
) -> IterationResult:
    """Make the updates that are left, from disjoint parts of the rollouts, and publish the weights."""
    run_updates(iteration, trainer, config, progress)
    start = time.perf_counter()
    publisher.publish(trainer.optimizer.updates)
    metrics: dict[str, Any] = {"iteration": iteration.number, "policy_version": trainer.optimizer.updates}
    metrics |= rollout_metrics(iteration.collected)
    metrics |= _update_metrics(iteration, config)
    metrics["time/publish_seconds"] = time.perf_counter() - start
    metrics["memory/peak_bytes"] = peak_memory_bytes()
    advantages = advantages_of(iteration.collected.groups, config)
    rows = [
        rollout_record(group, rollout, float(advantages[number]), iteration.results.get(number))
        for number, (group, rollout) in enumerate((g, r) for g in iteration.collected.groups for r in g.rollouts)
    ]
    return IterationResult(metrics, rows, iteration.collected.groups)


def run_updates(iteration: Iteration, trainer: Trainer, config: Config, progress: Progress = lambda *_: None) -> None:
    """Make the updates that are left; between any two of them ``iteration`` and ``trainer`` are whole."""
    _Updates(iteration, trainer, config, advantages_of(iteration.collected.groups, config)).run(progress)


def advantages_of(groups: Sequence[Group], config: Config) -> torch.Tensor:
    """Group-relative advantages f32[S], in the order of the groups' rollouts; unscored rollouts get 0."""
    rewards = [float("nan") if r.reward is None else r.reward for group in groups for r in group.rollouts]
    ids = [number for number, group in enumerate(groups) for _ in group.rollouts]
    return group_advantages(
        torch.tensor(rewards, dtype=torch.float64), torch.tensor(ids), scale=config.algorithm.advantage
    )


class _Updates:
    """The optimizer steps of one iteration."""

    def __init__(self, iteration: Iteration, trainer: Trainer, config: Config, advantages: torch.Tensor) -> None:
        self.iteration, self.trainer, self.config, self.advantages = iteration, trainer, config, advantages
        self.rollouts = iteration.collected.rollouts
        self.parts = split_evenly(len(self.rollouts), config.algorithm.updates_per_rollout, config.rollout.group_size)

    def run(self, progress: Progress) -> None:
        found = self.iteration
        if found.old is None:
            start = time.perf_counter()
            found.old = self._old_scores()
            found.old_seconds = time.perf_counter() - start
            if found.number == 1:
                found.noise_floor = self._noise_floor()
        while found.updates_done < len(self.parts):
            progress("update", found.updates_done, len(self.parts))
            start = time.perf_counter()
            self._update(self.parts[found.updates_done])
            found.update_seconds += time.perf_counter() - start
            found.updates_done += 1

    def _old_scores(self) -> dict[int, OldScore]:
        """Of the weights that sampled, by rollout number.

        The trainer's first update supplies its own, so that its ratio is exactly 1; the others are scored here, before
        any weight moves.
        """
        if self.iteration.old_source == "engine":
            return {number: OldScore(rollout.rollout_logprobs) for number, rollout in enumerate(self.rollouts)}
        found: dict[int, OldScore] = {}
        for part in self.parts[1:]:
            by_row = self.trainer.old_scores(self._pack(part))
            found |= {part[row]: score for row, score in by_row.items()}
        return found

    def _noise_floor(self) -> float | None:
        """99th percentile of |log ratio| between two passes of the same answers and weights, packed differently."""
        for part in self.parts:
            rows = [to_row(self.rollouts[n], float(self.advantages[n])) for n in part]
            most = self.config.batch.max_tokens
            shared, alone = (
                self.trainer.old_scores(pack_step(rows, max_tokens=most, share_prompts=share))
                for share in (True, False)
            )
            if shared:
                gaps = [sum(shared[row].logprobs) - sum(alone[row].logprobs) for row in shared]
                lengths = [len(score.logprobs) for score in shared.values()]
                return percentile([abs(gap) / length for gap, length in zip(gaps, lengths, strict=True)], 0.99)
        return None

    def _update(self, part: Sequence[int]) -> None:
        found, optimizer = self.iteration, self.trainer.optimizer
        found.learning_rate = optimizer.learning_rate()
        step = self._pack(part)
        if not step.batches:  # nothing to learn: Adam's momentum must not move the weights on its own
            optimizer.skip()
            found.skipped += 1
            return
        loss, results = self.trainer.forward_backward(
            step, found.means, moved=found.updates_done > 0, engine_old=found.old_source == "engine"
        )
        found.results |= {part[row]: result for row, result in results.items()}
        if all(result.weight == 0 for result in results.values()):
            optimizer.skip()
            found.masked += 1
            return
        norm, made = self.trainer.optim_step()
        found.not_finite += not made
        found.losses.append(loss)
        found.norms.append(norm)

    def _pack(self, part: Sequence[int]) -> StepBatch:
        old = self.iteration.old or {}
        rows = [to_row(self.rollouts[n], float(self.advantages[n]), old.get(n)) for n in part]
        return pack_step(rows, max_tokens=self.config.batch.max_tokens)


def _update_metrics(found: Iteration, config: Config) -> dict[str, Any]:
    rollouts = found.collected.rollouts
    ratios = [result.ratio for result in found.results.values()]
    tokens = sum(len(rollout.token_ids) for rollout in rollouts)
    seconds = found.old_seconds + found.update_seconds
    metrics: dict[str, Any] = {
        "objective/loss": mean(found.losses),
        "objective/ratio_mean": mean(ratios),
        "objective/ratio_std": std(ratios),
        "objective/log_ratio_p90": percentile([abs(math.log(ratio)) for ratio in ratios if ratio > 0], 0.9),
        **found.means.result(),
        **mismatch_metrics(found.results, config.clip),
        "noise/floor": found.noise_floor,
        "optimizer/grad_norm": mean(found.norms),
        "optimizer/learning_rate": found.learning_rate,
        "optimizer/updates_without_signal": found.skipped,
        "optimizer/updates_not_finite": found.not_finite,
        "optimizer/updates_masked": found.masked or None,
        "time/old_logprobs_seconds": found.old_seconds,
        "time/update_seconds": found.update_seconds,
        # a speed of nothing would be a number without meaning
        "throughput/update_tokens_per_second": tokens / max(seconds, 1e-9) if found.results else None,
    }
    return {key: value for key, value in metrics.items() if value is not None}


def split_evenly(count: int, parts: int, group_size: int) -> list[list[int]]:
    """Disjoint runs of whole groups, as equal as can be, covering ``range(count)``."""
    groups = count // group_size
    bounds = [part * groups // parts * group_size for part in range(parts + 1)]
    return [list(range(low, high)) for low, high in pairwise(bounds)]


def to_row(rollout: Rollout, advantage: float, old: OldScore | None = None) -> Row:
    return Row(
        prompt_ids=rollout.prompt_ids,
        token_ids=rollout.token_ids,
        completion_mask=rollout.completion_mask,
        advantage=advantage,
        rollout_logprobs=rollout.rollout_logprobs,
        old_logprobs=old.logprobs if old else None,
        routing=rollout.routing,
        old_routing=old.routing if old else None,
    )
