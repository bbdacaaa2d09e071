"""Publishing weights to the engine, proved each time by a probe.

A fixed token row is scored by the engine and by the trainer. An engine that has the new weights differs from the
trainer by the noise between the two, however far the update moved the row; one that ignored the update, or took half of
it, differs by a good part of that move. So an update is caught missing when it moved the row by more than the noise.
"""

from __future__ import annotations

import torch

from gspo.engines.base import Engine
from gspo.errors import WeightSyncError
from gspo.packing import Row, pack
from gspo.policy.forward import score
from gspo.policy.load import Policy

PROBE_TOKENS = 16
ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 0.1}
"""Mean difference (nats a token) between two implementations of one model that is taken for rounding."""


class Publisher:
    """Made once with the starting weights, whose gap to the engine's is taken as the noise between the two."""

    def __init__(self, policy: Policy, engine: Engine) -> None:
        self.policy, self.engine = policy, engine
        generator = torch.Generator().manual_seed(0)
        vocabulary = policy.model.config.get_text_config().vocab_size
        self.row = torch.randint(0, vocabulary, (PROBE_TOKENS,), generator=generator).tolist()
        self.before = self._trainer_scores()
        self.noise = _gap(self.engine.score(self.row), self.before)
        self._check_noise()

    def publish(self, version: int) -> float:
        """Hand over the present weights as ``version``; returns the gap to the engine in nats a token.

        Raises WeightSyncError when the engine does not sample from them.
        """
        self.engine.load_weights(version)
        engine, now = self.engine.score(self.row), self._trainer_scores()
        gap, gap_before, moved = _gap(engine, now), _gap(engine, self.before), _gap(now, self.before)
        if gap > max(8 * self.noise, ROUNDING[torch.float32]) and gap > moved / 4:
            raise WeightSyncError(
                f"The engine does not have the weights of version {version}: on the probe row its log-probabilities "
                f"are {gap:.2g} nat a token from the trainer's (noise {self.noise:.2g}), and {gap_before:.2g} from "
                f"those of the version before; the update moved them by {moved:.2g}. Sampling would go on from old or "
                "damaged weights, so the run stops."
            )
        self.before = now
        self.noise += 0.1 * (gap - self.noise)  # it grows as the policy sharpens
        return gap

    def forget(self) -> None:
        """Take the present weights as the ones last published."""
        self.before = self._trainer_scores()

    def _check_noise(self) -> None:
        limit = 3 * ROUNDING[torch.bfloat16]  # engines may compute in bfloat16 whatever the trainer does
        if not self.noise <= limit:
            raise WeightSyncError(
                f"Engine and trainer disagree before any update: {self.noise:.2g} nat a token on the probe row, more "
                f"than {limit:g}. They do not have the same model."
            )

    def _trainer_scores(self) -> list[float]:
        row = Row(self.row[:1], self.row[1:], [True] * (PROBE_TOKENS - 1), 1.0, [0.0] * (PROBE_TOKENS - 1))
        with torch.no_grad():
            batch = pack([row], [0], max_tokens=PROBE_TOKENS)[0]
            return score(self.policy, batch, entropy=False).logprobs.tolist()


def _gap(first: list[float], second: list[float]) -> float:
    """Mean absolute difference."""
    return sum(abs(a - b) for a, b in zip(first, second, strict=True)) / len(first)
