"""The two training primitives: ``forward_backward`` adds up the gradient of an update, ``optim_step`` makes it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gspo.algorithm.batch import PackedBatch, StepBatch, split_by_sequence
from gspo.algorithm.correction import Correction, mismatch_correction
from gspo.algorithm.kl import kl_penalty
from gspo.algorithm.logprobs import TokenLogprobs
from gspo.algorithm.objectives import OBJECTIVES, ObjectiveOutput
from gspo.algorithm.segments import segment_ids, segment_mean
from gspo.config import Config
from gspo.metrics import Means
from gspo.policy.forward import score
from gspo.policy.load import Policy
from gspo.training.optimizer import MasterOptimizer


@dataclass(frozen=True)
class RowResult:
    """What an update saw of one row: ratio and clip state as the objective used them, log-probs [L] in nats.

    ``engine_gap``: mean over its sampled tokens of trainer - engine log-probs, both of the weights that sampled; None
    where the trainer did not score those. ``weight``: the mean correction factor, 1 without a correction.
    """

    ratio: float
    clipped: float
    old_logprobs: list[float]
    logprobs: list[float]
    engine_gap: float | None = None
    weight: float = 1.0


class Trainer:
    """Owns the optimizer and knows how a packed batch becomes a gradient; the loop decides when."""

    def __init__(self, policy: Policy, config: Config, reference: Policy | None = None) -> None:
        self.policy, self.config, self.reference = policy, config, reference
        self.optimizer = MasterOptimizer(policy.model, config.optimizer, config.total_updates)

    def score(self, batch: PackedBatch, *, policy: Policy | None = None, entropy: bool = True) -> TokenLogprobs:
        return score(
            policy or self.policy,
            batch,
            temperature=self.config.rollout.temperature,
            vocab_chunk=self.config.batch.vocab_chunk,
            entropy=entropy,
        )

    @torch.no_grad()
    def old_logprobs(self, step: StepBatch) -> dict[int, list[float]]:
        """By row number, the present weights' log-probs (nats) in the very passes that the update will make."""
        found: dict[int, list[float]] = {}
        for batch in step.batches:
            scored = split_by_sequence(self.score(batch, entropy=False).logprobs, batch.cu_seqlens)
            found |= {row: values.tolist() for row, values in zip(batch.rows, scored, strict=True)}
        return found

    def forward_backward(
        self, step: StepBatch, means: Means, *, moved: bool = False, engine_old: bool = False
    ) -> tuple[float, dict[int, RowResult]]:
        """Add the gradient of one update's loss to the weights' gradients.

        ``moved``: the weights are no longer those that sampled. ``engine_old``: the step's old log-probs are the
        engine's. Returns the loss and, by row number, what the update saw of each row that went through the model.
        """
        results: dict[int, RowResult] = {}
        total = 0.0
        for batch in step.batches:
            scored = self.score(batch)
            now = scored.logprobs.detach()
            old = now if batch.old_logprobs is None else batch.old_logprobs
            # the trainer's log-probs of the weights that sampled, where it has them
            sampled = now if not moved else None if engine_old else old
            correction = None if sampled is None or engine_old else self._correction(sampled, batch)
            output = self._objective(scored.logprobs, old, batch, step, correction)
            loss = output.loss
            if self.reference is not None:
                loss = loss + self.config.algorithm.kl_weight * self._kl(scored.logprobs, old, batch, step, means)
            loss.backward()
            total += float(loss.detach())
            _observe(means, batch, scored, old, output)
            _observe_mismatch(means, batch, sampled, correction)
            results |= _row_results(batch, now, old, sampled, output, correction)
        return total, results

    def optim_step(self) -> tuple[float, bool]:
        """(gradient norm before clipping, was the update made)."""
        return self.optimizer.step()

    def _correction(self, sampled: Tensor, batch: PackedBatch) -> Correction | None:
        algorithm = self.config.algorithm
        if algorithm.correction == "none":
            return None
        return mismatch_correction(
            sampled,
            rollout_logprobs=batch.rollout_logprobs,
            completion_mask=batch.completion_mask,
            cu_seqlens=batch.cu_seqlens,
            kind=algorithm.correction,
            cap=algorithm.correction_cap,
        )

    def _objective(
        self, logprobs: Tensor, old: Tensor, batch: PackedBatch, step: StepBatch, correction: Correction | None
    ) -> ObjectiveOutput:
        name = self.config.algorithm.objective
        low, high = self.config.clip
        advantages = batch.advantages.to(logprobs.device)
        terms: dict[str, Tensor] = {}
        if correction is not None and not correction.per_token:
            advantages = advantages * correction.weights
        if correction is not None and correction.per_token:
            terms["token_weights"] = correction.weights
            name = "gspo_token" if name == "gspo" else name  # the same ratios; its gradient keeps tokens apart
        if name == "gspo_token":
            by_token = advantages[segment_ids(batch.cu_seqlens, logprobs.shape[0])]
            terms = {"token_advantages": by_token * terms.get("token_weights", 1.0)}
        else:
            terms["advantages"] = advantages
        return OBJECTIVES[name](
            logprobs,
            old_logprobs=old,
            completion_mask=batch.completion_mask,
            cu_seqlens=batch.cu_seqlens,
            num_sequences=step.num_sequences,
            clip_low=low,
            clip_high=high,
            **terms,
        )

    def _kl(self, logprobs: Tensor, old: Tensor, batch: PackedBatch, step: StepBatch, means: Means) -> Tensor:
        with torch.no_grad():
            reference = self.score(batch, policy=self.reference, entropy=False).logprobs
        penalty = kl_penalty(
            logprobs,
            ref_logprobs=reference,
            old_logprobs=old,
            completion_mask=batch.completion_mask,
            cu_seqlens=batch.cu_seqlens,
            num_sequences=step.num_sequences,
        )
        share = batch.num_sequences / max(step.num_sequences, 1)
        means.add("policy/kl_ref", float(penalty.detach()) / share, batch.num_sequences)
        return penalty


@torch.no_grad()
def _observe(means: Means, batch: PackedBatch, scored: TokenLogprobs, old: Tensor, output: ObjectiveOutput) -> None:
    """Numbers of one pass, each weighted by what it counts."""
    mask = batch.completion_mask
    tokens = int(mask.sum())
    logprobs = scored.logprobs.detach()
    change = torch.where(mask, logprobs - old, 0.0)
    # k3 of the policy that sampled against the present one, an estimate of the drift so far in nats per token
    means.add("policy/kl_old", float((change.exp() - 1 - change)[mask].mean()), tokens)
    if scored.entropy is not None:
        means.add("policy/entropy", float(scored.entropy[mask].mean()), tokens)
    lengths = batch.cu_seqlens.diff().to(torch.float32)
    sequences = batch.num_sequences
    for name, value in (("", output.clipped), ("_high", output.clipped_high), ("_low", output.clipped_low)):
        means.add(f"objective/clip_fraction{name}", float(value.mean()), sequences)
    means.add("objective/clip_fraction_tokens", float((output.clipped * lengths).sum() / lengths.sum()), tokens)


@torch.no_grad()
def _observe_mismatch(means: Means, batch: PackedBatch, sampled: Tensor | None, correction: Correction | None) -> None:
    """Engine against trainer on the same weights; KL is of the engine's distribution to the trainer's, in nats."""
    if sampled is None:
        return
    known = batch.completion_mask & batch.rollout_logprobs.isfinite()
    gap, tokens = (sampled - batch.rollout_logprobs)[known], int(known.sum())
    if tokens:
        means.add("mismatch/mean_abs", float(gap.abs().mean()), tokens)
        means.add("mismatch/kl_k1", float(-gap.mean()), tokens)
        means.add("mismatch/kl_k3", float((gap.exp() - 1 - gap).mean()), tokens)
    if correction is not None:
        count = correction.rho.numel()
        means.add("mismatch/rho_mean", float(correction.rho.mean()), count)
        means.add("mismatch/corrected_fraction", float(correction.acted.float().mean()), count)


def _row_results(
    batch: PackedBatch,
    logprobs: Tensor,
    old: Tensor,
    sampled: Tensor | None,
    output: ObjectiveOutput,
    correction: Correction | None,
) -> dict[int, RowResult]:
    gaps: list[float | None] = [None] * batch.num_sequences
    if sampled is not None:
        known = batch.completion_mask & batch.rollout_logprobs.isfinite()
        gaps = list(segment_mean(sampled - batch.rollout_logprobs, known, batch.cu_seqlens).tolist())
    weights = [1.0] * batch.num_sequences
    if correction is not None:
        by_row = correction.weights
        if correction.per_token:
            by_row = segment_mean(by_row, batch.completion_mask, batch.cu_seqlens)
        weights = by_row.tolist()
    new_rows, old_rows = (split_by_sequence(values, batch.cu_seqlens) for values in (logprobs, old))
    columns = zip(
        batch.rows, output.ratio.tolist(), output.clipped.tolist(), old_rows, new_rows, gaps, weights, strict=True
    )
    return {
        row: RowResult(ratio, clipped, before.tolist(), now.tolist(), gap, weight)
        for row, ratio, clipped, before, now, gap, weight in columns
    }
