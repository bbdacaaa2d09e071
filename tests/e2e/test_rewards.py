"""Whole runs with reward functions that hang, fail or draw random numbers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

RECIPE = str(Path(__file__).resolve().parents[2] / "recipes" / "tiny.toml")
SOURCE = """
import os, random
calls = 0

def hangs(completions, **_):
    global calls
    calls += 1
    with open(os.environ["GSPO_TEST_PIDS"], "a") as file:
        file.write(f"{os.getpid()} {os.getppid()} ")
    while calls == 3:  # the first evaluation and one iteration go well
        pass
    return [float(len(text)) for text in completions]

def fails(completions, **_):
    return [1 / (text.count("a") != 1) for text in completions]

def draws(completions, **_):
    return [random.random() for text in completions]
"""


def arguments(folder: Path, reward: str, *more: str) -> list[str]:
    (folder / "rewards.py").write_text(SOURCE)
    flags = ["--task.reward", f"{folder}/rewards.py:{reward}", "--run.directory", str(folder), *more]
    return [sys.executable, "-m", "gspo", "train", RECIPE, *flags]


def gspo(folder: Path, reward: str, *more: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GSPO_TEST_PIDS": str(folder / "pids")}
    return subprocess.run(
        arguments(folder, reward, *more), capture_output=True, text=True, env=environment, timeout=240
    )


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_reward_that_hangs_ends_the_run_with_a_sentence_and_the_run_goes_on_when_it_is_mended(tmp_path: Path) -> None:
    done = gspo(tmp_path, "hangs", "--task.reward_timeout", "1")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "gspo: The reward function hangs took longer than 1 s (task.reward_timeout) while scoring" in done.stderr
    assert "go on with: gspo train --resume" in done.stdout
    assert all(map(gone, map(int, (tmp_path / "pids").read_text().split())))
    assert len(lines(tmp_path / "tiny" / "metrics.jsonl")) == 1
    again = gspo(tmp_path, "hangs", "--resume", "auto", "--task.reward_timeout", "2", "--run.iterations", "2")
    assert again.returncode == 0, again.stderr
    assert len(lines(tmp_path / "tiny" / "metrics.jsonl")) == 2


def test_failures_that_are_to_be_left_out_are_counted_and_recorded(tmp_path: Path) -> None:
    done = gspo(tmp_path, "fails", "--task.on_reward_error", "unscored", "--run.iterations", "2")
    assert done.returncode == 0, done.stderr
    metrics, log = lines(tmp_path / "tiny" / "metrics.jsonl"), (tmp_path / "tiny" / "log.txt").read_text()
    assert log.count("Traceback") == 1 and done.stdout.count("raised ZeroDivisionError: division by zero") == 1
    for number, line in enumerate(metrics, 1):
        rows = lines(tmp_path / "tiny" / "rollouts" / f"{number}.jsonl")
        failed = [row for row in rows if row["text"].count("a") == 1]
        assert failed and line["reward/errors"] == line["reward/unscored"] == len(failed)
        assert line["reward/mean"] == 1.0
        for row in failed:
            assert row["reward"] is None and row["advantage"] == 0.0 and row["error"].startswith("fails raised Zero")


def test_random_rewards_are_the_same_after_a_kill(tmp_path: Path) -> None:
    """A worker's draws depend on the answers, so a process that is new after a resume draws the same."""
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    for folder in (straight, killed):
        folder.mkdir()
    assert gspo(straight, "draws", "--run.iterations", "4").returncode == 0
    command = arguments(killed, "draws", "--run.iterations", "4")
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"}) as process:
        deadline = time.monotonic() + 120
        metrics = killed / "tiny" / "metrics.jsonl"
        while not (metrics.exists() and len(metrics.read_text().splitlines()) >= 2):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
    assert gspo(killed, "draws", "--run.iterations", "4", "--resume", "auto").returncode == 0
    for number in range(1, 5):
        ours, theirs = (lines(folder / "tiny" / "rollouts" / f"{number}.jsonl") for folder in (straight, killed))
        assert ours == theirs and len({row["reward"] for row in ours}) > 30
    weights = [load_file(folder / "tiny" / "checkpoints" / "4" / "model.safetensors") for folder in (straight, killed)]
    assert all(bool((weights[0][name] == weights[1][name]).all()) for name in weights[0])


@pytest.mark.parametrize("timeout", ["0", "600"])
def test_a_stop_signal_does_not_wait_for_a_reward_that_hangs(tmp_path: Path, timeout: str) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GSPO_TEST_PIDS": str(tmp_path / "pids")}
    command = arguments(tmp_path, "hangs", "--task.reward_timeout", timeout)
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        deadline = time.monotonic() + 120
        while not (tmp_path / "pids").exists() or len((tmp_path / "pids").read_text().split()) < 6:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=30)
    assert process.returncode == 130 and "Interrupted; everything up to here is saved" in said
    assert all(map(gone, map(int, (tmp_path / "pids").read_text().split())))
