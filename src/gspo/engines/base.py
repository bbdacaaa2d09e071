"""What any engine does: token ids in, token ids and log-probabilities out, and new weights when told."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gspo.types import Completion

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Request:
    """Ask for ``num_samples`` answers to one prompt. ``seed`` and the answer's index decide all randomness of it."""

    prompt_ids: Sequence[int]
    num_samples: int
    seed: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn. These values are the only ones: the model's generation config fills nothing in.

    ``temperature`` 0 is greedy, and log-probabilities are then those of the untempered distribution.
    ``should_stop`` is asked after each token for stop strings; None: none.
    """

    max_tokens: int
    temperature: float
    end_token_ids: frozenset[int]
    should_stop: Callable[[Sequence[int]], bool] | None = field(default=None, compare=False)


class Engine(ABC):
    """``policy_version`` is that of the weights it samples from."""

    policy_version: int = 0

    @abstractmethod
    def generate(
        self, requests: Sequence[Request], sampling: Sampling, progress: Progress | None = None
    ) -> list[list[Completion]]:
        """Completions by request, in order, ``num_samples`` each. ``progress(done, total)`` counts answers."""

    @abstractmethod
    def load_weights(self, version: int) -> None:
        """Take the policy's present weights and call them ``version``."""

    @abstractmethod
    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probabilities (nats, temperature 1) of ``token_ids[1:]``, each given the tokens before it."""
