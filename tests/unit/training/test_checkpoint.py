"""Checkpoints: what comes back is what was saved, and a folder under its own name is whole."""

from __future__ import annotations

import json
import os
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from gspo.config import Config, ModelConfig, OptimizerConfig
from gspo.errors import CheckpointError, ConfigError
from gspo.metrics import Means
from gspo.packing import pack_step
from gspo.policy.load import Policy, load_policy
from gspo.records import RunDirectory
from gspo.rollout.collect import Collected
from gspo.training import checkpoint
from gspo.training.checkpoint import (
    Place,
    RunState,
    damage,
    newest_whole,
    prune,
    read_state,
    save_checkpoint,
    saved,
    write_whole,
)
from gspo.training.export import export
from gspo.training.iteration import Iteration
from gspo.training.optimizer import MasterOptimizer
from gspo.training.resume import random_states, restore_random_states
from gspo.training.trainer import OldScore, RowResult, Trainer
from gspo.types import Group, Prompt, Rollout, Routing
from tests.helpers import random_rows


def trained(policy: Policy, dtype: torch.dtype, updates: int = 3) -> Trainer:
    policy.cast(dtype)
    trainer = Trainer(policy, Config().with_values({"optimizer.learning_rate": 1e-2}))
    for seed in range(updates):
        trainer.forward_backward(pack_step(random_rows([[5, 3], [4]], seed=seed), max_tokens=512), Means())
        trainer.optim_step()
    return trainer


def an_iteration() -> Iteration:
    rollout = Rollout(
        "p", 0, [1, 2], [3], [True], [float("nan")], 1.0, 4, "stop", "x", reward=None, reward_terms={"a": None}
    )
    experts = Routing(np.array([[[0, 3]], [[1, 2]]], dtype=np.uint8), np.array([[[1, 2]]], dtype=np.uint8))
    rollout.routing = experts
    group = Group(Prompt("p", [{"role": "user", "content": "hi"}], {"answer": {"n": 1}}), [rollout])
    found = Iteration(3, Collected([group], 0, 1.5, 0.25), old={0: OldScore([-0.1], experts)}, updates_done=1)
    found.results[0] = RowResult(1.0, 0.0, [-0.1], [-0.2])
    found.means.add("policy/entropy", 0.5, 3)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_and_moments_come_back_bit_for_bit(tiny_policy: Policy, tmp_path: Path, dtype: torch.dtype) -> None:
    """Also where the model computes in bfloat16: what is kept are the float32 weights, not the rounded ones."""
    trainer = trained(tiny_policy, dtype)
    save_checkpoint(
        tmp_path, Place(1), tiny_policy, trainer.optimizer, RunState(1, 3, {}, "f"), Config().to_toml(), None
    )
    policy = load_policy(ModelConfig(path="builtin:tiny"))
    policy.cast(dtype)
    fresh = Trainer(policy, Config().with_values({"optimizer.learning_rate": 1e-2}))
    weights = load_policy(ModelConfig(path=str(tmp_path / "1"))).model.named_parameters()
    fresh.optimizer.load_weights(dict(weights))
    checkpoint.load_moments(tmp_path / "1", fresh.optimizer)
    fresh.optimizer.updates = 3
    for ours, theirs in zip(trainer.optimizer.master, fresh.optimizer.master, strict=True):
        assert torch.equal(ours, theirs)
    step = pack_step(random_rows([[6, 2]], seed=9), max_tokens=512)
    for one in (trainer, fresh):
        one.forward_backward(step, Means())
        one.optim_step()
    for ours, theirs in zip(trainer.optimizer.master, fresh.optimizer.master, strict=True):
        assert torch.equal(ours, theirs), "the next update differs"
    for ours, theirs in zip(tiny_policy.model.parameters(), policy.model.parameters(), strict=True):
        assert torch.equal(ours, theirs) and ours.dtype == dtype


def test_an_iteration_under_way_comes_back(tiny_policy: Policy, tmp_path: Path) -> None:
    trainer = trained(tiny_policy, torch.float32, 1)
    state = RunState(2, 9, {"epoch": 1, "position": 7}, "f", 0.01, 2, random_states())
    save_checkpoint(tmp_path, Place(2, 1), tiny_policy, trainer.optimizer, state, Config().to_toml(), an_iteration())
    found_state, found = read_state(tmp_path / "2+1")
    assert found is not None and found_state == state
    before, after = (json.dumps(asdict(one), default=lambda array: array.tolist()) for one in (an_iteration(), found))
    assert before == after  # as text, since NaN is not equal to itself
    (rollout,) = found.collected.rollouts
    assert rollout.routing is not None and rollout.routing.prompt.dtype == np.uint8
    assert isinstance(found.collected.groups[0].prompt, Prompt) and list(found.results) == [0]


def test_places_are_in_order_of_time() -> None:
    names = ["10", "2+3", "2", "2+0", "0", "9"]
    places = sorted(place for place in map(Place.parse, names) if place is not None)
    assert [place.name for place in places] == ["0", "2", "2+0", "2+3", "9", "10"]
    for name in ("3.partial", "3.damaged", "latest", "", "+1", "1+"):
        assert Place.parse(name) is None


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("model.safetensors", lambda data: data[:-1], "is damaged"),
        ("state.json", lambda data: data.replace(b"0", b"1", 1), "is damaged"),
        ("manifest.json", lambda data: data[:10], "cannot be read"),
    ],
)
def test_damage_is_found(tiny_policy: Policy, tmp_path: Path, name: str, change: Any, said: str) -> None:
    optimizer = MasterOptimizer(tiny_policy.model, OptimizerConfig(), 1)
    for iteration in (1, 2):
        save_checkpoint(tmp_path, Place(iteration), tiny_policy, optimizer, RunState(0, 0, {}, "f"), "", None)
    assert damage(tmp_path / "2") is None and newest_whole(tmp_path) == (Place(2), [])
    path = tmp_path / "2" / name
    path.write_bytes(change(path.read_bytes()))
    assert said in (damage(tmp_path / "2") or "")
    place, skipped = newest_whole(tmp_path)
    assert place == Place(1) and len(skipped) == 1 and "checkpoint 2 left out" in skipped[0]


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    def good(folder: Path) -> None:
        (folder / "x").write_text("good")

    def bad(folder: Path) -> None:
        (folder / "x").write_text("half")
        raise OSError(28, "No space left on device")

    write_whole(tmp_path / "1", good, 0)
    with pytest.raises(CheckpointError, match=r"No space left on device\. Earlier checkpoints are untouched"):
        write_whole(tmp_path / "1", bad, 0)
    assert (tmp_path / "1" / "x").read_text() == "good" and damage(tmp_path / "1") is None
    with pytest.raises(CheckpointError, match="MB free"):
        write_whole(tmp_path / "2", good, 1 << 60)
    assert os.listdir(tmp_path) == ["1"]


def test_prune_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    for name in ("0", "5", "10", "15", "15+2", "7.partial"):
        (tmp_path / name).mkdir()
    assert prune(tmp_path, keep=2, best=5) == []
    assert [place.name for place in saved(tmp_path)] == ["5", "15", "15+2"]


def test_global_generators_go_on_where_they_were() -> None:
    for draw in (random.random, np.random.standard_normal, lambda: float(torch.rand(()))):
        draw()
    states = json.loads(json.dumps(random_states()))
    first = [random.gauss(0, 1), float(np.random.standard_normal()), float(torch.rand(()))]
    restore_random_states(states)
    assert first == [random.gauss(0, 1), float(np.random.standard_normal()), float(torch.rand(()))]


def test_a_record_cut_by_a_kill_is_mended(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "r")
    for iteration in (1, 2, 3):
        run.append_metrics({"iteration": iteration})
        run.write_rollouts(iteration, [{"text": "x"}])
    path = run.path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"iteration": 4, "rew')
    run.cut_after(2)
    assert run.metrics() == [{"iteration": 1}, {"iteration": 2}]
    assert sorted(os.listdir(run.path / "rollouts")) == ["1.jsonl", "2.jsonl"]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_export_gives_bit_equal_logits(tiny_policy: Policy, tmp_path: Path, tied: bool, dtype: str) -> None:
    """Through AutoModelForCausalLM, in the precision the policy computes in."""
    config = LlamaConfig(**tiny_policy.model.config.to_dict() | {"tie_word_embeddings": tied})
    torch.manual_seed(3)
    policy = Policy(LlamaForCausalLM(config).eval(), tiny_policy.tokenizer, "x", torch.float32)
    trainer = trained(policy, getattr(torch, dtype))
    run = RunDirectory.create(tmp_path, "r")
    save_checkpoint(run.checkpoints, Place(1), policy, trainer.optimizer, RunState(1, 3, {}, "f"), "", None)
    assert export(run.path, tmp_path / "out", dtype=dtype) == "1"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").eval()
    assert model.dtype == getattr(torch, dtype)
    ids = torch.tensor([[5, 9, 20, 33, 41]])
    with torch.no_grad():
        assert torch.equal(model(ids).logits, policy.model(ids).logits)
    heads = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert heads == tied
    names = set(os.listdir(tmp_path / "out"))
    assert not names & set(checkpoint.OWN_FILES) and {"model.safetensors", "tokenizer.json"} <= names


def test_the_best_is_one_that_was_trained(tiny_policy: Policy, tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "r")
    optimizer = trained(tiny_policy, torch.float32).optimizer
    for iteration, accuracy in ((0, 0.5), (2, 0.25), (4, 0.5), (6, 0.25)):
        save_checkpoint(run.checkpoints, Place(iteration), tiny_policy, optimizer, RunState(1, 3, {}, "f"), "", None)
        run.append_eval({"iteration": iteration, "accuracy": accuracy}, [])
        if iteration == 0:
            assert export(run.path, tmp_path / "start", "best") == "0"
    assert export(run.path, tmp_path / "best", "best") == "4"


def test_export_says_what_is_wrong(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "r")
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        export(run.path, tmp_path / "out")
    with pytest.raises(CheckpointError, match="has no checkpoint '9'; it has: none"):
        export(run.path, tmp_path / "out", "9")
    with pytest.raises(CheckpointError, match=r"No checkpoint of .* was evaluated"):
        export(run.path, tmp_path / "out", "best")
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match="exists already"):
        export(run.path, tmp_path / "out")
