"""The installed command, from outside: exit codes and what a user reads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TINY = """
[model]
path = "builtin:tiny"
dtype = "float32"
[task]
prompts = "builtin:vowels"
[rollout]
max_tokens = 4
[eval]
every = 0
[run]
iterations = 1
"""


def gspo(folder: Path, *arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "gspo", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert "Traceback" not in done.stdout + done.stderr
    return done.returncode, done.stderr


MISTAKES = {
    "verb": (["trian", "tiny.toml"], "Did you mean 'train'?"),
    "no config": (["train"], "needs a config file first"),
    "missing config": (["train", "no.toml"], "no.toml does not exist"),
    "key": (["train", "misspelt.toml"], "Did you mean 'optimizer.learning_rate'?"),
    "flag": (["train", "tiny.toml", "--optimizer.learning_rte", "1"], "--optimizer.learning_rate"),
    "flag of sample": (["sample", "tiny.toml", "--promt", "x"], "--prompt"),
    "type": (["train", "tiny.toml", "--rollout.group_size", "many"], "--rollout.group_size"),
    "value": (["train", "tiny.toml", "--rollout.group_size", "1"], "gspo: command line: rollout.group_size must be"),
    "reward in a dry run": (["train", "tiny.toml", "--task.reward", "no.py:f", "--dry-run"], "no.py does not exist"),
    "prompts in a dry run": (["train", "tiny.toml", "--task.prompts", "no.jsonl", "--dry-run"], "does not exist"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes(tmp_path: Path, case: str) -> None:
    (tmp_path / "tiny.toml").write_text(TINY)
    (tmp_path / "misspelt.toml").write_text("[optimizer]\nlearning_rte = 1e-5\n")
    arguments, expected = MISTAKES[case]
    code, said = gspo(tmp_path, *arguments)
    assert code == 2
    assert expected in said
    assert not (tmp_path / "runs").exists()


def test_a_reward_that_raises_ends_the_run_with_a_sentence_and_a_log(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(TINY)
    (tmp_path / "r.py").write_text("def f(completions, **_):\n    raise KeyError('gold')\n")
    code, said = gspo(tmp_path, "train", "tiny.toml", "--task.reward", "r.py:f")
    assert code == 1
    assert said.startswith("gspo: The reward function f raised KeyError") and said.count("\n") == 1
    log = (tmp_path / "runs" / "tiny" / "log.txt").read_text()
    assert "in f\n" in log and "KeyError: 'gold'" in log  # the user's own line
