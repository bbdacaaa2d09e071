"""The smoke recipe from the command line, in a process of its own: what a run leaves, and that it can be rerun."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

RECIPE = str(Path(__file__).resolve().parents[2] / "recipes" / "tiny.toml")
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
PINNED_METRICS = [
    "iteration",
    "policy_version",
    "reward/mean",
    "reward/std",
    "reward/correct",
    "group/no_signal_fraction",
    "rollout/completion_tokens",
    "rollout/length_mean",
    "rollout/truncated_fraction",
    "objective/loss",
    "objective/ratio_mean",
    "objective/ratio_std",
    "objective/clip_fraction",
    "objective/clip_fraction_tokens",
    "objective/clip_fraction_high",
    "objective/clip_fraction_low",
    "policy/entropy",
    "policy/kl_old",
    "optimizer/grad_norm",
    "optimizer/learning_rate",
    "mismatch/mean_abs",
    "mismatch/sequence_p99",
    "time/rollout_seconds",
    "time/reward_seconds",
    "time/old_logprobs_seconds",
    "time/update_seconds",
    "time/publish_seconds",
    "throughput/rollout_tokens_per_second",
    "throughput/update_tokens_per_second",
    "memory/peak_bytes",
]


def gspo(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gspo", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=180, **options)  # type: ignore[call-overload,no-any-return]


def lines(path: Path) -> list[dict[str, object]]:
    def refuse(name: str) -> None:
        raise AssertionError(f"{path} holds {name}, which is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    done = gspo("train", RECIPE, "--run.directory", str(folder))
    assert done.returncode == 0, done.stderr
    assert "held-out accuracy" in done.stdout and str(folder / "tiny") in done.stdout
    assert "Traceback" not in done.stderr
    return folder / "tiny"


def test_metrics(run: Path) -> None:
    rows = lines(run / "metrics.jsonl")
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["policy_version"] for row in rows] == [4, 8, 12, 16, 20, 24]
    for row in rows:
        assert not set(PINNED_METRICS) - set(row)
        assert row["rollout/completion_tokens"] > 0
        assert row["mismatch/mean_abs"] < 1e-4, "engine and trainer disagree in float32"
    assert rows[-1]["reward/mean"] > rows[0]["reward/mean"], "nothing was learned"


def test_rollout_records_explain_themselves(run: Path) -> None:
    """Ratio and clip state follow from the recorded log-probs and advantage; advantages from the rewards."""
    for iteration in (1, 6):
        rows = lines(run / "rollouts" / f"{iteration}.jsonl")
        assert len(rows) == 64
        for start in range(0, 64, 8):
            group = rows[start : start + 8]
            assert len({row["prompt_id"] for row in group}) == 1
            rewards = torch.tensor([row["reward"] for row in group], dtype=torch.float64)
            if rewards.max() - rewards.min() > 1e-8:
                expected = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
                assert [row["advantage"] for row in group] == pytest.approx(expected.tolist(), abs=1e-5)
        for row in rows:
            assert len(row["token_ids"]) == len(row["rollout_logprobs"]) == len(row["completion_mask"])
            assert row["reward"] == pytest.approx(
                0.2 * row["reward_terms"]["correct"] + 0.8 * row["reward_terms"]["share"]
            )
            if row["advantage"] == 0:
                assert row["ratio"] is None
                continue
            gap = [new - old for new, old in zip(row["logprobs"], row["old_logprobs"], strict=True)]
            ratio = math.exp(sum(gap) / len(gap))
            assert row["ratio"] == pytest.approx(ratio, abs=1e-5)
            outside = ratio > 1 + 4e-4 if row["advantage"] > 0 else ratio < 1 - 3e-4
            if min(abs(ratio - 1 - 4e-4), abs(ratio - 1 + 3e-4)) > 1e-5:
                assert row["clipped"] == float(outside)
    clipped = [row["clipped"] for row in rows if row["clipped"] is not None]
    assert 0 < sum(clipped) < len(clipped)


def test_evaluations_before_during_and_after(run: Path) -> None:
    rows = lines(run / "eval.jsonl")
    assert [row["iteration"] for row in rows] == [0, 2, 4, 6]
    for row in rows:
        answers = lines(run / "evals" / f"{row['iteration']}.jsonl")
        assert row["num_prompts"] == len(answers) == 32
        assert row["accuracy"] == pytest.approx(sum(a["correct"] for a in answers) / 32)
    trained = {row["prompt_id"] for i in range(1, 7) for row in lines(run / "rollouts" / f"{i}.jsonl")}
    assert not trained & {answer["prompt_id"] for answer in answers}, "a held-out prompt was trained on"


def test_the_checkpoint_loads_and_scores_as_the_run_ended(run: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(run / "checkpoints" / "6")
    assert model.dtype == torch.float32
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"1", "2", "3", "4", "5", "6"}
    record = json.loads(
        gspo("eval", RECIPE, "--model.path", str(run / "checkpoints" / "6"), "--json").stdout.splitlines()[-1]
    )
    last = lines(run / "eval.jsonl")[-1]
    assert record["accuracy"] == last["accuracy"] and record["reward/mean"] == pytest.approx(last["reward/mean"])


def test_the_stored_config_gives_the_same_run(run: Path) -> None:
    """Bit for bit on one machine kind: sampled ids, rewards, losses and weights."""
    again = gspo("train", str(run / "config.toml"))
    assert again.returncode == 0, again.stderr
    other = run.parent / "tiny-2"
    for iteration in range(1, 7):
        first, second = (lines(folder / "rollouts" / f"{iteration}.jsonl") for folder in (run, other))
        assert first == second
    timed = ("time/", "throughput/", "memory/")
    for first, second in zip(lines(run / "metrics.jsonl"), lines(other / "metrics.jsonl"), strict=True):
        assert {k: v for k, v in first.items() if not k.startswith(timed)} == {
            k: v for k, v in second.items() if not k.startswith(timed)
        }
    weights = [(folder / "checkpoints" / "6" / "model.safetensors").read_bytes() for folder in (run, other)]
    assert weights[0] == weights[1]


def test_environment(run: Path) -> None:
    facts = json.loads((run / "environment.json").read_text())
    assert facts["versions"]["torch"] and facts["seed"] == 0 and facts["compute_dtype"] == "float32"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_signal_saves_and_exits_130(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "gspo", "train", RECIPE, "--run.directory", str(tmp_path)]
    command += ["--run.iterations", "5000", "--eval.every", "0", "--run.checkpoint_every", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    ) as process:
        metrics = tmp_path / "tiny" / "metrics.jsonl"
        deadline = time.monotonic() + 120
        while not (metrics.exists() and len(metrics.read_text().splitlines()) >= 2):
            assert time.monotonic() < deadline and process.poll() is None, process.stderr and process.stderr.read()
            time.sleep(0.05)
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "everything up to here is saved" in errors and "Traceback" not in errors
    done = len(lines(metrics))
    first, checkpoint = sorted((tmp_path / "tiny" / "checkpoints").iterdir())
    assert first.name == "0" and checkpoint.name.split("+")[0] == str(done)
    AutoModelForCausalLM.from_pretrained(checkpoint)
