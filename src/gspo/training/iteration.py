"""One iteration: rollouts -> advantages -> updates -> published weights, and its numbers.

It can be left after any of its updates and gone on with in another process: all it has found is in ``Iteration``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from gspo.algorithm.advantages import group_advantages
from gspo.algorithm.batch import StepBatch
from gspo.config import Config
from gspo.metrics import Means, mean, std
from gspo.packing import Row, pack_step
from gspo.rollout.collect import Collected
from gspo.sync.publish import Publisher
from gspo.training.environment import peak_memory_bytes
from gspo.training.observe import engine_gap_p99, rollout_metrics, rollout_record
from gspo.training.trainer import RowResult, Trainer
from gspo.types import Group, Rollout

Progress = Callable[[str, int, int], None]


@dataclass
class Iteration:
    """An iteration under way: its rollouts, and what its updates have found so far. Plain data, so it can be saved.

    ``old_logprobs``: nats, by rollout number, of the rollouts that later updates need them for; None before scoring.
    ``results``: by rollout number, what the updates made so far saw.
    """

    number: int
    collected: Collected
    old_logprobs: dict[int, list[float]] | None = None
    updates_done: int = 0
    results: dict[int, RowResult] = field(default_factory=dict)
    means: Means = field(default_factory=Means)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    skipped: int = 0
    not_finite: int = 0
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
    rollouts = iteration.collected.rollouts
    advantages = advantages_of(iteration.collected.groups, config)
    _Updates(iteration, trainer, config, advantages).run(progress)
    start = time.perf_counter()
    publisher.publish(trainer.optimizer.updates)
    metrics: dict[str, Any] = {"iteration": iteration.number, "policy_version": trainer.optimizer.updates}
    metrics |= rollout_metrics(iteration.collected)
    metrics |= _update_metrics(iteration, rollouts)
    metrics["time/publish_seconds"] = time.perf_counter() - start
    metrics["memory/peak_bytes"] = peak_memory_bytes()
    rows = [
        rollout_record(group, rollout, float(advantages[number]), iteration.results.get(number))
        for number, (group, rollout) in enumerate((g, r) for g in iteration.collected.groups for r in g.rollouts)
    ]
    return IterationResult(metrics, rows, iteration.collected.groups)


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
        self.parts = split_evenly(
            len(self.rollouts), config.algorithm.updates_per_rollout, config.rollout.group_size
        )

    def run(self, progress: Progress) -> None:
        found = self.iteration
        if found.old_logprobs is None:
            # Old log-probs belong to the weights that sampled. The first update supplies its own (its ratio is exactly
            # 1); the others are scored now, before any weight moves.
            start = time.perf_counter()
            found.old_logprobs = {}
            for part in self.parts[1:]:
                by_row = self.trainer.old_logprobs(self._pack(part))
                found.old_logprobs |= {part[row]: values for row, values in by_row.items()}
            found.old_seconds = time.perf_counter() - start
        while found.updates_done < len(self.parts):
            progress("update", found.updates_done, len(self.parts))
            start = time.perf_counter()
            self._update(self.parts[found.updates_done])
            found.update_seconds += time.perf_counter() - start
            found.updates_done += 1

    def _update(self, part: Sequence[int]) -> None:
        found, optimizer = self.iteration, self.trainer.optimizer
        found.learning_rate = optimizer.learning_rate()
        step = self._pack(part)
        if not step.batches:  # nothing to learn: Adam's momentum must not move the weights on its own
            optimizer.skip()
            found.skipped += 1
            return
        loss, results = self.trainer.forward_backward(step, found.means)
        norm, made = self.trainer.optim_step()
        found.results |= {part[row]: result for row, result in results.items()}
        found.not_finite += not made
        found.losses.append(loss)
        found.norms.append(norm)

    def _pack(self, part: Sequence[int]) -> StepBatch:
        old = self.iteration.old_logprobs or {}
        rows = [to_row(self.rollouts[n], float(self.advantages[n]), old.get(n)) for n in part]
        return pack_step(rows, max_tokens=self.config.batch.max_tokens)


def _update_metrics(found: Iteration, rollouts: Sequence[Rollout]) -> dict[str, Any]:
    ratios = [result.ratio for result in found.results.values()]
    tokens = sum(len(rollout.token_ids) for rollout in rollouts)
    metrics: dict[str, Any] = {
        "objective/loss": mean(found.losses),
        "objective/ratio_mean": mean(ratios),
        "objective/ratio_std": std(ratios),
        **found.means.result(),
        "mismatch/sequence_p99": engine_gap_p99(found.results, rollouts),
        "optimizer/grad_norm": mean(found.norms),
        "optimizer/learning_rate": found.learning_rate,
        "optimizer/updates_without_signal": found.skipped,
        "optimizer/updates_not_finite": found.not_finite,
        "time/old_logprobs_seconds": found.old_seconds,
        "time/update_seconds": found.update_seconds,
        "throughput/update_tokens_per_second": tokens / max(found.old_seconds + found.update_seconds, 1e-9),
    }
    return {key: value for key, value in metrics.items() if value is not None}


def split_evenly(count: int, parts: int, group_size: int) -> list[list[int]]:
    """Disjoint runs of whole groups, as equal as can be, covering ``range(count)``."""
    groups = count // group_size
    bounds = [part * groups // parts * group_size for part in range(parts + 1)]
    return [list(range(low, high)) for low, high in pairwise(bounds)]


def to_row(rollout: Rollout, advantage: float, old_logprobs: Sequence[float] | None = None) -> Row:
    return Row(
        prompt_ids=rollout.prompt_ids,
        token_ids=rollout.token_ids,
        completion_mask=rollout.completion_mask,
        advantage=advantage,
        rollout_logprobs=rollout.rollout_logprobs,
        old_logprobs=old_logprobs,
    )
