"""What any engine does: token ids in, token ids and log-probabilities out, and new weights when told."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gspo.types import Completion, FinishReason

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
    ``should_stop`` is asked after each token for the strings in ``stop``; None: there are none.
    """

    max_tokens: int
    temperature: float
    end_token_ids: frozenset[int]
    should_stop: Callable[[Sequence[int]], bool] | None = field(default=None, compare=False)
    stop: tuple[str, ...] = ()
    skip_special_tokens: bool = True

    def finish_reason(self, token_ids: Sequence[int]) -> FinishReason | None:
        """Why an answer ends with its newest token, or None if it goes on."""
        if token_ids[-1] in self.end_token_ids:
            return "stop"
        if self.should_stop is not None and self.should_stop(token_ids):
            return "stop"
        return "length" if len(token_ids) >= self.max_tokens else None


class Engine(ABC):
    """``policy_version`` is that of the weights it samples from. ``facts``: lines for the user."""

    policy_version: int = 0
    facts: Sequence[str] = ()

    @abstractmethod
    def generate(
        self, requests: Sequence[Request], sampling: Sampling, progress: Progress | None = None
    ) -> list[list[Completion]]:
        """Completions by request, in order, ``num_samples`` each. ``progress(done, total)`` counts answers."""

    @abstractmethod
    def load_weights(self, version: int) -> None:
        """Take the policy's present weights and call them ``version``."""

    @abstractmethod
    def next_logprobs(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> list[float]:
        """Log-probabilities (nats, temperature 1) of each of ``token_ids`` to come next after ``prompt_ids``.

        By the same path as sampling, with its prefix cache if there is one: the probe asks for them.
        """

    def log_to(self, folder: Path) -> None:  # noqa: B027
        """Keep what it says of itself in the run's folder. Nothing by default."""

    def close(self) -> None:  # noqa: B027
        """Give back all it holds outside this process. Nothing by default; may be called twice."""
