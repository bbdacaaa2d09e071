"""The two training primitives: ``forward_backward`` adds up the gradient of an update, ``optim_step`` makes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gspo.algorithm.batch import PackedBatch, StepBatch, split_by_sequence
from gspo.algorithm.kl import kl_penalty
from gspo.algorithm.objectives import OBJECTIVES, ObjectiveOutput
from gspo.algorithm.routing import expert_change, expert_counts, router_balance_loss
from gspo.algorithm.segments import segment_ids
from gspo.config import Config
from gspo.errors import ConfigError
from gspo.metrics import Means
from gspo.policy import moe
from gspo.policy.forward import Scored, score
from gspo.policy.load import Policy
from gspo.training.optimizer import MasterOptimizer


@dataclass(frozen=True)
class RowResult:
    """What an update saw of one row: ratio and clip state as the objective used them, log-probs [L] in nats.

    ``expert_change``: share of experts that changed since the old pass, by layer; None for a dense model.
    """

    ratio: float
    clipped: float
    old_logprobs: list[float]
    logprobs: list[float]
    expert_change: list[float] | None = None


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

    def forward_backward(self, step: StepBatch, means: Means) -> tuple[float, dict[int, RowResult]]:
        """Add the gradient of one update's loss to the weights' gradients.

        Returns the loss and, by row number, what the update saw of each row that went through the model.
        """
        results: dict[int, RowResult] = {}
        total = 0.0
        balance = _Balance(self, step, means) if self.config.algorithm.router_aux_weight > 0 else None
        for batch in step.batches:
            scored = self.score(batch, router_logits=balance is not None)
            old = scored.logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
            output = self._objective(scored.logprobs, old, batch, step)
            loss = output.loss
            if self.reference is not None:
                loss = loss + self.config.algorithm.kl_weight * self._kl(scored.logprobs, old, batch, step, means)
            if balance is not None:
                loss = loss + self.config.algorithm.router_aux_weight * balance.loss(batch, scored)
            loss.backward()
            _observe(means, batch, step, scored, old, output)
            total += float(loss.detach())
            changes = _observe_experts(means, batch, scored)
            results |= _row_results(batch, scored.logprobs.detach(), old, output, changes)
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
    means: Means, batch: PackedBatch, step: StepBatch, scored: Scored, old: Tensor, output: ObjectiveOutput
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


def _row_results(
    batch: PackedBatch, logprobs: Tensor, old: Tensor, output: ObjectiveOutput, changes: list[list[float]] | None
) -> dict[int, RowResult]:
    new_rows, old_rows = (split_by_sequence(values, batch.cu_seqlens) for values in (logprobs, old))
    by_row: Sequence[list[float] | None] = changes if changes is not None else [None] * batch.num_sequences
    columns = zip(batch.rows, output.ratio.tolist(), output.clipped.tolist(), old_rows, new_rows, by_row, strict=True)
    return {
        row: RowResult(ratio, clip, before.tolist(), now.tolist(), change)
        for row, ratio, clip, before, now, change in columns
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


class _Balance:
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
