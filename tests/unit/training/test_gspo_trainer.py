"""Runs from Python objects: the same run as from a config, in scripts, notebooks and from stdin."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from gspo import Callback, Config, GSPOTrainer, train
from gspo.errors import ConfigError, DataError, Interrupted, RewardError
from gspo.policy.tiny import build
from gspo.training.loop import RunResult
from tests.light_rewards import vowels

ROWS = [{"prompt": f"say {number}", "answer": str(number)} for number in range(30)]
SMALL = {
    "model.dtype": "float32", "task.max_prompt_tokens": 64, "rollout.prompts_per_iteration": 2,
    "rollout.group_size": 4, "rollout.max_tokens": 6, "algorithm.updates_per_rollout": 2, "eval.num_prompts": 2,
    "optimizer.learning_rate": 1e-2, "run.iterations": 2,
}  # fmt: skip
SOURCE = (
    "def vowels(completions, answer, **_):\n    return [sum(map(text.count, 'aeiou')) / 6 for text in completions]\n"
)


def small(folder: Path, **more: Any) -> dict[str, Any]:
    return SMALL | {"run.directory": str(folder)} | {key.replace("__", "."): value for key, value in more.items()}


def untimed(result: RunResult) -> list[dict[str, Any]]:
    timed = ("time/", "throughput/", "memory/")
    return [{key: value for key, value in line.items() if not key.startswith(timed)} for line in result.metrics]


def test_it_is_the_run_of_the_same_config(tmp_path: Path) -> None:
    """Rows and a function from Python, a closure, and all from files: one run."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "rewards.py").write_text(SOURCE)
    files = {"model.path": "builtin:tiny", "task.prompts": str(tmp_path / "rows.jsonl")}
    reward = f"{tmp_path / 'rewards.py'}:vowels"
    expected = train(Config().with_values(small(tmp_path) | files | {"task.reward": (reward,)}))

    here = vowels

    def closure(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        return here(completions, answer)

    closure.__name__ = "vowels"
    found = [
        GSPOTrainer("builtin:tiny", ROWS, vowels, small(tmp_path)).train(),
        GSPOTrainer("builtin:tiny", (row for row in ROWS), [closure], Config().with_values(small(tmp_path))).train(),
        GSPOTrainer("builtin:tiny", str(tmp_path / "rows.jsonl"), reward, small(tmp_path)).train(),
    ]
    assert expected.metrics[-1]["reward/vowels"] > 0 and len(expected.metrics) == 2
    for result in found:
        assert untimed(result) == untimed(expected)
    stored = Config.load(found[1].directory / "config.toml")
    assert stored.task.prompts == "python:rows" and stored.task.reward == ("python:vowels",)
    with pytest.raises(ConfigError, match=r"given to GSPOTrainer from Python"):
        train(stored)
    assert Config.load(found[0].directory / "config.toml").task.reward == ("tests.light_rewards:vowels",)


def test_a_config_file_and_a_dataset(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    Config().with_values(small(tmp_path, run__iterations=1)).save(tmp_path / "mine.toml")
    trainer = GSPOTrainer("builtin:tiny", datasets.Dataset.from_list(ROWS), vowels, tmp_path / "mine.toml", ROWS[:3])
    assert [prompt.content for prompt in trainer.system.task.heldout] == ["say 0", "say 1"]  # eval.num_prompts = 2
    assert trainer.train().directory == tmp_path / "mine"


def test_a_loaded_model_is_trained_in_place_and_saved(tmp_path: Path) -> None:
    model, tokenizer = build()
    model.half()
    before = {name: tensor.float().clone() for name, tensor in model.state_dict().items()}
    trainer = GSPOTrainer(model, ROWS, vowels, small(tmp_path), tokenizer=tokenizer)
    assert trainer.model is model
    trainer.save_model(tmp_path / "untrained")
    first = trainer.evaluate()
    result = trainer.train()
    assert trainer.directory == result.directory
    assert result.first_eval is not None and result.first_eval["accuracy"] == first["accuracy"]
    trainer.save_model(tmp_path / "trained")
    for folder, weights in (("untrained", before), ("trained", model.state_dict())):
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / folder, dtype=torch.float32).state_dict()
        assert all(torch.equal(saved[name], weights[name]) for name in saved), folder
    assert not all(torch.equal(before[name], model.state_dict()[name]) for name in before)
    assert trainer.evaluate()["iteration"] == 2
    with pytest.raises(ConfigError, match=r"exists already"):
        trainer.save_model(tmp_path / "trained")


def test_evaluation_leaves_no_trace(tmp_path: Path) -> None:
    trainer = GSPOTrainer("builtin:tiny", ROWS, vowels, small(tmp_path, eval__temperature=1.0))
    weights = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    place, random_state = trainer.system.task.train.state_dict(), torch.get_rng_state()
    first, second = trainer.evaluate(), trainer.evaluate()
    assert {**first, "seconds": 0} == {**second, "seconds": 0} and not list(tmp_path.iterdir())
    assert place == trainer.system.task.train.state_dict() and torch.equal(random_state, torch.get_rng_state())
    assert all(torch.equal(weights[name], tensor) for name, tensor in trainer.model.state_dict().items())


class Stop(Callback):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_iteration(self, metrics: Mapping[str, Any], groups: Any) -> None:
        self.seen.append(f"iteration {metrics['iteration']}")
        if metrics["iteration"] == 1 and len(self.seen) == 1:
            os.kill(os.getpid(), 15)

    def on_end(self, reason: str) -> None:
        self.seen.append(reason)


def test_stopped_and_gone_on_with(tmp_path: Path) -> None:
    straight = GSPOTrainer("builtin:tiny", ROWS, vowels, small(tmp_path)).train()
    watch = Stop()
    trainer = GSPOTrainer("builtin:tiny", ROWS, vowels, small(tmp_path), callbacks=[watch])
    with pytest.raises(Interrupted):
        trainer.train()
    with pytest.raises(ConfigError, match=r"has trained already .*resume=True"):
        trainer.train()
    result = trainer.train(resume=True)
    assert untimed(result) == untimed(straight) and result.directory == trainer.directory
    assert watch.seen == ["iteration 1", "interrupted", "iteration 2", "finished"]
    another = GSPOTrainer("builtin:tiny", ROWS, vowels, small(tmp_path, run__iterations=3))
    assert len(another.train(resume=str(result.directory)).metrics) == 3


def test_inside_a_running_loop(tmp_path: Path) -> None:
    """As in a notebook; the reward is async too."""

    async def later(completions: list[str], **_: Any) -> list[float]:
        await asyncio.sleep(0.001)
        return [float(len(text)) for text in completions]

    async def cell() -> RunResult:
        return GSPOTrainer("builtin:tiny", ROWS, later, small(tmp_path, run__iterations=1)).train()

    assert asyncio.run(cell()).metrics[0]["reward/later"] > 0


def test_from_stdin(tmp_path: Path) -> None:
    """No file that could be imported again: the function of the script runs in its process, and the run says so."""
    code = f"""
from gspo import GSPOTrainer, PlainView
def vowels(completions, **_):
    return [sum(map(text.count, "aeiou")) / 6 for text in completions]
rows = [{{"prompt": f"say {{number}}"}} for number in range(30)]
print(len(GSPOTrainer("builtin:tiny", rows, vowels, {small(tmp_path)!r}, callbacks=[PlainView()]).train().metrics))
"""
    done = subprocess.run([sys.executable], input=code, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("2\n") and "vowels cannot be imported by another process" in done.stdout
    assert done.stderr == ""


def test_mistakes_are_sentences(tmp_path: Path) -> None:
    model, tokenizer = build()
    cases: list[tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
        ((None, ROWS, vowels), {}, ConfigError, "found a NoneType"),
        ((model, ROWS, vowels), {}, ConfigError, "tokenizer=tokenizer"),
        (("builtin:tiny", ROWS), {}, ConfigError, "without a way to score"),
        (("builtin:tiny", ROWS, [3]), {}, ConfigError, "found a int"),
        (("builtin:tiny", ROWS, model), {}, ConfigError, "holds a model"),
        (("builtin:tiny", ROWS, vowels, {"rollout.max_token": 3}), {}, ConfigError, "rollout.max_tokens"),
        (("builtin:tiny", ROWS, vowels, 3), {}, ConfigError, "found a int"),
        (("builtin:tiny", ROWS, vowels, {"task.reward_weights": [1.0, 2.0]}), {}, ConfigError, "2 values for 1"),
        (("builtin:tiny", [{"question": "a"}], vowels), {}, DataError, "rows, row 1"),
        (("builtin:tiny", [], vowels), {}, DataError, "no rows"),
        (("builtin:tiny", 3, vowels), {}, DataError, "found a int"),
        (("builtin:tiny", ROWS, vowels), {"callbacks": [object()]}, ConfigError, "has no on_start"),
    ]
    for arguments, keywords, kind, part in cases:
        with pytest.raises(kind) as error:
            GSPOTrainer(*arguments, **keywords)
        assert part in str(error.value)
    trainer = GSPOTrainer(model, ROWS, lambda prompts: [1.0], small(tmp_path), tokenizer=tokenizer)
    with pytest.raises(RewardError, match=r"returned 1 scores for 2 completions"):
        trainer.evaluate()


def test_importing_gspo_stays_light() -> None:
    code = (
        "import sys, gspo; dir(gspo); from gspo import Config; "
        "print([m for m in ('torch', 'transformers', 'rich', 'pydantic') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
