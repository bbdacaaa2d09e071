"""The two training primitives: ``forward_backward`` adds up the gradient of an update, ``optim_step`` makes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gspo.algorithm.batch import PackedBatch, StepBatch, split_by_sequence
from gspo.algorithm.correction import Correction, mismatch_correction
from gspo.algorithm.kl import kl_penalty
from gspo.algorithm.objectives import OBJECTIVES, ObjectiveOutput
from gspo.algorithm.routing import expert_change, expert_counts, router_balance_loss
from gspo.algorithm.segments import segment_ids, segment_mean
from gspo.config import Config
from gspo.errors import ConfigError
from gspo.metrics import Means
from gspo.policy import moe
from gspo.policy.forward import Scored, score
from gspo.policy.load import Policy
from gspo.training.optimizer import MasterOptimizer
from gspo.types import Routing


@dataclass(frozen=True)
class RowResult:
    """What an update saw of one row: ratio and clip state as the objective used them, log-probs [L] in nats.

    ``engine_gap``: mean over its sampled tokens of trainer - engine log-probs, both of the weights that sampled; None
    where the trainer did not score those. ``weight``: the mean correction factor, 1 without a correction.
    ``expert_change``: share of experts that changed since the old pass, by layer; None for a dense model.
    """

    ratio: float
    clipped: float
    old_logprobs: list[float]
    logprobs: list[float]
    engine_gap: float | None = None
    weight: float = 1.0
    expert_change: list[float] | None = None


@dataclass(frozen=True)
class OldScore:
    """What the weights that sampled say of one row: log-probs [L] in nats, and the experts of a mixture."""

    logprobs: list[float]
    routing: Routing | None = None


class Trainer:
    """Owns the optimizer and knows how a packed batch becomes a gradient; the loop decides when."""

    def __init__(self, policy: Policy, config: Config, reference: Policy | None = None) -> None:
        self.policy, self.config, self.reference = policy, config, reference
        moe.check_settings(policy, config.algorithm)
        self.optimizer = MasterOptimizer(policy.model, config.optimizer, config.total_updates)

    def score(
        self, batch: PackedBatch, *, policy: Policy | None = None, entropy: bool = True, router_logits: bool = False
    ) -> Scored:
        """``policy``: another one than the trained; its routers choose for themselves."""
        return score(
            policy or self.policy,
            batch,
            temperature=self.config.rollout.temperature,
            vocab_chunk=self.config.batch.vocab_chunk,
            entropy=entropy,
            replay=self._replayed(batch) if policy is None else None,
            router_logits=router_logits,
        )

    def _replayed(self, batch: PackedBatch) -> Tensor | None:
        """The experts to force on a pass. The first update has no old experts: its own choice is the old one."""
        replay = self.config.algorithm.routing_replay
        if replay == "rollout" and batch.rollout_experts is None:
            raise ConfigError(
                "algorithm.routing_replay = 'rollout' needs an engine that reports which experts it used, and these "
                "rollouts have none. Use 'old', or engine.kind = 'native'."
            )
        return {"none": None, "old": batch.old_experts, "rollout": batch.rollout_experts}[replay]

    @torch.no_grad()
    def with_old_logprobs(self, step: StepBatch) -> StepBatch:
        """Score an update's passes with the present weights, in the very passes the update will make."""
        scored = [(batch, self.score(batch, entropy=False)) for batch in step.batches]
        batches = (replace(batch, old_logprobs=old.logprobs, old_experts=old.experts) for batch, old in scored)
        return replace(step, batches=tuple(batches))

    def old_scores(self, step: StepBatch) -> dict[int, OldScore]:
        """The same by row number, as plain data that can be saved and packed again."""
        found: dict[int, OldScore] = {}
        for batch in self.with_old_logprobs(step).batches:
            assert batch.old_logprobs is not None
            logprobs = split_by_sequence(batch.old_logprobs, batch.cu_seqlens)
            routings = _routings(batch)
            found |= {
                row: OldScore(values.tolist(), routing)
                for row, values, routing in zip(batch.rows, logprobs, routings, strict=True)
            }
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
        balance = Balance(self, step, means) if self.config.algorithm.router_aux_weight > 0 else None
        for batch in step.batches:
            scored = self.score(batch, router_logits=balance is not None)
            now = scored.logprobs.detach()
            old = now if batch.old_logprobs is None else batch.old_logprobs
            # the trainer's log-probs of the weights that sampled, where it has them
            sampled = now if not moved else None if engine_old else old
            correction = None if sampled is None or engine_old else self._correction(sampled, batch)
            output = self._objective(scored.logprobs, old, batch, step, correction)
            loss = output.loss
            if self.reference is not None:
                loss = loss + self.config.algorithm.kl_weight * self._kl(scored.logprobs, old, batch, step, means)
            if balance is not None:
                loss = loss + self.config.algorithm.router_aux_weight * balance.loss(batch, scored)
            loss.backward()
            total += float(loss.detach())
            _observe(means, batch, scored, old, output)
            _observe_mismatch(means, batch, sampled, correction)
            changes = _observe_experts(means, batch, scored)
            results |= _row_results(batch, now, old, sampled, output, correction, changes)
        return total, results

    def optim_step(self) -> tuple[float, bool]:
        """(gradient norm before clipping, was the update made)."""
        return self.optimizer.step()

    def close(self) -> None:
        """Let go of the model, which another trainer may then train."""
        self.optimizer.release()

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
def _observe(means: Means, batch: PackedBatch, scored: Scored, old: Tensor, output: ObjectiveOutput) -> None:
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
    changes: list[list[float]] | None,
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
    by_layer: Sequence[list[float] | None] = changes if changes is not None else [None] * batch.num_sequences
    columns = zip(
        output.ratio.tolist(), output.clipped.tolist(), old_rows, new_rows, gaps, weights, by_layer, strict=True
    )
    return {
        row: RowResult(ratio, clipped, before.tolist(), now.tolist(), gap, weight, change)
        for row, (ratio, clipped, before, now, gap, weight, change) in zip(batch.rows, columns, strict=True)
    }


@torch.no_grad()
def _observe_experts(means: Means, batch: PackedBatch, scored: Scored) -> list[list[float]] | None:
    """Mean expert change of each sequence, by layer; None for a dense model.

    Counted where the policy's completion tokens are predicted, between what the routers chose, replayed or not: at the
    weights that sampled and now. The first update's own pass is its old one, so its change is 0.
    """
    if scored.experts is None:
        return None
    index, mask = batch.predict_index, batch.completion_mask
    now = scored.experts[index]
    old = now if batch.old_experts is None else batch.old_experts[index]
    change = torch.where(mask[:, None].to(now.device), expert_change(now, old), torch.nan)
    tokens = int(mask.sum())
    means.add("moe/expert_change", float(change.nanmean()), tokens)
    if batch.rollout_experts is not None:
        differ = expert_change(old, batch.rollout_experts[index])
        means.add("mismatch/experts", float(differ[mask].mean()), tokens)
    rows = split_by_sequence(change, batch.cu_seqlens)
    return [[round(value, 4) for value in row.nanmean(0).tolist()] for row in rows]


def _routings(batch: PackedBatch) -> list[Routing | None]:
    """The experts of ``old_experts`` by sequence."""
    if batch.old_experts is None:
        return [None] * batch.num_sequences
    experts = batch.old_experts.cpu().numpy()
    prompts = [experts[slice(*group.prompt)] for group in batch.layout.groups for _ in group.completions]
    index = split_by_sequence(batch.predict_index, batch.cu_seqlens)
    return [Routing(prompt, experts[rows.numpy()]) for prompt, rows in zip(prompts, index, strict=True)]


class Balance:
    """The routers' load-balancing loss of one update, in parts that its passes add up.

    How often an expert is chosen counts over the whole update, so an update of several passes is first looked at
    without gradient. Counted are the positions that predict the policy's completion tokens: each once, whatever shares
    a prompt; there is no padding. Routers' own choice, replayed or not: it is what the next rollout will use.
    """

    def __init__(self, trainer: Trainer, step: StepBatch, means: Means) -> None:
        self.num_experts, self.means = trainer.policy.routers[0].num_experts, means
        self.positions = sum(int(batch.completion_mask.sum()) for batch in step.batches)
        self.counts: Tensor | None = None
        if len(step.batches) > 1:
            with torch.no_grad():
                scored = ((batch, trainer.score(batch, entropy=False)) for batch in step.batches)
                self.counts = torch.stack([self._count(batch, found) for batch, found in scored]).sum(0)

    def _count(self, batch: PackedBatch, scored: Scored) -> Tensor:
        assert scored.experts is not None
        return expert_counts(scored.experts[batch.predict_index[batch.completion_mask]], self.num_experts)

    def loss(self, batch: PackedBatch, scored: Scored) -> Tensor:
        """The part of one pass, with gradient."""
        counts = self._count(batch, scored) if self.counts is None else self.counts
        logits = [layer[batch.completion_mask] for layer in scored.router_logits]
        part = router_balance_loss(logits, counts, self.positions)
        share = int(batch.completion_mask.sum()) / self.positions
        self.means.add("moe/router_aux", float(part.detach()) / share, int(batch.completion_mask.sum()))
        return part
