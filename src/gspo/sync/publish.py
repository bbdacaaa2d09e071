"""Publishing weights to the engine, proved by a probe.

After each publish the trainer and the engine tell, for fixed prompts, how likely each of some tokens is to come next.
The move m of these log-probabilities since a reference point is known from the trainer; the engine's own move d must be
the same but for rounding. ``share`` = <d, m> / <m, m> is the part of the move that the engine made: 1 when it has the
weights, 0 when it ignores them, between when it took some, or answers from a cache of older ones.

An engine in bfloat16 rounds by more than one small update moves. So moves add up: the reference stays until the move is
large against the rounding, then a decision is made and the reference is set anew.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from gspo.engines.base import Engine
from gspo.errors import WeightSyncError
from gspo.policy.forward import score_next
from gspo.policy.load import Policy

PROBE_PROMPTS = 4
PROBE_TOKENS = 132
"""Of each prompt: more than a block (16 or 128 tokens) of a prefix cache, so that one not reset shows."""
CANDIDATES = 64
"""Most likely next tokens after each prompt, at the start, whose log-probabilities are compared."""
ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 0.1}
"""Difference (nats, root mean square) between two implementations of one model that is taken for rounding."""
DECISIVE, CLEAR = 4.0, 12.0
"""How many times the rounding the move must be for a decision, and for one that also finds missing tensors."""
LEAST_SHARE = 0.75
LARGEST_REST = 0.25
"""Of a clear move, what the engine may have made otherwise. With half of a small model's tensors old it is 0.3."""


@dataclass(frozen=True)
class _Scores:
    """What trainer and engine say of the probe, at one time: float64 [PROBE_PROMPTS * CANDIDATES]."""

    trainer: torch.Tensor
    engine: torch.Tensor


class Publisher:
    """Made once with weights that the engine has; their gap to the engine's is taken as the noise between the two.

    ``noise``: root mean square, in nats a token. ``decided``: version of the last publish that was proved.
    """

    def __init__(self, policy: Policy, engine: Engine) -> None:
        self.policy, self.engine = policy, engine
        self.prompts = _prompts(policy)
        self.candidates = [_likely(policy, prompt) for prompt in self.prompts]
        self.reference = self._scores()
        self.noise = _size(self.reference.engine - self.reference.trainer)
        self.decided = engine.policy_version
        self._check_noise()

    def publish(self, version: int) -> float:
        """Hand over the present weights as ``version``; returns the gap to the engine in nats a token.

        Raises WeightSyncError when the engine does not sample from them.
        """
        self.engine.load_weights(version)
        now = self._scores()
        gap = _size(now.engine - now.trainer)
        moved, made = now.trainer - self.reference.trainer, now.engine - self.reference.engine
        if not math.isfinite(gap):
            raise WeightSyncError(f"After version {version} the engine's log-probabilities are not finite.")
        size, noise = _size(moved), max(self.noise, ROUNDING[torch.float32])
        if size > DECISIVE * noise:
            share = float(made @ moved / (moved @ moved))
            if share < LEAST_SHARE or _size(made - moved) > max(3 * noise, LARGEST_REST * size):
                self._refuse(version, share, size, gap)
            self.decided = version
            if size > CLEAR * noise:
                self.reference = now
                self.noise += 0.1 * (gap - self.noise)  # it grows as the policy sharpens
        return gap

    def forget(self) -> None:
        """Take the present weights, here and in the engine, as the reference."""
        self.reference = self._scores()

    def _refuse(self, version: int, share: float, moved: float, gap: float) -> None:
        raise WeightSyncError(
            f"The engine does not have the weights of version {version}: since version {self.decided}, which it had, "
            f"the probe's log-probabilities moved by {moved:.2g} nat a token in the trainer, and the engine made "
            f"{100 * share:.0f} % of that move (they are {gap:.2g} apart; the rounding between the two is "
            f"{self.noise:.2g}). Sampling would go on from old or damaged weights, so the run stops."
        )

    def _check_noise(self) -> None:
        limit = 3 * ROUNDING[torch.bfloat16]  # engines may compute in bfloat16 whatever the trainer does
        if not self.noise <= limit:
            raise WeightSyncError(
                f"Engine and trainer disagree before any update: {self.noise:.2g} nat a token on the probe, more "
                f"than {limit:g}. They do not have the same model."
            )

    def _scores(self) -> _Scores:
        pairs = list(zip(self.prompts, self.candidates, strict=True))
        trainer = [value for prompt, tokens in pairs for value in score_next(self.policy, prompt, tokens)]
        engine = [value for prompt, tokens in pairs for value in self.engine.next_logprobs(prompt, tokens)]
        return _Scores(torch.tensor(trainer, dtype=torch.float64), torch.tensor(engine, dtype=torch.float64))


def _prompts(policy: Policy) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    vocabulary = policy.model.config.get_text_config().vocab_size
    length = min(PROBE_TOKENS, policy.context_length - 1)
    return torch.randint(0, vocabulary, (PROBE_PROMPTS, length), generator=generator).tolist()


def _likely(policy: Policy, prompt: list[int]) -> list[int]:
    vocabulary = policy.model.config.get_text_config().vocab_size
    every = torch.tensor(score_next(policy, prompt, range(vocabulary)))
    return every.topk(min(CANDIDATES, vocabulary // 2)).indices.tolist()


def _size(values: torch.Tensor) -> float:
    """Root mean square."""
    return float(values.square().mean().sqrt())
