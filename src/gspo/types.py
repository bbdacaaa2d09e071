"""What flows through a run before it becomes tensors: plain Python, JSON-able, without torch.

Prompt --engine--> Completion --reward--> Rollout --by prompt--> Group --packing--> tensors
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np

Message = Mapping[str, Any]
FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Prompt:
    """One question.

    ``content`` is text, or chat messages (``[{"role": "user", "content": "..."}]``). ``columns`` holds the row's
    other fields; they reach the reward functions unchanged and by name.

    Example::

        Prompt("addition/12", "What is 12 + 30?", {"answer": "42"})
    """

    prompt_id: str
    content: str | Sequence[Message]
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Routing:
    """Which experts of a mixture-of-experts model wrote an answer: arrays of uint8, or int16 above 256 experts.

    ``prompt`` [P, layers, K]: at each prompt token. ``completion`` [L, layers, K]: at the position that predicts each
    completion token, so the first row repeats the prompt's last. Cut and merge it like the token ids.
    """

    prompt: np.ndarray
    completion: np.ndarray


@dataclass(frozen=True)
class Completion:
    """What one engine call sampled for one prompt: ``L`` token ids and their log-probabilities.

    ``logprobs`` [L] are in nats, under the distribution that was sampled from (at the sampling temperature).
    ``finish_reason``: ``stop`` (an end token, kept as the last id, or a stop string), ``length`` (cut at the
    limit; no end token is invented), ``abort`` (given up; not trained on). ``policy_version`` counts updates.
    ``routing``: None for dense models and engines that do not report it.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    policy_version: int = 0
    routing: Routing | None = field(default=None, compare=False)


@dataclass
class Rollout:
    """The whole token row of one answer, with its mask, reward and where it came from.

    ``token_ids`` [L] follow ``prompt_ids``; ``completion_mask`` [L] is True where the policy sampled the token
    (False for text that a tool or environment inserted). ``reward`` is None when the answer is unscored: it then
    stays outside the group's mean and deviation and gets advantage 0.
    """

    prompt_id: str
    index: int
    prompt_ids: list[int]
    token_ids: list[int]
    completion_mask: list[bool]
    rollout_logprobs: list[float]
    temperature: float
    policy_version: int
    finish_reason: FinishReason
    text: str
    reward: float | None = None
    reward_terms: dict[str, float | None] = field(default_factory=dict)
    error: str | None = None
    routing: Routing | None = None


@dataclass
class Group:
    """The ``G`` rollouts of one prompt: the unit of advantage, filtering and staleness."""

    prompt: Prompt
    rollouts: list[Rollout]
