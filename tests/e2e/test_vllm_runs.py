"""Whole runs over a server that is a stand-in for vLLM: it dies, is restarted, is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.unit.engines.fake_vllm import all_gone, stand_in

RECIPE = str(Path(__file__).resolve().parents[2] / "recipes" / "tiny.toml")
SLOW_MACHINE = 200


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(python: str, folder: Path, *flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gspo", "train", RECIPE, "--run.directory", str(folder), "--engine.kind", "vllm"]
    command += ["--engine.python", python, "--run.iterations", "3", *flags]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=SLOW_MACHINE,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
    )


def same_rollouts(first: Path, second: Path) -> None:
    for number in (1, 2, 3):
        ours, theirs = (lines(run / "tiny" / "rollouts" / f"{number}.jsonl") for run in (first, second))
        assert [row["token_ids"] for row in ours] == [row["token_ids"] for row in theirs]
    assert [row["iteration"] for row in lines(second / "tiny" / "metrics.jsonl")] == [1, 2, 3]


def test_a_run_whose_server_dies_twice_loses_and_repeats_nothing(tmp_path: Path) -> None:
    """Once the run is ended, saved and resumed; then the server is started again, in the middle of an iteration."""
    python, whole, broken = stand_in(tmp_path), tmp_path / "whole", tmp_path / "broken"
    straight = run(python, whole)
    assert straight.returncode == 0, straight.stderr
    died = run(python, broken, FAKE_DIE="45", FAKE_CHILD=str(tmp_path / "pids"))
    assert died.returncode == 1 and "Traceback" not in died.stderr
    assert "The vLLM server has ended (exit code 7)" in died.stderr and "out of cheese" in died.stderr
    assert all_gone([int(word) for word in (tmp_path / "pids").read_text().split()], 2)
    assert "out of cheese" in (broken / "tiny" / "vllm.log").read_text()
    once = {"FAKE_DIE": "4", "FAKE_ONCE": str(tmp_path / "died")}
    again = run(python, broken, "--resume", "tiny", "--engine.on_death", "restart", **once)
    assert again.returncode == 0, again.stderr
    assert "Starting it again (1 of at most 5)" in again.stderr and (tmp_path / "died").exists()
    same_rollouts(whole, broken)


def test_ctrl_c_while_sampling_stops_and_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gspo", "train", RECIPE, "--run.directory", str(tmp_path), "--engine.kind", "vllm"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "FAKE_SLOW": "3", "FAKE_CHILD": str(tmp_path / "pids")}
    process = subprocess.Popen(
        [*command, "--engine.python", stand_in(tmp_path)],
        env=environment,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )
    while not (tmp_path / "tiny" / "log.txt").exists() and process.poll() is None:
        time.sleep(0.1)
    time.sleep(1.5)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=40)
    assert process.returncode == 130, said.decode()
    assert all_gone([int(word) for word in (tmp_path / "pids").read_text().split()], 1)
