"""What an iteration is recorded as: its numbers for metrics.jsonl, its answers for rollouts/ITERATION.jsonl."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from gspo.config import Config
from gspo.evaluation.run import prompt_text
from gspo.metrics import mean, percentile, std
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
        "reward/errors": sum(rollout.error is not None for rollout in rollouts),
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


def mismatch_metrics(results: Mapping[int, RowResult], band: tuple[float, float]) -> dict[str, float | None]:
    """Engine against trainer by sequence, on the weights that sampled; ``band`` is the clip range (low, high).

    sequence_pQ: percentiles of |log s| that the engine's numbers alone would give. outside_band: share of sequences
    that this noise alone puts outside the band. effective_sample_size: (sum w)^2 / (n sum w^2) of the sequences' full
    importance weights w = pi_trainer / pi_engine, 1 without mismatch.
    """
    seen = [(result.engine_gap, len(result.old_logprobs)) for result in results.values()]
    known = [(gap, length) for gap, length in seen if gap is not None]
    gaps = [abs(gap) for gap, _ in known]
    low, high = math.log1p(-band[0]), math.log1p(band[1])
    totals = [gap * length for gap, length in known]
    weights = [math.exp(total - max(totals)) for total in totals]
    return {
        "mismatch/sequence_p50": percentile(gaps, 0.5),
        "mismatch/sequence_p90": percentile(gaps, 0.9),
        "mismatch/sequence_p99": percentile(gaps, 0.99),
        "mismatch/outside_band": mean(float(not low <= gap <= high) for gap, _ in known),
        "mismatch/effective_sample_size": sum(weights) ** 2 / len(weights) / sum(w * w for w in weights)
        if weights
        else None,
    }


def band_note(metrics: Mapping[str, Any], noise_floor: float | None, config: Config) -> str | None:
    """What the clip band meant in this run, from measurement; None for objectives without a sequence ratio."""
    drift, engine = metrics.get("objective/log_ratio_p90"), metrics.get("mismatch/sequence_p99")
    if not config.algorithm.objective.startswith("gspo") or drift is None:
        return None
    low, high = config.clip
    noise = max(noise_floor or 0.0, (engine or 0.0) if config.algorithm.old_logprobs == "engine" else 0.0)
    parts = [f"an iteration's updates move nine in ten by at most {drift:.1e}"]
    if noise_floor is not None:
        parts.append(f"packing them otherwise moves 99 of 100 by at most {noise_floor:.1e}")
    if engine is not None:
        parts.append(f"the engine's numbers differ by at most {engine:.1e} (99 of 100)")
    text = (
        f"clip band {low:g} / {high:g} at {metrics['rollout/length_mean']:.0f} tokens an answer, as |log s|: "
        + ", ".join(parts)
    )
    if noise > min(low, high):
        return (
            f"{text}. The noise exceeds the band: many sequences are clipped by rounding alone. Use float32, longer "
            f"answers, or a band of about {3 * noise:.0e}."
        )
    if drift > 2 * max(low, high):
        return (
            f"{text}. The band acts as a gate, not as a limit; one that lets nine in ten through here would be about "
            f"{drift:.0e}."
        )
    return f"{text}. The band lies between noise and drift, as meant."


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
        "expert_change": result.expert_change if result else None,
        "finish_reason": rollout.finish_reason,
        "temperature": rollout.temperature,
        "policy_version": rollout.policy_version,
    }


def nothing_learned(metrics: Sequence[Mapping[str, Any]]) -> str | None:
    """A sentence when no group of any iteration had a signal, so that the weights are those of the start."""
    if not metrics or any(line["group/no_signal_fraction"] < 1.0 or "objective/loss" in line for line in metrics):
        return None
    return (
        f"nothing was learned: in all {len(metrics)} iterations the answers of each group had the same reward, so no "
        "update was made. Give partial credit, choose easier (or harder) prompts, or start from a better model; "
        "gspo doctor checks this before a run."
    )
