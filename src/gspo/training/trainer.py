"""The two training primitives: ``forward_backward`` adds up the gradient of an update, ``optim_step`` makes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gspo.algorithm.batch import PackedBatch, StepBatch, split_by_sequence
from gspo.algorithm.kl import kl_penalty
from gspo.algorithm.logprobs import TokenLogprobs
from gspo.algorithm.objectives import OBJECTIVES, ObjectiveOutput
from gspo.algorithm.segments import segment_ids
from gspo.config import Config
from gspo.metrics import Means
from gspo.policy.forward import score
from gspo.policy.load import Policy
from gspo.training.optimizer import MasterOptimizer


@dataclass(frozen=True)
class RowResult:
    """What an update saw of one row: ratio and clip state as the objective used them, log-probs [L] in nats."""

    ratio: float
    clipped: float
    old_logprobs: list[float]
    logprobs: list[float]


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

    def forward_backward(self, step: StepBatch, means: Means) -> tuple[float, dict[int, RowResult]]:
        """Add the gradient of one update's loss to the weights' gradients.

        Returns the loss and, by row number, what the update saw of each row that went through the model.
        """
        results: dict[int, RowResult] = {}
        total = 0.0
        for batch in step.batches:
            scored = self.score(batch)
            old = scored.logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
            output = self._objective(scored.logprobs, old, batch, step)
            loss = output.loss
            if self.reference is not None:
                loss = loss + self.config.algorithm.kl_weight * self._kl(scored.logprobs, old, batch, step, means)
            loss.backward()
            _observe(means, batch, step, scored, old, output)
            total += float(loss.detach())
            results |= _row_results(batch, scored.logprobs.detach(), old, output)
        return total, results

    def optim_step(self) -> tuple[float, bool]:
        """(gradient norm before clipping, was the update made)."""
        return self.optimizer.step()

    def _objective(self, logprobs: Tensor, old: Tensor, batch: PackedBatch, step: StepBatch) -> ObjectiveOutput:
        name = self.config.algorithm.objective
        low, high = self.config.clip
        advantages = batch.advantages.to(logprobs.device)
        if name == "gspo_token":
            by_token = advantages[segment_ids(batch.cu_seqlens, logprobs.shape[0])]
            weights = {"token_advantages": by_token}
        else:
            weights = {"advantages": advantages}
        return OBJECTIVES[name](
            logprobs,
            old_logprobs=old,
            completion_mask=batch.completion_mask,
            cu_seqlens=batch.cu_seqlens,
            num_sequences=step.num_sequences,
            clip_low=low,
            clip_high=high,
            **weights,
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
def _observe(
    means: Means, batch: PackedBatch, step: StepBatch, scored: TokenLogprobs, old: Tensor, output: ObjectiveOutput
) -> None:
    """Numbers of one pass, each weighted by what it counts."""
    mask = batch.completion_mask
    tokens = int(mask.sum())
    logprobs = scored.logprobs.detach()
    change = torch.where(mask, logprobs - old, 0.0)
    # k3 of the policy that sampled against the present one, an estimate of the drift so far in nats per token
    means.add("policy/kl_old", float((change.exp() - 1 - change)[mask].mean()), tokens)
    if scored.entropy is not None:
        means.add("policy/entropy", float(scored.entropy[mask].mean()), tokens)
    gap = torch.where(mask, old - batch.rollout_logprobs, 0.0)
    known = mask & batch.rollout_logprobs.isfinite()
    means.add("mismatch/mean_abs", float(gap[known].abs().mean()), int(known.sum()))
    lengths = batch.cu_seqlens.diff().to(torch.float32)
    sequences = batch.num_sequences
    for name, value in (("", output.clipped), ("_high", output.clipped_high), ("_low", output.clipped_low)):
        means.add(f"objective/clip_fraction{name}", float(value.mean()), sequences)
    means.add("objective/clip_fraction_tokens", float((output.clipped * lengths).sum() / lengths.sum()), tokens)


def _row_results(batch: PackedBatch, logprobs: Tensor, old: Tensor, output: ObjectiveOutput) -> dict[int, RowResult]:
    new_rows, old_rows = (split_by_sequence(values, batch.cu_seqlens) for values in (logprobs, old))
    columns: Sequence[tuple[int, float, float, Tensor, Tensor]] = list(
        zip(batch.rows, output.ratio.tolist(), output.clipped.tolist(), old_rows, new_rows, strict=True)
    )
    return {row: RowResult(ratio, clip, before.tolist(), now.tolist()) for row, ratio, clip, before, now in columns}
