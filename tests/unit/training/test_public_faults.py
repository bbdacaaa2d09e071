"""Faults that users of other trainers reported in public, on small runs: the right value of each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gspo.config import Config
from gspo.errors import CheckpointError, ConfigError
from gspo.tasks.rewards import RewardSuite
from gspo.training.loop import train
from gspo.types import Prompt

SMALL: dict[str, Any] = {
    "model.path": "builtin:tiny", "model.dtype": "float32", "task.prompts": "builtin:vowels", "eval.every": 0,
    "rollout.prompts_per_iteration": 2, "rollout.group_size": 4, "rollout.max_tokens": 6,
    "algorithm.updates_per_rollout": 2, "optimizer.learning_rate": 1e-3, "run.checkpoint_every": 1, "run.name": "a",
}  # fmt: skip


def config(folder: Path, iterations: int) -> Config:
    return Config().with_values({**SMALL, "run.directory": str(folder), "run.iterations": iterations})


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_checkpoints_that_are_all_damaged_are_not_a_fresh_start(tmp_path: Path) -> None:
    """verl#7952: a resume that finds nothing usable quietly began at zero."""
    train(config(tmp_path, 1))
    for manifest in (tmp_path / "a" / "checkpoints").glob("*/manifest.json"):
        manifest.write_text("{")
    with pytest.raises(CheckpointError, match="has no checkpoint to go on from"):
        train(config(tmp_path, 2), resume="auto")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_more_iterations_after_the_last_are_exactly_those(tmp_path: Path) -> None:
    """NeMo-RL#3429: resumed at the last step and with a later one; the end is that of a run that never stopped."""
    train(config(tmp_path / "straight", 3))
    train(config(tmp_path / "parts", 2))
    assert train(config(tmp_path / "parts", 2), resume="auto").iterations == 2
    assert train(config(tmp_path / "parts", 3), resume="auto").iterations == 3
    straight, parts = (tmp_path / name / "a" for name in ("straight", "parts"))
    assert [row["iteration"] for row in lines(parts / "metrics.jsonl")] == [1, 2, 3]
    weights = "checkpoints/3/model.safetensors"
    assert (parts / weights).read_bytes() == (straight / weights).read_bytes()


def test_the_reward_that_is_logged_is_the_one_that_is_optimised(tmp_path: Path) -> None:
    """trl#5352: functions that give 1 and 0, weighted 0.7 and 0.3, are a reward of 0.7."""

    def one(completions: list[str], **_: Any) -> list[float]:
        return [1.0] * len(completions)

    def zero(completions: list[str], **_: Any) -> list[float]:
        return [0.0] * len(completions)

    scores = RewardSuite([one, zero], [0.7, 0.3]).score([Prompt("p", "?", {})] * 2, ["a", "b"], [[1], [1]])
    assert [score.reward for score in scores] == [0.7, 0.7]
    (tmp_path / "r.py").write_text(
        "def one(completions, **_):\n    return [1.0] * len(completions)\n"
        "def zero(completions, **_):\n    return [0.0] * len(completions)\n"
    )
    functions = (f"{tmp_path}/r.py:one", f"{tmp_path}/r.py:zero")
    given = config(tmp_path, 1).with_values({"task.reward": functions, "task.reward_weights": (0.7, 0.3)})
    assert train(given).metrics[0]["reward/mean"] == pytest.approx(0.7)


@pytest.mark.parametrize("text", ['"1e-6x"', '"no"', "[1e-6]", "true"])
def test_a_number_is_a_number(text: str) -> None:
    """trl#1450: 1e-6 read as text."""
    assert Config.from_toml("[optimizer]\nlearning_rate = 1e-6").optimizer.learning_rate == 1e-6
    with pytest.raises(ConfigError, match=r"optimizer\.learning_rate"):
        Config.from_toml(f"[optimizer]\nlearning_rate = {text}")
