"""No setting is accepted and then ignored: each, turned, changes what the run does."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch

from gspo.config import Config, known_keys
from gspo.metrics import Means
from gspo.packing import pack_step
from gspo.policy.load import Policy
from gspo.rollout.system import copy_policy
from gspo.training.loop import train
from gspo.training.trainer import Trainer
from tests.helpers import random_rows

BASE: dict[str, Any] = {
    "model.path": "builtin:tiny",
    "model.dtype": "float32",
    "task.prompts": "builtin:vowels",
    "task.max_prompt_tokens": 96,
    "eval.num_prompts": 8,
    "eval.every": 1,
    "rollout.prompts_per_iteration": 4,
    "rollout.group_size": 4,
    "rollout.max_tokens": 8,
    "optimizer.learning_rate": 1e-2,
    "run.iterations": 2,
    "run.name": "base",
}
TURNED: dict[str, Any] = {
    "model.dtype": "bfloat16",
    "task.prompts": "builtin:addition",
    "task.reward": ("json:dumps",),  # fails when called, so it is called
    "task.system_prompt": "Be brief.",
    "task.chat": False,
    "task.max_prompt_tokens": 20,
    "eval.prompts": "builtin:addition",
    "eval.num_prompts": 4,
    "eval.every": 0,
    "eval.temperature": 1.0,
    "rollout.prompts_per_iteration": 5,
    "rollout.group_size": 5,
    "rollout.max_tokens": 6,
    "rollout.temperature": 0.5,
    "rollout.stop": ("e",),
    "engine.dtype": "bfloat16",
    "algorithm.objective": "grpo",
    "algorithm.clip_low": 0.5,
    "algorithm.clip_high": 0.5,
    "algorithm.updates_per_rollout": 2,
    "algorithm.advantage": "none",
    "algorithm.kl_weight": 10.0,
    "optimizer.learning_rate": 1e-3,
    "optimizer.warmup": 4,
    "optimizer.schedule": "linear",
    "optimizer.weight_decay": 0.5,
    "optimizer.betas": (0.5, 0.9),
    "optimizer.max_grad_norm": 0.01,
    "run.iterations": 1,
    "run.seed": 1,
    "run.name": "other",
}
ELSEWHERE = {
    "model.path": "every end-to-end test",
    "model.attention": "tests/parity/test_families.py",
    "model.trust_remote_code": "handed to transformers",
    "task.prompt_column": "tests/unit/tasks/test_rows.py",
    "task.shuffle": "tests/unit/tasks/test_rows.py",
    "task.streaming": "tests/unit/tasks/test_hub.py",
    "task.reward_weights": "tests/docs/test_readme.py",
    "task.reward_timeout": "tests/unit/tasks/test_workers.py",
    "task.reward_workers": "tests/unit/tasks/test_workers.py",
    "task.on_reward_error": "tests/unit/tasks/test_workers.py",
    "eval.samples": "test_several_samples_give_pass_at_k",
    "rollout.top_p": "refused, tests/e2e/test_mistakes.py",
    "rollout.top_k": "refused, tests/e2e/test_mistakes.py",
    "rollout.skip_special_tokens": "tests/unit/test_chat.py",
    **{
        f"engine.{key}": "tests/unit/engines/test_vllm.py"
        for key in ("kind", "url", "python", "arguments", "weights_directory", "request_timeout", "retries", "on_death")
    },
    "algorithm.old_logprobs": "tests/unit/training/test_mismatch.py",
    "algorithm.correction": "tests/unit/training/test_mismatch.py",
    "algorithm.correction_cap": "tests/unit/training/test_mismatch.py",
    "algorithm.routing_replay": "tests/unit/training/test_experts.py",
    "algorithm.router_aux_weight": "tests/unit/training/test_experts.py",
    **{
        f"coldstart.{key}": "tests/unit/training/test_coldstart.py"
        for key in ("steps", "batch_size", "learning_rate", "noise", "router_aux_weight", "solution_column")
    },
    "engine.max_batch": "tests/unit/engines/test_native.py",
    "batch.max_tokens": "tests/unit/training/test_work.py",
    "batch.vocab_chunk": "tests/unit/training/test_gradient.py",
    "batch.recompute_activations": "tests/unit/policy/test_recompute.py",
    "run.directory": "every end-to-end test",
    "run.checkpoint_every": "test_checkpoints_are_saved_when_due",
    "run.keep": "test_keep_counts_checkpoints",
    "track.kinds": "refused, tests/e2e/test_mistakes.py",
}


def fingerprint(folder: Path, values: dict[str, Any]) -> str:
    """Everything a run decides: rollouts, evaluations, checkpoints, names; or the error it ends in."""
    try:
        result = train(Config().with_values(BASE | {"run.directory": str(folder)} | values))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    digest = hashlib.sha256(result.directory.name.encode())
    for path in sorted(result.directory.rglob("*")):
        if path.is_file() and (path.parent.name in ("rollouts", "evals") or path.suffix == ".safetensors"):
            digest.update(str(path.relative_to(result.directory)).encode() + path.read_bytes())
    return digest.hexdigest()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    first, second = (fingerprint(tmp_path_factory.mktemp("base"), {}) for _ in range(2))
    assert first == second, "two equal runs differ"
    return first


@pytest.mark.parametrize("key", TURNED)
def test_turning_it_changes_the_run(base: str, tmp_path: Path, key: str) -> None:
    found = fingerprint(tmp_path, {key: TURNED[key]})
    assert found != base
    if key not in ("task.reward", "task.max_prompt_tokens"):
        assert "Error" not in found, found


def test_every_key_is_turned_somewhere() -> None:
    assert set(known_keys()) == set(TURNED) | set(ELSEWHERE)


def test_several_samples_give_pass_at_k(tmp_path: Path) -> None:
    values = {"eval.samples": 4, "eval.temperature": 1.0, "run.iterations": 0, "run.directory": str(tmp_path)}
    record = train(Config().with_values(BASE | values)).last_eval
    assert record is not None
    assert {"pass@2", "pass@4"} <= set(record) and record["accuracy"] <= record["pass@2"] <= record["pass@4"]


@pytest.mark.parametrize(("every", "names"), [(1, "0123"), (2, "023"), (0, "03")])
def test_checkpoints_are_saved_when_due(tmp_path: Path, every: int, names: str) -> None:
    """Before the first iteration and after the last in any case."""
    values = {"run.checkpoint_every": every, "run.iterations": 3, "run.keep": 9, "eval.every": 0}
    result = train(Config().with_values(BASE | values | {"run.directory": str(tmp_path)}))
    assert sorted(path.name for path in (result.directory / "checkpoints").iterdir()) == list(names)


def test_keep_counts_checkpoints(tmp_path: Path) -> None:
    values = {"run.keep": 1, "run.iterations": 4, "run.checkpoint_every": 1, "run.directory": str(tmp_path)}
    result = train(Config().with_values(BASE | values))
    kept = {path.name for path in (result.directory / "checkpoints").iterdir()}
    evals = [(row["accuracy"], row["iteration"]) for row in [result.last_eval]]
    assert "4" in kept and len(kept) <= 2 and evals


def test_the_reference_is_the_starting_policy(tiny_policy: Policy) -> None:
    """trl#3194: the divergence to the reference is exactly 0 before the first update, and above 0 after it."""
    config = Config().with_values({"algorithm.kl_weight": 0.5, "optimizer.learning_rate": 1e-2})
    trainer = Trainer(tiny_policy, config, copy_policy(tiny_policy, torch.float32))
    found = []
    for _ in range(2):
        means = Means()
        trainer.forward_backward(pack_step(random_rows([[3, 4], [5, 6]]), max_tokens=1000), means)
        trainer.optim_step()
        found.append(means.result()["policy/kl_ref"])
    assert found[0] == 0.0 and found[1] > 1e-6
    assert all(parameter.grad is None for parameter in trainer.reference.model.parameters())  # type: ignore[union-attr]
