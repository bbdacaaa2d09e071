"""Recipes with prompts of their own run from the command line on the tiny model, with flags for nothing but size."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from gspo.config import Config
from tests.e2e.test_train import gspo, lines

ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    "--model.path", "builtin:tiny", "--task.max_prompt_tokens", "400", "--eval.num_prompts", "8",
    "--rollout.prompts_per_iteration", "4", "--rollout.group_size", "4", "--rollout.max_tokens", "8",
    "--run.iterations", "2",
]  # fmt: skip


NEEDS = {"reasoning_gym": ["reasoning_gym"], "word_problems": ["math_verify"]}


@pytest.mark.parametrize("recipe", NEEDS)
def test_a_recipe_runs(tmp_path: Path, recipe: str) -> None:
    for module in NEEDS[recipe]:
        pytest.importorskip(module)
    ran = gspo("train", f"recipes/{recipe}.toml", *SMALL, "--run.directory", str(tmp_path), cwd=ROOT)
    assert ran.returncode == 0, ran.stderr
    run = tmp_path / recipe
    assert [row["iteration"] for row in lines(run / "metrics.jsonl")] == [1, 2]
    assert [row["num_prompts"] for row in lines(run / "eval.jsonl")] == [8, 8]
    asked = {row["prompt_id"] for file in (run / "rollouts").iterdir() for row in lines(file)}
    assert len(asked) == 8


def test_the_word_problems_are_what_their_script_makes() -> None:
    spec = importlib.util.spec_from_file_location("make_word_problems", ROOT / "recipes" / "make_word_problems.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    rows = [json.loads(line) for line in (ROOT / "recipes" / "word_problems.jsonl").read_text().splitlines()]
    assert rows == list(script.problems(600))
    assert len({row["prompt"] for row in rows}) == 600 and all(int(row["answer"]) >= 0 for row in rows)
    assert Config.load(ROOT / "recipes" / "word_problems.toml").task.reward == ("math",)
