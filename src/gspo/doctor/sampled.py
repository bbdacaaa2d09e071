"""What real answers to real prompts show: chat format, rewards, signal, lengths, engine against trainer, time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from gspo.chat import ChatFormat
from gspo.config import Config
from gspo.doctor.finding import Finding, fail, ok, warn
from gspo.errors import RewardError, WeightSyncError
from gspo.rollout.collect import Collected, collect
from gspo.rollout.system import System
from gspo.sync.publish import Publisher
from gspo.training.iteration import Iteration, run_updates
from gspo.training.observe import has_signal, mismatch_metrics
from gspo.training.trainer import Trainer
from gspo.types import Prompt

PROMPTS = 8
GOLD_COLUMNS = ("solution", "answer")
FEW_HELDOUT = 16
"""With fewer, the standard error of an accuracy of one half is above 0.125."""
JUNK = "I would rather talk about the weather."


def check_chat(chat: ChatFormat, prompts: Sequence[Prompt]) -> Finding:
    """One begin token, a prompt that is the model's turn, and an end token that the template's own answers have."""
    tokenizer, encoded = chat.tokenizer, [chat.encode(prompt) for prompt in prompts]
    doubled = [
        prompt.prompt_id for prompt, ids in zip(prompts, encoded, strict=True) if _more_begins(chat, prompt, ids)
    ]
    if doubled:
        return fail(
            "chat format",
            f"the text of {len(doubled)} of {len(prompts)} prompts, such as {doubled[0]}, brings a begin token "
            f"{tokenizer.bos_token!r} of its own beside the chat template's",
            "Take it out of the prompts; text that is rendered already goes with task.chat = false.",
        )
    if not chat.use_template:
        return ok("chat format", "prompts are fed as they are (task.chat = false)")
    user = [{"role": "user", "content": "x"}]
    render = lambda messages, begin: tokenizer.apply_chat_template(  # noqa: E731
        messages, add_generation_prompt=begin, tokenize=True, return_dict=False
    )
    without, asked = render(user, False), render(user, True)
    whole = render([*user, {"role": "assistant", "content": "y"}], False)
    ending = whole[len(without) :]
    ends = [tokenizer.convert_ids_to_tokens(token) for token in sorted(chat.end_token_ids)]
    if not set(ending) & chat.end_token_ids:
        last = tokenizer.decode(ending[-2:])
        return fail(
            "chat format",
            f"the template ends an answer with {last!r}, and the model's end tokens are {ends}: answers that end as "
            "the template says run on to rollout.max_tokens",
            "Set the tokenizer's eos_token to the template's end-of-turn token, or add that text to rollout.stop.",
        )
    if asked == without:
        return warn(
            "chat format",
            "the template has no generation prompt: the model must first say whose turn it is",
            "Use the model's own chat template, or one with add_generation_prompt.",
        )
    shown = tokenizer.decode(encoded[0][-8:])
    return ok("chat format", f"prompts end with {shown!r}, answers with {', '.join(ends)}")


def _more_begins(chat: ChatFormat, prompt: Prompt, ids: Sequence[int]) -> bool:
    """Are there more begin tokens than in the same conversation about nothing?"""
    bos = chat.tokenizer.bos_token_id
    if bos is None:
        return False
    nothing: str | list[dict[str, Any]] = "x"
    if not isinstance(prompt.content, str):
        nothing = [{**message, "content": "x"} for message in prompt.content]
    return ids.count(bos) > chat.encode(replace(prompt, content=nothing)).count(bos)


def check_rewards(system: System, prompts: Sequence[Prompt]) -> Finding:
    """Gold answers must score above junk."""
    column = next((name for name in GOLD_COLUMNS if all(isinstance(p.columns.get(name), str) for p in prompts)), None)
    try:
        junk = _mean_reward(system, prompts, [JUNK] * len(prompts))
        if column is None:
            return ok("reward", f"junk scores {junk:.3g}; prompts have no answer or solution column to try as gold")
        gold = _mean_reward(system, prompts, [str(prompt.columns[column]) for prompt in prompts])
    except RewardError as error:
        return fail("reward", str(error), "Mend the reward function; it is called like this in the run.")
    text = f"the column {column!r} as the answer scores {gold:.3g}, junk {junk:.3g}"
    if not gold > junk:
        advice = "The reward does not recognise right answers. Check columns, and what it does with chat messages."
        return fail("reward", text, advice, gold=gold, junk=junk)
    return ok("reward", text, gold=gold, junk=junk)


def check_heldout(config: Config, prompts: int) -> Finding:
    """Enough held-out prompts that a change of accuracy can be told from chance."""
    if not config.eval.every:
        return ok("held-out", "no evaluations (eval.every = 0)")
    error = 0.5 / max(prompts, 1) ** 0.5
    text = f"{prompts} prompts; the standard error of their accuracy is at most {error:.2g}"
    if prompts < FEW_HELDOUT:
        advice = "Changes of accuracy will be chance. Give more rows, or a file of its own in eval.prompts."
        return warn("held-out", text, advice, prompts=prompts)
    return ok("held-out", text, prompts=prompts)


def _mean_reward(system: System, prompts: Sequence[Prompt], texts: Sequence[str]) -> float:
    ids = [system.chat.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    scores = [score.reward for score in system.task.rewards.score(prompts, texts, ids)]
    known = [score for score in scores if score is not None]
    return sum(known) / len(known) if known else float("nan")


def sample(system: System, config: Config, progress: Callable[[str, int, int], None]) -> Collected:
    """Real answers: at most eight groups."""
    few = min(PROMPTS, config.rollout.prompts_per_iteration)
    return collect(system, replace(config, rollout=replace(config.rollout, prompts_per_iteration=few)), 0, progress)


def check_signal(collected: Collected) -> Finding:
    """A group whose answers all have one reward teaches nothing."""
    rewards = [[r.reward for r in group.rollouts if r.reward is not None] for group in collected.groups]
    learning = sum(has_signal(group) for group in rewards)
    every = [reward for group in rewards for reward in group]
    spread = f", rewards {min(every):.3g} to {max(every):.3g}" if every else ", nothing was scored"
    text = f"{learning} of {len(rewards)} groups have answers of different reward{spread}"
    measured = {"groups": len(rewards), "with_signal": learning}
    advice = (
        "All answers of a prompt score the same. Give partial credit, choose easier (or harder) prompts, raise "
        "rollout.group_size or the temperature, or start from a better model."
    )
    if learning == 0:
        return fail("signal", text, advice, **measured)
    if learning <= len(rewards) / 8:
        return warn("signal", text, advice, **measured)
    return ok("signal", text, **measured)


def check_length(collected: Collected, config: Config) -> Finding:
    rollouts = collected.rollouts
    cut = sum(rollout.finish_reason == "length" for rollout in rollouts) / len(rollouts)
    mean = sum(len(rollout.token_ids) for rollout in rollouts) / len(rollouts)
    text = (
        f"{100 * cut:.0f} % of answers are cut at {config.rollout.max_tokens} tokens; they have {mean:.0f} on average"
    )
    advice = "Raise rollout.max_tokens (and batch.max_tokens with it), or ask for shorter answers."
    if cut >= 0.5:
        return warn("answer length", text, advice, truncated=cut, mean=mean)
    return ok("answer length", text, truncated=cut, mean=mean)


def check_noise(iteration: Iteration, config: Config) -> Finding:
    """Is the clip band above the noise that the ratio will have in it?"""
    found = mismatch_metrics(iteration.results, config.clip)
    engine, outside = found["mismatch/sequence_p99"], found["mismatch/outside_band"]
    floor = iteration.noise_floor
    if engine is None or floor is None or not config.algorithm.objective.startswith("gspo"):
        return ok("noise", "not measured: no sequence ratio, or no group with a signal")
    band = min(config.clip)
    text = (
        f"as |log s|, 99 of 100: rounding {floor:.1e}, engine against trainer {engine:.1e} "
        f"({100 * (outside or 0):.0f} % outside the band); clip band {config.clip[0]:g} / {config.clip[1]:g}"
    )
    measured = {"floor": floor, "engine_p99": engine, "outside_band": outside}
    if config.algorithm.old_logprobs == "engine" and engine > band:
        advice = (
            "The engine's rounding alone clips answers. Use algorithm.old_logprobs = 'trainer', engine.dtype = "
            f"'float32', or a band of about {3 * engine:.0e}."
        )
        return warn("noise", text, advice, **measured)
    return ok("noise", text, **measured)


def check_weights_arrive(system: System, publisher: Publisher) -> Finding:
    """Move the norms' weights, publish, let the probe look, and move them back."""
    moved = [p for p in system.policy.model.parameters() if p.ndim == 1] or [next(system.policy.model.parameters())]
    before = [parameter.detach().clone() for parameter in moved]
    version = system.engine.policy_version
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad():
            for parameter in moved:
                noise = torch.randn(parameter.shape, generator=generator).to(parameter)
                parameter.add_(0.1 * noise * parameter.abs().mean())
        publisher.publish(version)
    except WeightSyncError as error:
        return fail("weights reach the engine", str(error), "Sampling would go on from the starting weights.")
    finally:
        with torch.no_grad():
            for parameter, kept in zip(moved, before, strict=True):
                parameter.copy_(kept)
        system.engine.load_weights(version)
        publisher.forget()
    return ok(
        "weights reach the engine", f"changed, published and found there (noise {publisher.noise:.1e} nat a token)"
    )


def check_time(collected: Collected, iteration: Iteration, config: Config, eval_prompts: int) -> Finding:
    """Seconds an iteration and the whole run, from the eight groups that were sampled and trained on."""
    share = config.rollout.prompts_per_iteration / len(collected.groups)
    sampling, rewards = share * collected.rollout_seconds, share * collected.reward_seconds
    updates = share * (iteration.old_seconds + iteration.update_seconds)
    answers = eval_prompts * config.eval.samples
    evaluation = collected.rollout_seconds * answers / len(collected.rollouts)
    evaluations = 1 + config.run.iterations // config.eval.every if config.eval.every else 0
    whole = config.run.iterations * (sampling + rewards + updates) + evaluations * evaluation
    text = (
        f"about {sampling + rewards + updates:.1f} s an iteration ({sampling:.1f} sampling, {rewards:.1f} rewards, "
        f"{updates:.1f} training), {_duration(whole)} for {config.run.iterations} iterations and their evaluations"
    )
    return ok("time", text, iteration_seconds=sampling + rewards + updates, run_seconds=whole)


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"


def train_once(collected: Collected, trainer: Trainer, config: Config) -> Iteration:
    """The gradients of an iteration's updates, measured like in the run, with weights that stay as they are."""
    iteration = Iteration(1, collected)
    rate = replace(config.optimizer, learning_rate=0.0, weight_decay=0.0)
    trainer.optimizer.config = rate
    parts = min(config.algorithm.updates_per_rollout, len(collected.groups))
    run_updates(iteration, trainer, replace(config, algorithm=replace(config.algorithm, updates_per_rollout=parts)))
    return iteration
