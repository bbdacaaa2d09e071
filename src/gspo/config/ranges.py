"""Which values can work: one sentence for each that cannot, before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from gspo.errors import ConfigError, brief

if TYPE_CHECKING:
    from gspo.config.schema import Config

LARGEST = 1e30
"""Settings are below it: a number that float32 does not hold is no better than infinity."""

LONGEST_WAIT = 1_000_000
"""Seconds; the system's timers do not take much more."""

MIN_TEMPERATURE = 1e-4
"""Below it log-probs of the tempered distribution leave float32."""


def check_ranges(config: Config) -> None:
    """One sentence for each value that cannot work, before anything is loaded."""
    at_least = {
        "task.max_prompt_tokens": 1, "task.reward_timeout": 0, "task.reward_workers": 1,
        "eval.num_prompts": 1, "eval.every": 0, "eval.samples": 1,
        "eval.temperature": 0, "rollout.prompts_per_iteration": 1, "rollout.max_tokens": 1,
        "engine.max_batch": 1, "algorithm.updates_per_rollout": 1, "algorithm.kl_weight": 0,
        "algorithm.router_aux_weight": 0,
        "optimizer.learning_rate": 0, "optimizer.warmup": 0, "optimizer.weight_decay": 0,
        "coldstart.steps": 1, "coldstart.batch_size": 1, "coldstart.learning_rate": 0, "coldstart.router_aux_weight": 0,
        "batch.max_tokens": 1, "batch.vocab_chunk": 1, "run.iterations": 0, "run.seed": 0,
        "run.checkpoint_every": 0, "run.keep": 1, "engine.retries": 0,
    }  # fmt: skip
    for dotted, smallest in at_least.items():
        section, key = dotted.split(".")
        value = getattr(getattr(config, section), key)
        if not smallest <= value < (1 << 63 if isinstance(value, int) else LARGEST):
            raise ConfigError(f"{dotted} must be a finite number of at least {smallest}, found {brief(value)}.")
    if config.task.reward_timeout > LONGEST_WAIT:
        raise ConfigError(
            f"task.reward_timeout must be at most {LONGEST_WAIT:,} seconds, or 0 for no limit, found "
            f"{config.task.reward_timeout}."
        )
    if config.eval.num_prompts > 100_000:
        raise ConfigError(f"eval.num_prompts must be at most 100000, found {config.eval.num_prompts}.")
    if 0 < config.eval.temperature < MIN_TEMPERATURE:
        raise ConfigError(
            f"eval.temperature must be 0 (greedy) or at least {MIN_TEMPERATURE}, found {config.eval.temperature}."
        )
    if config.run.name != Path(config.run.name).name or config.run.name == "..":
        raise ConfigError(
            f"run.name must be the name of one folder, found {brief(config.run.name)}. Where it lies is run.directory."
        )
    if not config.optimizer.max_grad_norm > 0:
        raise ConfigError(f"optimizer.max_grad_norm must be above 0, found {config.optimizer.max_grad_norm}.")
    for beta in config.optimizer.betas:
        if not 0 <= beta < 1:
            raise ConfigError(f"optimizer.betas must be at least 0 and below 1, found {beta}.")
    if not 0 <= config.coldstart.noise < 1:
        raise ConfigError(f"coldstart.noise is a share, at least 0 and below 1, found {config.coldstart.noise}.")
    _check_rollout(config)
    _check_engine(config)
    _check_algorithm(config)
    weights, functions = config.task.reward_weights, config.task.reward
    if weights and functions and len(weights) != len(functions):
        raise ConfigError(
            f"task.reward_weights has {len(weights)} values for {len(functions)} reward functions; give one for each."
        )
    if not all(abs(weight) < LARGEST for weight in weights):
        raise ConfigError(f"task.reward_weights must be finite numbers, found {list(weights)}.")
    if config.track.kinds:
        raise ConfigError(
            f"track.kinds = {list(config.track.kinds)}: no tracker is available in this version. Remove it; "
            "metrics.jsonl in the run folder has every number."
        )
    if config.eval.samples > 1 and config.eval.temperature == 0:
        raise ConfigError("eval.samples above 1 needs eval.temperature above 0: greedy answers are all the same.")


def _check_rollout(config: Config) -> None:
    rollout = config.rollout
    if rollout.group_size < 2:
        raise ConfigError(
            f"rollout.group_size must be at least 2, found {rollout.group_size}: the advantage compares an answer "
            "with the others of its group, so a group of one never has a signal. 8 is usual."
        )
    if not MIN_TEMPERATURE <= rollout.temperature < LARGEST:
        raise ConfigError(
            f"rollout.temperature must be above 0 for training (at least {MIN_TEMPERATURE}), found "
            f"{rollout.temperature}: greedy answers of a group are all the same and have no signal. Use "
            "eval.temperature = 0 for greedy evaluation."
        )
    if rollout.top_p != 1.0 or rollout.top_k != 0:
        setting = f"rollout.top_p = {rollout.top_p}" if rollout.top_p != 1.0 else f"rollout.top_k = {rollout.top_k}"
        raise ConfigError(
            f"{setting} is refused: the engine would sample from a cut and renormalised distribution while the "
            "trainer scores the whole one, so the importance ratio of an unchanged policy is not 1 (keeping 80 % of "
            "the mass already gives 0.8 at every token, and every sequence is clipped). Use top_p = 1, top_k = 0, and "
            "the temperature to sharpen sampling."
        )
    longest = config.task.max_prompt_tokens + rollout.max_tokens
    if longest > config.batch.max_tokens:
        raise ConfigError(
            f"batch.max_tokens = {config.batch.max_tokens} cannot hold one row: task.max_prompt_tokens + "
            f"rollout.max_tokens = {longest}. Raise batch.max_tokens or lower one of them."
        )
    if "" in rollout.stop:
        raise ConfigError("rollout.stop holds an empty string, which would end every answer at once; remove it.")


def _check_engine(config: Config) -> None:
    engine = config.engine
    if not 0 < engine.request_timeout <= LONGEST_WAIT:
        raise ConfigError(
            f"engine.request_timeout must be above 0 and at most {LONGEST_WAIT:,} seconds, found "
            f"{engine.request_timeout}."
        )
    if engine.kind != "vllm":
        defaults = type(engine)()
        for key in ("url", "python", "arguments"):
            if getattr(engine, key) != getattr(defaults, key):
                raise ConfigError(f"engine.{key} is a setting of vLLM, and engine.kind is '{engine.kind}'.")
        return
    if engine.url and (engine.python or engine.arguments):
        raise ConfigError(
            "engine.url names a server that runs already; engine.python and engine.arguments are for one that gspo "
            "starts. Give one or the other."
        )
    if engine.url and not _is_address(engine.url):
        raise ConfigError(
            "engine.url must begin with http:// or https:// and name a host, such as http://127.0.0.1:8000, found "
            f"{brief(engine.url)}."
        )
    if engine.url and engine.on_death == "restart":
        raise ConfigError("engine.on_death = 'restart' is for a server that gspo starts; leave engine.url empty.")
    if engine.max_batch < max(config.rollout.group_size, config.eval.samples):
        raise ConfigError(
            f"engine.max_batch = {engine.max_batch} is below the answers to one prompt, which vLLM takes in one "
            f"request: rollout.group_size = {config.rollout.group_size}, eval.samples = {config.eval.samples}."
        )
    if config.algorithm.routing_replay == "rollout":
        raise ConfigError(
            "algorithm.routing_replay = 'rollout' needs the experts that the engine used, which are not taken over "
            "from vLLM in this version. Use 'old', or engine.kind = 'native'."
        )


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:  # brackets that do not close, a port that is no number
        return False


def _check_algorithm(config: Config) -> None:
    algorithm = config.algorithm
    for name, value in (("clip_low", config.clip[0]), ("clip_high", config.clip[1])):
        if not 0 <= value < LARGEST:
            raise ConfigError(f"algorithm.{name} must be at least 0, found {value}.")
    if config.clip[0] >= 1:
        raise ConfigError(f"algorithm.clip_low must be below 1 (ratios are positive), found {config.clip[0]}.")
    if not 1 < algorithm.correction_cap < LARGEST:
        raise ConfigError(f"algorithm.correction_cap must be above 1, found {algorithm.correction_cap}.")
    if algorithm.routing_replay == "old" and algorithm.old_logprobs == "engine":
        raise ConfigError(
            "algorithm.routing_replay = 'old' replays the experts of the trainer's old pass, and old_logprobs = "
            "'engine' leaves that pass out. Use routing_replay = 'rollout', or old_logprobs = 'trainer'."
        )
    if algorithm.correction != "none" and algorithm.old_logprobs == "engine":
        raise ConfigError(
            f"algorithm.correction = '{algorithm.correction}' weighs the trainer's old log-probs against the engine's, "
            "and algorithm.old_logprobs = 'engine' does not make the trainer's. Set old_logprobs = 'trainer', or "
            "correction = 'none': with the engine's log-probs the ratio itself has the mismatch in it."
        )
    if algorithm.updates_per_rollout > config.rollout.prompts_per_iteration:
        raise ConfigError(
            f"algorithm.updates_per_rollout = {algorithm.updates_per_rollout} needs at least as many prompts: "
            f"rollout.prompts_per_iteration is {config.rollout.prompts_per_iteration}, and a mini-batch has at least "
            "one whole group. Raise the prompts or lower the updates."
        )
