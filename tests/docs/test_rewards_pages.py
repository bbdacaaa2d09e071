"""docs/rewards.md, graders.md, coldstart.md, vllm.md and coming_from_trl.md: keys are real, examples run."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from gspo.config import Config, known_keys
from gspo.tasks import load_task
from gspo.tasks.builtin import BUILTIN
from gspo.tasks.functions import READY
from gspo.tasks.graders import GRADERS
from gspo.tasks.rewards import RewardSuite
from gspo.types import Prompt

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = {
    name: (DOCS / f"{name}.md").read_text() for name in ("rewards", "graders", "coldstart", "vllm", "coming_from_trl")
}
SECTIONS = "model|task|eval|rollout|engine|algorithm|optimizer|coldstart|batch|run"


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGES[page], re.DOTALL)


def run(text: str, **names: Any) -> dict[str, Any]:
    exec(text, names)
    return names


@pytest.mark.parametrize("page", PAGES)
def test_keys_are_real(page: str) -> None:
    for section, key in re.findall(rf"`({SECTIONS})\.(?!toml|json)([a-z_]+)(?=[`\s=])", PAGES[page]):
        assert f"{section}.{key}" in known_keys(), f"{section}.{key}"


@pytest.mark.parametrize(("page", "number"), [("rewards", 0), ("coldstart", 0), ("vllm", 0), ("vllm", 1)])
def test_settings_are_accepted(page: str, number: int) -> None:
    Config.from_toml(blocks(page, "toml")[number])


def test_every_ready_made_reward_is_named_and_only_those() -> None:
    table = PAGES["rewards"].partition("## Ready-made")[2].partition("```")[0]
    named = {
        name
        for row in table.splitlines()
        if row.startswith("| `")
        for name in re.findall(r"`(\w+)`", row.split("|")[1])
    }
    assert named == {*GRADERS, *READY}


@pytest.mark.parametrize(
    ("name", "said", "gold"),
    [
        ("math", r"so it is \boxed{1/2}", "0.5"),
        ("number", "She has 72 apples.", "72"),
        ("exact", "Paris", "Paris"),
        ("text", "PARIS.", "Paris"),
        ("choice", "The answer is (B)", "B"),
    ],
)
def test_the_examples_of_the_table(name: str, said: str, gold: str) -> None:
    if name == "math":
        pytest.importorskip("math_verify")
    suite = RewardSuite([name], [1.0])
    prompts = [Prompt("p", "?", {"answer": gold}), Prompt("q", "?", {"answer": "C" if name == "choice" else "7"})]
    right, wrong = (score.reward for score in suite.score(prompts, [said, said], [[1], [1]]))
    assert (right, wrong) == (1.0, 0.0)


def test_the_reward_example() -> None:
    correct = run(blocks("rewards", "python")[0])["correct"]
    assert correct(["it is 5", "6", "7"], ["5", "5", None]) == [1.0, 0.0, None]


def test_the_tasks_of_the_cold_start_page_are_there() -> None:
    named = re.findall(r"`(insertion_sort|fibonacci\w*)`", PAGES["coldstart"])
    assert len(named) == 3 and set(named) <= set(BUILTIN)
    task = load_task(Config.from_toml(blocks("coldstart", "toml")[0]).with_values({"eval.num_prompts": 2}))
    assert task.train.take(1)[0].columns["solution"]


def test_the_example_of_the_trl_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = blocks("coming_from_trl", "python")[0]
    small = '"run.iterations": 1, "eval.num_prompts": 4, "rollout.prompts_per_iteration": 4, '
    done = run(text.replace('{"rollout.max_tokens": 32', "{" + small + '"rollout.max_tokens": 8'), MODEL="builtin:tiny")
    assert done["result"].iterations == 1 and (tmp_path / "my-model" / "config.json").exists()


def test_every_setting_of_grpoconfig_is_in_the_table() -> None:
    trl, transformers = pytest.importorskip("trl"), pytest.importorskip("transformers")
    theirs = {f.name for f in fields(trl.GRPOConfig)} - {f.name for f in fields(transformers.TrainingArguments)}
    table = PAGES["coming_from_trl"].partition("## GRPOConfig")[2]
    named = {
        name
        for row in table.splitlines()
        if row.startswith("| `")
        for name in re.findall(r"`(\w+)`", row.split("|")[1])
    }
    assert named == theirs
