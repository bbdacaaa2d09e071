"""The command line: light to start, one source for keys and flags, views that show what they are given."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from rich.console import Console

from gspo.cli.live import LiveView, PlainView, clock, figures, sparkline
from gspo.cli.main import main
from gspo.config import Config, known_keys
from gspo.training.callbacks import RunInfo
from gspo.types import Group, Prompt, Rollout

METRICS = {
    "iteration": 3,
    "reward/mean": 0.25,
    "rollout/length_mean": 12.5,
    "rollout/truncated_fraction": 0.125,
    "group/no_signal_fraction": 0.5,
    "objective/clip_fraction": 0.375,
    "optimizer/grad_norm": 1.234,
    "throughput/rollout_tokens_per_second": 1234.5,
}
EVAL = {"iteration": 0, "accuracy": 0.25, "accuracy_stderr": 0.01, "reward/mean": 0.3, "num_prompts": 8, "seconds": 1.0}


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], []])
def test_help_loads_neither_torch_nor_transformers(arguments: list[str]) -> None:
    code = (
        "import sys; from gspo.cli.main import main; main(sys.argv[1:]); import gspo; "
        "heavy = {'torch', 'transformers', 'tyro', 'pydantic', 'numpy'} & set(sys.modules); "
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "gspo" in done.stdout or "0." in done.stdout


def test_training_help_loads_no_torch() -> None:
    code = """
import sys
from gspo.cli.main import main
try:
    main(["train", "--help"])
except SystemExit:
    pass
sys.exit("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_every_key_is_a_flag_with_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["train", "--help"])
    assert stop.value.code == 0
    said = capsys.readouterr().out
    for key in known_keys():
        assert f"--{key}" in said, f"{key} has no flag"


def test_every_key_is_documented_in_the_source() -> None:
    source = Path(sys.modules["gspo.config.schema"].__file__ or "").read_text().splitlines()
    for section in fields(Config):
        for key in fields(type(getattr(Config(), section.name))):
            place = next(n for n, line in enumerate(source) if line.startswith(f"    {key.name}: "))
            assert source[place + 1].lstrip().startswith('"""'), f"{section.name}.{key.name} has no help text"


def test_dry_run_prints_a_config_that_reads_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('[model]\npath = "builtin:tiny"\n[rollout]\ngroup_size = 4\n')
    assert (
        main(["train", str(file), "--dry-run", "--rollout.group_size", "6", "--optimizer.learning-rate", "2e-6"]) == 0
    )
    made = Config.from_toml(capsys.readouterr().out)
    assert (made.rollout.group_size, made.optimizer.learning_rate, made.run.name) == (6, 2e-6, "mine")
    assert made == made.resolved()


def test_a_bug_of_ours_is_one_line_and_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import gspo.cli.train

    monkeypatch.setattr(gspo.cli.train, "run", lambda arguments: 1 / 0)
    assert main(["train", "x.toml"]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "ZeroDivisionError" in said
    assert "ZeroDivisionError" in Path(said.split("traceback is in ")[1].split(";")[0]).read_text()


def info(tmp_path: Path) -> RunInfo:
    return RunInfo(Config().with_values({"run.iterations": 6}), tmp_path / "run", ["model: tiny"])


def group() -> list[Group]:
    rollout = Rollout("p", 0, [1], [2], [True], [-1.0], 1.0, 0, "stop", "[bold]42[/bold]", reward=0.5)
    return [Group(Prompt("p", "What is 6 x 7?"), [rollout])]


def test_plain_lines_name_every_figure(tmp_path: Path) -> None:
    console = Console(record=True, width=60, force_terminal=False)
    view = PlainView(console)
    view.on_start(info(tmp_path))
    view.on_eval(EVAL, [])
    view.on_iteration(METRICS, group())
    view.on_eval(EVAL | {"iteration": 6, "accuracy": 0.75}, [])
    view.on_end("finished")
    said = console.export_text()
    assert (
        "   3/6  reward 0.250  length 12.5  cut 12%  no signal 50%  clipped 38%  grad norm 1.23  rollout tok/s 1234"
        in said
    )
    assert "held-out accuracy 0.250 -> 0.750" in " ".join(said.split())


def test_live_view_shows_reward_accuracy_and_an_answer(tmp_path: Path) -> None:
    console = Console(record=True, width=70, force_terminal=True)
    view = LiveView(console)
    with view:
        view.on_start(info(tmp_path))
        view.on_eval(EVAL, [])
        view.on_progress("rollout", 10, 64)
        view.on_iteration(METRICS, group())
        console.print(view.picture())
        view.on_end("finished")
    said = console.export_text()
    for expected in (
        "3/6",
        "reward",
        "0.250",
        "clipped",
        "38%",
        "held-out accuracy",
        "[bold]42[/bold]",
        "What is 6 x 7?",
    ):
        assert expected in said


def test_small_forms() -> None:
    assert [clock(s) for s in (5, 65, 3725, None)] == ["0:05", "1:05", "1:02:05", "-"]
    assert sparkline([0, 1, 2]) == "▁▅█" and len(sparkline([0.0] * 100)) == 40
    assert ("reward", "-") in figures({})
