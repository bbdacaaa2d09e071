"""Evaluation on held-out prompts, inside a run and on its own."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

from gspo.config import LARGEST, MIN_TEMPERATURE, Config
from gspo.engines.base import Request
from gspo.errors import ConfigError
from gspo.evaluation.pass_at_k import pass_at_k
from gspo.metrics import mean, std
from gspo.rollout.collect import score_groups, to_rollout
from gspo.rollout.system import System, encode_all, load_system
from gspo.types import Group, Prompt

EVAL_SEED = 0x5E7
"""Keeps evaluation's randomness apart from training's."""


def evaluate_system(
    system: System, config: Config, iteration: int, progress: Callable[[str, int, int], None] = lambda *_: None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(the line of eval.jsonl, one row an answer). Samples with the engine; touches neither weights nor run state.

    ``accuracy`` is the share of answers whose first reward term is at least 1, over prompts with equal weight.
    """
    start = time.perf_counter()
    samples, temperature = config.eval.samples, config.eval.temperature
    heldout = system.task.heldout[: config.eval.num_prompts]
    encoded = encode_all(system.chat, heldout, config.task.max_prompt_tokens)
    if not encoded:
        raise ConfigError("There are no held-out prompts to evaluate on. Set eval.prompts, or eval.every = 0.")
    requests = [
        Request(ids, samples, (config.run.seed, EVAL_SEED, iteration, place)) for place, (_, ids) in enumerate(encoded)
    ]
    sampling = system.sampling(config, temperature)
    completions = system.engine.generate(requests, sampling, lambda done, total: progress("eval", done, total))
    groups = [
        Group(prompt, [to_rollout(system, prompt, i, ids, c, temperature) for i, c in enumerate(row)])
        for (prompt, ids), row in zip(encoded, completions, strict=True)
    ]
    score_groups(system, groups, lambda done, total: progress("reward", done, total))
    answers = [_answer(group.prompt, rollout) for group in groups for rollout in group.rollouts]
    right = [sum(bool(is_right(rollout)) for rollout in group.rollouts) for group in groups]
    shares = [count / samples for count in right]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    record: dict[str, Any] = {
        "iteration": iteration,
        "policy_version": system.engine.policy_version,
        "num_prompts": len(groups),
        "samples": samples,
        "temperature": temperature,
        "accuracy": mean(shares),
        "accuracy_stderr": (std(shares) or 0.0) / math.sqrt(len(shares)),
        "reward/mean": mean(rollout.reward for rollout in rollouts if rollout.reward is not None),
    }
    for k in (2**power for power in range(1, samples.bit_length()) if samples > 1):
        record[f"pass@{k}"] = mean(pass_at_k(samples, count, k) for count in right)
    record["length_mean"] = mean(len(rollout.token_ids) for rollout in rollouts)
    record["truncated_fraction"] = mean(float(rollout.finish_reason == "length") for rollout in rollouts)
    record["seconds"] = time.perf_counter() - start
    return record, answers


def is_right(rollout: Any) -> bool:
    """Is the answer fully right: is its first reward term at least 1 (to rounding)?"""
    first = next(iter(rollout.reward_terms.values()), None)
    return first is not None and first >= 1 - 1e-6


def _answer(prompt: Prompt, rollout: Any) -> dict[str, Any]:
    return {
        "prompt_id": prompt.prompt_id,
        "prompt": prompt_text(prompt),
        "text": rollout.text,
        "reward": rollout.reward,
        "reward_terms": rollout.reward_terms,
        "correct": is_right(rollout),
        "finish_reason": rollout.finish_reason,
    }


def prompt_text(prompt: Prompt) -> str:
    """The last message of a prompt, for showing to people."""
    return prompt.content if isinstance(prompt.content, str) else str(prompt.content[-1].get("content", ""))


def evaluate(config: Config, *, callbacks: Sequence[Any] = ()) -> dict[str, Any]:
    """Evaluate ``config.model`` on the config's held-out prompts: one record as in eval.jsonl."""
    system = load_system(config)

    def progress(stage: str, done: int, total: int) -> None:
        for callback in callbacks:
            callback.on_progress(stage, done, total)

    with closing(system):
        record, answers = evaluate_system(system, config, 0, progress)
    for callback in callbacks:
        callback.on_eval(record, answers)
    return record


def sample(
    config: Config, prompts: Sequence[str], *, num_samples: int = 1, temperature: float = 1.0
) -> list[list[str]]:
    """Answers of ``config.model`` to text prompts, ``num_samples`` each."""
    if num_samples < 1 or not (temperature == 0 or MIN_TEMPERATURE <= temperature < LARGEST):
        raise ConfigError(
            f"num_samples must be at least 1 and temperature 0 (greedy) or at least {MIN_TEMPERATURE}, found "
            f"{num_samples} and {temperature}."
        )
    with closing(load_system(config)) as system:
        return _sample(system, config, prompts, num_samples, temperature)


def _sample(
    system: System, config: Config, prompts: Sequence[str], num_samples: int, temperature: float
) -> list[list[str]]:
    wrapped = [Prompt(f"prompt/{number}", text) for number, text in enumerate(prompts)]
    requests = []
    for number, prompt in enumerate(wrapped):
        ids = system.chat.encode(prompt)
        if len(ids) > config.task.max_prompt_tokens:
            raise ConfigError(
                f"Prompt {number} has {len(ids)} tokens, more than task.max_prompt_tokens = "
                f"{config.task.max_prompt_tokens}. Shorten it or raise the limit."
            )
        requests.append(Request(ids, num_samples, (config.run.seed, number)))
    rows = system.engine.generate(requests, system.sampling(config, temperature))
    return [[system.chat.decode(completion.token_ids) for completion in row] for row in rows]
