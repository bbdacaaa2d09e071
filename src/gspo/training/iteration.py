"""One iteration: rollouts -> advantages -> updates -> published weights, and its numbers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from gspo.algorithm.advantages import group_advantages
from gspo.algorithm.batch import StepBatch
from gspo.config import Config
from gspo.evaluation.run import prompt_text
from gspo.metrics import Means, mean, std
from gspo.packing import Row, pack_step
from gspo.rollout.collect import Collected, collect
from gspo.rollout.system import System
from gspo.sync.publish import Publisher
from gspo.training.environment import peak_memory_bytes
from gspo.training.trainer import RowResult, Trainer
from gspo.types import Group, Rollout

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class IterationResult:
    """``metrics``: the line of metrics.jsonl; ``rows``: the lines of the rollout record."""

    metrics: dict[str, Any]
    rows: list[dict[str, Any]]
    groups: list[Group]


def run_iteration(
    system: System, trainer: Trainer, publisher: Publisher, config: Config, iteration: int, progress: Progress
) -> IterationResult:
    """Collect one rollout batch and make ``updates_per_rollout`` updates from disjoint parts of it."""
    collected = collect(system, config, iteration, progress)
    rollouts = [rollout for group in collected.groups for rollout in group.rollouts]
    advantages = advantages_of(collected.groups, config)
    means = Means()
    update = _Updates(trainer, config, means, progress)
    results = update.run(rollouts, advantages)
    start = time.perf_counter()
    publisher.publish(trainer.optimizer.updates)
    metrics: dict[str, Any] = {"iteration": iteration, "policy_version": trainer.optimizer.updates}
    metrics |= _rollout_metrics(collected, rollouts)
    metrics |= update.metrics(results, rollouts)
    metrics["time/publish_seconds"] = time.perf_counter() - start
    metrics["memory/peak_bytes"] = peak_memory_bytes()
    rows = [
        _record(group, rollout, float(advantages[number]), results.get(number))
        for number, (group, rollout) in enumerate((g, r) for g in collected.groups for r in g.rollouts)
    ]
    return IterationResult(metrics, rows, collected.groups)


def advantages_of(groups: Sequence[Group], config: Config) -> torch.Tensor:
    """Group-relative advantages f32[S], in the order of the groups' rollouts; unscored rollouts get 0."""
    rewards = [float("nan") if r.reward is None else r.reward for group in groups for r in group.rollouts]
    ids = [number for number, group in enumerate(groups) for _ in group.rollouts]
    return group_advantages(
        torch.tensor(rewards, dtype=torch.float64), torch.tensor(ids), scale=config.algorithm.advantage
    )


class _Updates:
    """The optimizer steps of one iteration."""

    def __init__(self, trainer: Trainer, config: Config, means: Means, progress: Progress) -> None:
        self.trainer, self.config, self.means, self.progress = trainer, config, means, progress
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.skipped = self.not_finite = 0
        self.old_seconds = self.update_seconds = 0.0
        self.learning_rate = trainer.optimizer.learning_rate()

    def run(self, rollouts: Sequence[Rollout], advantages: torch.Tensor) -> dict[int, RowResult]:
        """Results by rollout number, of the rollouts that went through the model."""
        start = time.perf_counter()
        parts = split_evenly(len(rollouts), self.config.algorithm.updates_per_rollout, self.config.rollout.group_size)
        steps = [self._pack(rollouts, advantages, part) for part in parts]
        # Old log-probs belong to the weights that sampled. The first update supplies its own (its ratio is exactly 1);
        # the others are scored now, before any weight moves.
        steps[1:] = [self.trainer.with_old_logprobs(step) for step in steps[1:]]
        self.old_seconds = time.perf_counter() - start
        start = time.perf_counter()
        results: dict[int, RowResult] = {}
        for number, (part, step) in enumerate(zip(parts, steps, strict=True)):
            self.progress("update", number, len(steps))
            results |= {part[row]: result for row, result in self._update(step).items()}
        self.update_seconds = time.perf_counter() - start
        return results

    def _pack(self, rollouts: Sequence[Rollout], advantages: torch.Tensor, part: Sequence[int]) -> StepBatch:
        rows = [to_row(rollouts[number], float(advantages[number])) for number in part]
        return pack_step(rows, max_tokens=self.config.batch.max_tokens)

    def _update(self, step: StepBatch) -> dict[int, RowResult]:
        if not step.batches:  # nothing to learn: Adam's momentum must not move the weights on its own
            self.trainer.optimizer.skip()
            self.skipped += 1
            return {}
        loss, results = self.trainer.forward_backward(step, self.means)
        self.learning_rate = self.trainer.optimizer.learning_rate()
        norm, made = self.trainer.optim_step()
        self.not_finite += not made
        self.losses.append(loss)
        self.norms.append(norm)
        return results

    def metrics(self, results: dict[int, RowResult], rollouts: Sequence[Rollout]) -> dict[str, Any]:
        ratios = [result.ratio for result in results.values()]
        gaps = sorted(
            abs(sum(result.old_logprobs) - sum(rollouts[number].rollout_logprobs)) / len(result.old_logprobs)
            for number, result in results.items()
        )
        tokens = sum(len(rollout.token_ids) for rollout in rollouts)
        found: dict[str, Any] = {
            "objective/loss": mean(self.losses),
            "objective/ratio_mean": mean(ratios),
            "objective/ratio_std": std(ratios),
            **self.means.result(),
            "mismatch/sequence_p99": gaps[min(int(0.99 * len(gaps)), len(gaps) - 1)] if gaps else None,
            "optimizer/grad_norm": mean(self.norms),
            "optimizer/learning_rate": self.learning_rate,
            "optimizer/updates_without_signal": self.skipped,
            "optimizer/updates_not_finite": self.not_finite,
            "time/old_logprobs_seconds": self.old_seconds,
            "time/update_seconds": self.update_seconds,
            "throughput/update_tokens_per_second": tokens / max(self.old_seconds + self.update_seconds, 1e-9),
        }
        return {key: value for key, value in found.items() if value is not None}


def split_evenly(count: int, parts: int, group_size: int) -> list[list[int]]:
    """Disjoint runs of whole groups, as equal as can be, covering ``range(count)``."""
    groups = count // group_size
    bounds = [part * groups // parts * group_size for part in range(parts + 1)]
    return [list(range(low, high)) for low, high in pairwise(bounds)]


def to_row(rollout: Rollout, advantage: float) -> Row:
    return Row(
        prompt_ids=rollout.prompt_ids,
        token_ids=rollout.token_ids,
        completion_mask=rollout.completion_mask,
        advantage=advantage,
        rollout_logprobs=rollout.rollout_logprobs,
        routing=rollout.routing,
    )


def _rollout_metrics(collected: Collected, rollouts: Sequence[Rollout]) -> dict[str, Any]:
    scored = [[r.reward for r in group.rollouts if r.reward is not None] for group in collected.groups]
    rewards = [reward for group in scored for reward in group]
    lengths = [len(rollout.token_ids) for rollout in rollouts]
    seconds = collected.rollout_seconds
    found: dict[str, Any] = {"reward/mean": mean(rewards), "reward/std": std(rewards)}
    for term in dict.fromkeys(name for rollout in rollouts for name in rollout.reward_terms):
        values = [rollout.reward_terms.get(term) for rollout in rollouts]
        found[f"reward/{term}"] = mean(value for value in values if value is not None)
    found |= {
        "reward/unscored": len(rollouts) - len(rewards),
        "group/no_signal_fraction": mean(float(not has_signal(group)) for group in scored),
        "rollout/completion_tokens": sum(lengths),
        "rollout/length_mean": mean(lengths),
        "rollout/truncated_fraction": mean(float(r.finish_reason == "length") for r in rollouts),
        "rollout/prompts_too_long": collected.prompts_too_long,
        "time/rollout_seconds": seconds,
        "time/reward_seconds": collected.reward_seconds,
        "throughput/rollout_tokens_per_second": sum(lengths) / max(seconds, 1e-9),
    }
    return {key: value for key, value in found.items() if value is not None}


def has_signal(rewards: Sequence[float]) -> bool:
    """Do the scored rewards of a group differ by more than rounding?"""
    return len(rewards) > 1 and max(rewards) - min(rewards) > 1e-8 * max(1.0, max(map(abs, rewards)))


def _record(group: Group, rollout: Rollout, advantage: float, result: RowResult | None) -> dict[str, Any]:
    """One line of rollouts/ITERATION.jsonl. What an answer left out of the updates has no value for is null."""
    return {
        "prompt_id": rollout.prompt_id,
        "index": rollout.index,
        "prompt": prompt_text(group.prompt),
        "text": rollout.text,
        "prompt_ids": rollout.prompt_ids,
        "token_ids": rollout.token_ids,
        "completion_mask": rollout.completion_mask,
        "rollout_logprobs": rollout.rollout_logprobs,
        "old_logprobs": result.old_logprobs if result else None,
        "logprobs": result.logprobs if result else None,
        "reward": rollout.reward,
        "reward_terms": rollout.reward_terms,
        "error": rollout.error,
        "advantage": advantage,
        "ratio": result.ratio if result else None,
        "clipped": result.clipped if result else None,
        "expert_change": result.expert_change if result else None,
        "finish_reason": rollout.finish_reason,
        "temperature": rollout.temperature,
        "policy_version": rollout.policy_version,
    }
