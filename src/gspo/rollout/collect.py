"""One rollout batch: draw prompts, sample groups, score them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from gspo.config import Config
from gspo.engines.base import Request
from gspo.errors import DataError
from gspo.rollout.system import System
from gspo.types import Completion, Group, Prompt, Rollout

MAX_DRAWS = 20
"""Times the batch size that may be drawn in search of prompts short enough, before it is an error."""


@dataclass(frozen=True)
class Collected:
    """The groups of one iteration and what collecting them took."""

    groups: list[Group]
    prompts_too_long: int
    rollout_seconds: float
    reward_seconds: float

    @property
    def rollouts(self) -> list[Rollout]:
        """All answers, group by group."""
        return [rollout for group in self.groups for rollout in group.rollouts]


def collect(
    system: System, config: Config, iteration: int, progress: Callable[[str, int, int], None] = lambda *_: None
) -> Collected:
    """Sample ``group_size`` answers for each of ``prompts_per_iteration`` prompts and score them.

    Randomness depends on the run's seed, the iteration, the prompt's place in the batch and the answer's index only.
    """
    encoded, too_long = _draw(system, config)
    requests = [
        Request(ids, config.rollout.group_size, (config.run.seed, iteration, place))
        for place, (_, ids) in enumerate(encoded)
    ]
    start = time.perf_counter()
    sampling = system.sampling(config, config.rollout.temperature)
    completions = system.engine.generate(requests, sampling, lambda done, total: progress("rollout", done, total))
    rollout_seconds = time.perf_counter() - start
    groups = [
        Group(prompt, [to_rollout(system, prompt, i, ids, c, sampling.temperature) for i, c in enumerate(row)])
        for (prompt, ids), row in zip(encoded, completions, strict=True)
    ]
    start = time.perf_counter()
    score_groups(system, groups, lambda done, total: progress("reward", done, total))
    return Collected(groups, too_long, rollout_seconds, time.perf_counter() - start)


def _draw(system: System, config: Config) -> tuple[list[tuple[Prompt, list[int]]], int]:
    """Prompts that fit, with their ids, and how many did not fit."""
    wanted, limit = config.rollout.prompts_per_iteration, config.task.max_prompt_tokens
    kept: list[tuple[Prompt, list[int]]] = []
    drawn = 0
    while len(kept) < wanted:
        if drawn >= MAX_DRAWS * wanted:
            raise DataError(
                f"Of {drawn} prompts drawn only {len(kept)} are within task.max_prompt_tokens = {limit}. Raise the "
                "limit or shorten the prompts."
            )
        prompts = system.task.train.take(wanted - len(kept))
        drawn += len(prompts)
        encoded = [(prompt, system.chat.encode(prompt)) for prompt in prompts]
        kept += [(prompt, ids) for prompt, ids in encoded if len(ids) <= limit]
    return kept, drawn - wanted


def to_rollout(
    system: System, prompt: Prompt, index: int, prompt_ids: list[int], completion: Completion, temperature: float
) -> Rollout:
    return Rollout(
        prompt_id=prompt.prompt_id,
        index=index,
        prompt_ids=prompt_ids,
        token_ids=completion.token_ids,
        completion_mask=[True] * len(completion.token_ids),
        rollout_logprobs=completion.logprobs,
        temperature=temperature,
        policy_version=completion.policy_version,
        finish_reason=completion.finish_reason,
        text=system.chat.decode(completion.token_ids),
        routing=completion.routing,
    )


def score_groups(system: System, groups: list[Group], progress: Callable[[int, int], None] = lambda *_: None) -> None:
    """Fill in reward, terms and error of every rollout. ``progress``: answers scored and all, the last time equal."""
    rollouts = [(group.prompt, rollout) for group in groups for rollout in group.rollouts]
    scores = system.task.rewards.score(
        [prompt for prompt, _ in rollouts],
        [rollout.text for _, rollout in rollouts],
        [rollout.token_ids for _, rollout in rollouts],
        progress,
    )
    progress(len(rollouts), len(rollouts))
    for (_, rollout), score in zip(rollouts, scores, strict=True):
        rollout.reward, rollout.reward_terms, rollout.error = score.reward, dict(score.terms), score.error
