"""The engine against vLLM itself: the same log-probs as the trainer, weights that arrive, a run, a death."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gspo.config import Config, EngineConfig, ModelConfig
from gspo.engines.base import Request, Sampling
from gspo.engines.vllm import VLLMEngine
from gspo.errors import EngineError, WeightSyncError
from gspo.packing import Row, pack
from gspo.policy.forward import choose_attention, score
from gspo.policy.load import Policy, load_policy
from gspo.sync.publish import Publisher
from gspo.training.loop import train
from tests.vllm.conftest import PYTHON

LONGEST = 256


@pytest.fixture(scope="module")
def policy(model: str) -> Policy:
    policy = load_policy(ModelConfig(path=model))
    choose_attention(policy, "grouped")
    return policy


@pytest.fixture(scope="module")
def engine(policy: Policy) -> Iterator[VLLMEngine]:
    made = VLLMEngine(policy, EngineConfig(kind="vllm", python=str(PYTHON)), longest=LONGEST, dtype=torch.float32)
    yield made
    made.close()


def test_its_logprobs_are_the_trainers(policy: Policy, engine: VLLMEngine) -> None:
    prompts = [[5, 17, 40, 2], [8, 9]]
    requests = [Request(prompt, 4, (number,)) for number, prompt in enumerate(prompts)]
    found = engine.generate(requests, Sampling(12, 0.7, frozenset([policy.tokenizer.eos_token_id])))
    for prompt, answers in zip(prompts, found, strict=True):
        assert len({tuple(answer.token_ids) for answer in answers}) > 1
        for answer in answers:
            count = len(answer.token_ids)
            row = Row(prompt, list(answer.token_ids), [True] * count, 1.0, [0.0] * count)
            trainer = score(policy, pack([row], [0], max_tokens=LONGEST)[0], temperature=0.7, entropy=False)
            assert list(answer.logprobs) == pytest.approx(trainer.logprobs.tolist(), abs=1e-3)
    again = engine.generate(requests, Sampling(12, 0.7, frozenset([policy.tokenizer.eos_token_id])))
    assert [[a.token_ids for a in row] for row in again] == [[a.token_ids for a in row] for row in found]


def test_new_weights_arrive_and_old_ones_are_noticed(policy: Policy, engine: VLLMEngine) -> None:
    publisher = Publisher(policy, engine)
    for version in (1, 2):
        with torch.no_grad():
            for number, parameter in enumerate(policy.model.parameters()):
                generator = torch.Generator().manual_seed(100 * version + number)
                parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
        assert publisher.publish(version) < 1e-3
        (row,) = engine.generate([Request([5, 6], 1)], Sampling(4, 1.0, frozenset()))
        assert row[0].policy_version == version and publisher.decided == version
    with torch.no_grad():
        policy.model.lm_head.weight += 0.05
        policy.model.model.layers[0].mlp.up_proj.weight += 0.05
    engine.load_weights = lambda version: None  # type: ignore[method-assign]
    with pytest.raises(WeightSyncError, match="does not have the weights of version 3"):
        publisher.publish(3)


def test_a_run(model: str, tmp_path: Path) -> None:
    values = {
        "model.path": model, "model.dtype": "float32", "task.prompts": "builtin:vowels", "eval.num_prompts": 8,
        "engine.kind": "vllm", "engine.python": str(PYTHON), "rollout.prompts_per_iteration": 4,
        "rollout.group_size": 4, "rollout.max_tokens": 8, "optimizer.learning_rate": 1e-3, "run.iterations": 3,
        "run.directory": str(tmp_path), "run.name": "run",
    }  # fmt: skip
    result = train(Config().with_values(values))
    assert result.iterations == 3
    assert all(row["mismatch/mean_abs"] < 1e-3 for row in result.metrics)
    assert "vllm" in (tmp_path / "run" / "vllm.log").read_text().lower()


def test_a_killed_server_is_told_within_seconds_and_leaves_nothing(policy: Policy) -> None:
    config = EngineConfig(kind="vllm", python=str(PYTHON))
    engine = VLLMEngine(policy, config, longest=LONGEST, dtype=torch.float32)
    assert engine.server is not None
    os.killpg(engine.server.group, signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(EngineError, match="The vLLM server has ended"):
        engine.generate([Request([5, 6], 2)], Sampling(8, 1.0, frozenset()))
    assert time.monotonic() - start < 20
    engine.close()
    listed = subprocess.run(["ps", "-eo", "pgid"], capture_output=True, text=True, check=True).stdout.split()
    assert str(engine.server.group) not in listed


def test_the_command_and_its_record(model: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gspo", "train", "recipes/smollm2_addition_vllm.toml"]
    flags = {
        "model.path": model, "engine.python": str(PYTHON), "run.iterations": "1", "eval.every": "0",
        "rollout.prompts_per_iteration": "4", "rollout.max_tokens": "4", "task.prompts": "builtin:vowels",
        "run.directory": str(tmp_path), "run.name": "one",
    }  # fmt: skip
    words = [word for key, value in flags.items() for word in (f"--{key}", value)]
    done = subprocess.run([*command, *words], cwd=PYTHON.parents[2], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    (row,) = [json.loads(line) for line in (tmp_path / "one" / "metrics.jsonl").read_text().splitlines()]
    assert row["iteration"] == 1
