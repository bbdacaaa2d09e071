"""What sampling needs, put together from a config: model, chat format, engine, task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gspo.chat import ChatFormat, end_token_ids
from gspo.config import Config
from gspo.engines.base import Engine, Sampling
from gspo.engines.native import NativeEngine
from gspo.engines.vllm import VLLMEngine
from gspo.errors import ConfigError, DataError
from gspo.policy import moe
from gspo.policy.forward import choose_attention
from gspo.policy.load import Policy, load_policy, resolve_dtype
from gspo.policy.recompute import check_recompute
from gspo.tasks import Task, load_task
from gspo.types import Prompt


@dataclass
class System:
    """The parts of a run that exist before training starts. ``facts`` are lines for the user.

    ``start``: see ``starting_policy``.
    """

    policy: Policy
    chat: ChatFormat
    engine: Engine
    task: Task
    facts: list[str]
    start: Policy | None = None

    def starting_policy(self) -> Policy:
        """A frozen copy of the policy as it was when this was first called: before its first update, also for a second
        run with the same system, which goes on from weights that are trained already."""
        if self.start is None:
            self.start = copy_policy(self.policy, self.policy.dtype)
        return self.start

    def sampling(self, config: Config, temperature: float) -> Sampling:
        chat = self.chat
        should_stop = chat.ends_with_stop if chat.stop else None
        return Sampling(
            config.rollout.max_tokens,
            temperature,
            chat.end_token_ids,
            should_stop,
            chat.stop,
            chat.skip_special_tokens,
        )

    def close(self) -> None:
        """End what runs outside this process. Whoever loads a system closes it."""
        self.task.rewards.close()
        self.engine.close()


def load_system(config: Config, *, task: Task | None = None, policy: Policy | None = None) -> System:
    """Load everything (but what is given); raises ConfigError, DataError or RewardError before any work is lost."""
    task = task or load_task(config)
    policy = policy or load_policy(config.model)
    moe.check_settings(policy, config.algorithm)
    policy.recompute = config.batch.recompute_activations
    check_recompute(policy)
    experts = moe.choose_experts(policy)
    attention = choose_attention(policy, config.model.attention)
    policy.cast(resolve_dtype(config.model.dtype))
    facts = [
        f"model: {policy.name}, {_size(policy.num_parameters)} parameters, computing in "
        f"{str(policy.dtype).removeprefix('torch.')}, weights and optimizer in float32",
        attention,
        *task.notes,
        *([experts] if experts else []),
    ]
    longest = config.task.max_prompt_tokens + config.rollout.max_tokens
    if longest > policy.context_length:
        raise ConfigError(
            f"task.max_prompt_tokens + rollout.max_tokens = {longest} is more than the model's context of "
            f"{policy.context_length} tokens. Lower one of them."
        )
    chat = ChatFormat(
        policy.tokenizer,
        system_prompt=config.task.system_prompt,
        use_template=config.task.chat,
        skip_special_tokens=config.rollout.skip_special_tokens,
        stop=config.rollout.stop,
        end_token_ids=end_token_ids(policy.tokenizer, policy.model.generation_config),
    )
    engine = _engine(config, policy, longest)
    facts += engine.facts
    facts.append(
        f"sampling: temperature {config.rollout.temperature:g}, top_p 1, top_k off, at most "
        f"{config.rollout.max_tokens} tokens (the model's own generation settings are not used)"
    )
    return System(policy, chat, engine, task, facts)


def _engine(config: Config, policy: Policy, longest: int) -> Engine:
    dtype = policy.dtype if config.engine.dtype == "auto" else resolve_dtype(config.engine.dtype)
    if config.engine.kind == "vllm":
        trust = config.model.trust_remote_code
        return VLLMEngine(policy, config.engine, longest=longest, dtype=dtype, trust=trust)
    if dtype == policy.dtype:
        return NativeEngine(policy, max_batch=config.engine.max_batch)
    return NativeEngine(copy_policy(policy, dtype), owner=policy, max_batch=config.engine.max_batch)


def copy_policy(policy: Policy, dtype: torch.dtype) -> Policy:
    """A second model with the same weights, frozen."""
    model = type(policy.model)(policy.model.config)
    model.load_state_dict(policy.model.state_dict())
    model.to(policy.device).eval().requires_grad_(False)
    copy = Policy(model, policy.tokenizer, policy.name, policy.dtype, policy.attention)
    copy.cast(dtype)
    return copy


def encode_all(chat: ChatFormat, prompts: Sequence[Prompt], limit: int) -> list[tuple[Prompt, list[int]]]:
    """Prompts with their token ids; those longer than ``limit`` are left out."""
    encoded = [(prompt, chat.encode(prompt)) for prompt in prompts]
    kept = [(prompt, ids) for prompt, ids in encoded if len(ids) <= limit]
    if prompts and not kept:
        raise DataError(
            f"All {len(prompts)} prompts are longer than task.max_prompt_tokens = {limit} (the shortest has "
            f"{min(len(ids) for _, ids in encoded)} tokens). Raise task.max_prompt_tokens."
        )
    return kept


def _size(parameters: int) -> str:
    """135M, or 64K for models that are built in."""
    return f"{parameters / 1e6:.0f}M" if parameters >= 1e6 else f"{parameters / 1e3:.0f}K"
