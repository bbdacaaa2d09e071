"""Stopping and going on gives the run that never stopped: ids, rewards, losses and weights, bit for bit."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from gspo import Config, train
from gspo.errors import Interrupted
from gspo.training.callbacks import Callback

ROOT = Path(__file__).resolve().parents[2]
RECIPE = str(ROOT / "recipes" / "tiny.toml")
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
TIMED = ("time/", "throughput/", "memory/")


def gspo(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gspo", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=240, **options)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def untimed(path: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not k.startswith(TIMED) and k != "seconds"} for row in lines(path)]


def same_run(first: Path, second: Path) -> None:
    assert untimed(first / "metrics.jsonl") == untimed(second / "metrics.jsonl")
    assert untimed(first / "eval.jsonl") == untimed(second / "eval.jsonl")
    for iteration in range(1, 7):
        name = f"{iteration}.jsonl"
        assert lines(first / "rollouts" / name) == lines(second / "rollouts" / name), name
    for name in ("model.safetensors", "optimizer.safetensors"):
        ours, theirs = (load_file(run / "checkpoints" / "6" / name) for run in (first, second))
        assert ours.keys() == theirs.keys()
        assert all(bool((ours[key] == theirs[key]).all()) for key in ours)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("straight")
    done = gspo("train", RECIPE, "--run.directory", str(folder))
    assert done.returncode == 0, done.stderr
    return folder / "tiny"


def test_three_iterations_then_three_in_a_new_process(straight: Path, tmp_path: Path) -> None:
    first = gspo("train", RECIPE, "--run.directory", str(tmp_path), "--run.iterations", "3")
    assert first.returncode == 0, first.stderr
    run = tmp_path / "tiny"
    assert [row["iteration"] for row in lines(run / "metrics.jsonl")] == [1, 2, 3]
    second = gspo("train", "--resume", str(run), "--run.iterations", "6")
    assert second.returncode == 0, second.stderr
    assert "resumed from checkpoint 3" in second.stdout
    # the evaluation after iteration 3 was made because it was the last; a straight run has none there
    kept = [line for line in (run / "eval.jsonl").read_text().splitlines() if json.loads(line)["iteration"] != 3]
    (run / "eval.jsonl").write_text("".join(line + "\n" for line in kept))
    same_run(straight, run)


def test_killed_twenty_times(straight: Path, tmp_path: Path) -> None:
    """At chosen places and by the clock; each child goes on from what the one before left."""
    command = [sys.executable, str(ROOT / "tests" / "e2e" / "killed_run.py"), str(tmp_path), "20"]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("killed in") == 20, done.stdout
    same_run(straight, tmp_path / "killed")
    assert sorted(path.name for path in (tmp_path / "killed" / "checkpoints").iterdir())[-1] == "6"


@pytest.mark.parametrize("stage", ["update", "rollout"])
def test_stopped_in_the_middle_of_an_iteration(straight: Path, tmp_path: Path, stage: str) -> None:
    """SIGTERM between two updates keeps the rollouts and the updates made; while sampling the batch is drawn again."""
    script = f"""
import os, signal, sys
from gspo import Config, train
from gspo.errors import Interrupted
from gspo.training.callbacks import Callback

class Stop(Callback):
    seen = 0
    def on_progress(self, stage, done, total):
        if stage == {stage!r}:
            Stop.seen += 1
            if Stop.seen == 11:
                os.kill(os.getpid(), signal.SIGTERM)

config = Config.load({RECIPE!r}).with_values({{"run.directory": {str(tmp_path)!r}, "run.name": "tiny"}})
try:
    train(config, callbacks=[Stop()])
except Interrupted:
    sys.exit(130)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=ENVIRONMENT, timeout=120)
    assert done.returncode == 130, done.stderr
    names = {path.name for path in (tmp_path / "tiny" / "checkpoints").iterdir()}
    middle = {name for name in names if "+" in name}
    assert middle == ({"2+2"} if stage == "update" else set())
    again = gspo("train", RECIPE, "--run.directory", str(tmp_path), "--resume", "auto")
    assert again.returncode == 0, again.stderr
    same_run(straight, tmp_path / "tiny")


@pytest.mark.parametrize("replay", ["old", "rollout"])
def test_experts_to_replay_outlive_a_stop(tmp_path: Path, replay: str) -> None:
    """In the middle of an iteration of a mixture of experts: the experts that later updates replay are saved too."""

    class Stop(Callback):
        updates = 0

        def on_progress(self, stage: str, done: int, total: int) -> None:
            self.updates += stage == "update"
            if self.updates == 7 and stage == "update":
                os.kill(os.getpid(), signal.SIGTERM)

    values = {"model.path": "builtin:tiny-moe", "algorithm.routing_replay": replay, "run.iterations": 3}
    whole, stopped = (
        Config.load(RECIPE).with_values(values | {"run.name": name, "run.directory": str(tmp_path)})
        for name in ("whole", "stopped")
    )
    straight = train(whole)
    with pytest.raises(Interrupted):
        train(stopped, callbacks=[Stop()])
    assert "1+2" in [path.name for path in (tmp_path / "stopped" / "checkpoints").iterdir()]
    train(stopped, resume="auto")
    for name in ("metrics.jsonl", "eval.jsonl"):
        assert untimed(straight.directory / name) == untimed(tmp_path / "stopped" / name)
    weights = [load_file(tmp_path / run / "checkpoints" / "3" / "model.safetensors") for run in ("whole", "stopped")]
    assert all(bool((weights[0][key] == weights[1][key]).all()) for key in weights[0])


def test_a_damaged_checkpoint_is_left_out_and_said(straight: Path, tmp_path: Path) -> None:
    run = tmp_path / "tiny"
    shutil.copytree(straight, run)
    damaged = run / "checkpoints" / "6" / "model.safetensors"
    data = bytearray(damaged.read_bytes())
    data[-100] ^= 1  # one bit
    damaged.write_bytes(data)
    (run / "checkpoints" / "5" / "optimizer.safetensors").unlink()
    (run / "checkpoints" / "7.partial").mkdir()
    done = gspo("train", RECIPE, "--run.directory", str(tmp_path), "--resume", "tiny")
    assert done.returncode == 0, done.stderr
    said = re.sub(r"\s+", " ", done.stdout)
    assert "checkpoint 6 left out: model.safetensors is damaged" in said
    assert "checkpoint 5 left out: optimizer.safetensors is missing" in said and "resumed from checkpoint 4" in said
    same_run(straight, run)
    assert not (run / "checkpoints" / "7.partial").exists()


def test_resuming_a_finished_run_changes_nothing(straight: Path, tmp_path: Path) -> None:
    run = tmp_path / "tiny"
    shutil.copytree(straight, run)
    done = gspo("train", "--resume", str(run))
    assert done.returncode == 0, done.stderr
    same_run(straight, run)


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--optimizer.learning_rate", "0.1"], ["optimizer.learning_rate was 0.003 and is 0.1"]),
        (["--run.seed", "7", "--rollout.group_size", "4"], ["run.seed was 0 and is 7", "rollout.group_size was 8"]),
    ],
)
def test_a_config_that_learns_something_else_is_refused(straight: Path, flags: list[str], parts: list[str]) -> None:
    done = gspo("train", RECIPE, "--run.directory", str(straight.parent), "--resume", "tiny", *flags)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert all(part in done.stderr for part in parts), done.stderr


def test_changed_data_is_refused(tmp_path: Path) -> None:
    prompts, reward = tmp_path / "p.jsonl", tmp_path / "r.py"
    prompts.write_text("".join(json.dumps({"prompt": f"say {n}"}) + "\n" for n in range(40)))
    reward.write_text("def length(completions, **_):\n    return [float(len(c)) for c in completions]\n")
    flags = ["--task.prompts", str(prompts), "--task.reward", f"{reward}:length", "--run.directory", str(tmp_path)]
    flags += ["--eval.every", "0"]
    assert gspo("train", RECIPE, *flags, "--run.iterations", "1").returncode == 0
    prompts.write_text(prompts.read_text().replace("say 3", "shout 3"))
    done = gspo("train", RECIPE, *flags, "--resume", "auto")
    assert done.returncode == 1 and "fingerprint differs" in done.stderr and "Traceback" not in done.stderr


def test_resume_of_nothing(tmp_path: Path) -> None:
    done = gspo("train", RECIPE, "--run.directory", str(tmp_path), "--resume", "nowhere")
    assert done.returncode == 1 and "there is no run" in done.stderr
    done = gspo("train", "--resume", str(tmp_path / "x"))
    assert done.returncode == 1 and "there is no run" in done.stderr
    (tmp_path / "tiny").mkdir()
    shutil.copy(RECIPE, tmp_path / "tiny" / "config.toml")
    done = gspo("train", RECIPE, "--run.directory", str(tmp_path), "--resume", "tiny")
    assert done.returncode == 1 and "no checkpoint to go on from: it has none" in done.stderr


def test_a_second_signal_leaves_at_once_and_the_last_checkpoint_is_whole(straight: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "gspo",
        "train",
        RECIPE,
        "--run.directory",
        str(tmp_path),
        "--run.iterations",
        "500",
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    ) as process:
        metrics = tmp_path / "tiny" / "metrics.jsonl"
        deadline = time.monotonic() + 120
        while not (metrics.exists() and len(metrics.read_text().splitlines()) >= 3):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode in (130, -signal.SIGTERM, -signal.SIGINT) and "bug" not in errors
    from gspo.training.checkpoint import newest_whole

    place, _ = newest_whole(tmp_path / "tiny" / "checkpoints")
    assert place is not None and place.iterations >= 2


def small_disk(folder: Path, size: str) -> bool:
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True)
    return mounted.returncode == 0


@pytest.mark.parametrize("check", [True, False])
def test_a_full_disk_leaves_the_previous_checkpoint_usable(straight: Path, tmp_path: Path, check: bool) -> None:
    """With the check of free space, and without: the write itself then fails in the middle."""
    disk = tmp_path / "disk"
    if not small_disk(disk, "6m"):
        pytest.skip("mounting a small tmpfs is not permitted here")
    try:
        without = (
            "" if check else "import shutil, types\nshutil.disk_usage = lambda _: types.SimpleNamespace(free=1 << 40)\n"
        )
        script = without + (
            "import sys\nfrom gspo.cli.main import main\n"
            f"sys.exit(main(['train', {RECIPE!r}, '--run.directory', {str(disk)!r}, '--run.keep', '50']))"
        )
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, env=ENVIRONMENT, timeout=240
        )
        assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
        assert "cannot be written" in done.stderr or "MB free" in done.stderr
        assert "Earlier checkpoints are untouched" in done.stderr
        run = tmp_path / "tiny"
        shutil.copytree(disk / "tiny", run)
        assert not list((run / "checkpoints").glob("*.partial"))
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    again = gspo("train", "--resume", str(run))
    assert again.returncode == 0, again.stderr
    same_run(straight, run)
