"""What an iteration is recorded as: its numbers for metrics.jsonl, its answers for rollouts/ITERATION.jsonl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gspo.evaluation.run import prompt_text
from gspo.metrics import mean, std
from gspo.rollout.collect import Collected
from gspo.training.trainer import RowResult
from gspo.types import Group, Rollout


def rollout_metrics(collected: Collected) -> dict[str, Any]:
    """Rewards, lengths and rates of a rollout batch; what has no value is absent."""
    rollouts = collected.rollouts
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


def engine_gap_p99(results: Mapping[int, RowResult], rollouts: Sequence[Rollout]) -> float | None:
    """99th percentile of |mean over tokens of trainer - engine log-probs|, in nats, over sequences."""
    gaps = sorted(
        abs(sum(result.old_logprobs) - sum(rollouts[number].rollout_logprobs)) / len(result.old_logprobs)
        for number, result in results.items()
    )
    return gaps[min(int(0.99 * len(gaps)), len(gaps) - 1)] if gaps else None


def has_signal(rewards: Sequence[float]) -> bool:
    """Do the scored rewards of a group differ by more than rounding?"""
    return len(rewards) > 1 and max(rewards) - min(rewards) > 1e-8 * max(1.0, max(map(abs, rewards)))


def rollout_record(group: Group, rollout: Rollout, advantage: float, result: RowResult | None) -> dict[str, Any]:
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
        "finish_reason": rollout.finish_reason,
        "temperature": rollout.temperature,
        "policy_version": rollout.policy_version,
    }
