"""What both views show of a scripted run."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gspo.cli import live
from gspo.cli.live import LiveView, PlainView, View, clip, clock, sparkline, visible
from gspo.config import Config
from gspo.training.callbacks import RunInfo
from gspo.types import Group, Prompt, Rollout

METRICS: Mapping[str, Any] = {
    "iteration": 1,
    "policy_version": 4,
    "reward/mean": 0.25,
    "group/no_signal_fraction": 0.5,
    "rollout/length_mean": 18.42,
    "rollout/truncated_fraction": 0.0,
    "objective/clip_fraction": 0.312,
    "policy/entropy": 0.4,
    "optimizer/grad_norm": 3.14159,
    "throughput/rollout_tokens_per_second": 612.4,
    "throughput/update_tokens_per_second": 388.0,
}


@pytest.fixture(autouse=True)
def still_clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The views' clock: a test sets ``[0]``."""
    now = [0.0]
    monkeypatch.setattr(live.time, "monotonic", lambda: now[0])
    return now


def group(answer: str = "57 + 38 = [bold]95") -> Group:
    rollout = Rollout("p", 0, [1], [2], [True], [0.0], 1.0, 0, "stop", answer, 1.0)
    return Group(Prompt("p", [{"role": "user", "content": "What is 57 + 38?"}]), [rollout])


def info(iterations: int = 4, start: int = 0) -> RunInfo:
    config = Config()
    config = replace(config, run=replace(config.run, iterations=iterations))
    return RunInfo(config, Path("runs/demo"), ["model: " + "long " * 30 + "line"], start)


def evaluation(iteration: int, accuracy: float | None) -> dict[str, Any]:
    return {
        "iteration": iteration, "num_prompts": 256, "accuracy": accuracy, "accuracy_stderr": 0.023,
        "reward/mean": None, "seconds": 12.34,
    }  # fmt: skip


def play(view: View, now: list[float]) -> None:
    with view:
        view.on_start(info())
        view.on_progress("eval", 64, 256)
        view.on_eval(evaluation(0, 0.16), [])
        for iteration in (1, 2):
            now[0] = 65.0 * iteration
            view.on_progress("rollout", 32, 64)
            view.on_iteration({**METRICS, "iteration": iteration, "reward/mean": 0.25 * iteration}, [group()])
        view.on_message("checkpoint [2] written")
        view.on_iteration({"iteration": 3}, [])
        view.on_eval(evaluation(3, 0.53), [])
        view.on_end("finished")


PLAIN = """\
held-out after 0 iterations: accuracy 0.160 +- 0.023, reward -, 256 prompts, 12.3 s
   1/4  reward 0.250  length 18.4  cut  0%  no signal 50%  clipped 31%  entropy 0.400  grad norm 3.14  rollout tok/s  612  update tok/s  388  left 3:15
   2/4  reward 0.500  length 18.4  cut  0%  no signal 50%  clipped 31%  entropy 0.400  grad norm 3.14  rollout tok/s  612  update tok/s  388  left 2:10
checkpoint [2] written
   3/4  reward     -  left 0:43
held-out after 3 iterations: accuracy 0.530 +- 0.023, reward -, 256 prompts, 12.3 s
held-out accuracy 0.160 -> 0.530 (256 prompts, standard error 0.023)
finished in 2:10: runs/demo
"""  # noqa: E501


def test_plain_lines(still_clock: list[float]) -> None:
    output = io.StringIO()
    play(PlainView(Console(file=output, highlight=False, width=80)), still_clock)
    head, facts, *rest = output.getvalue().splitlines(keepends=True)
    assert head == "run: runs/demo\n"
    assert facts == info().facts[0] + "\n"  # whole, however long
    assert "".join(rest) == PLAIN


def picture(view: LiveView) -> str:
    console = Console(file=io.StringIO(), width=view.console.width, record=True)
    console.print(view.picture())
    return console.export_text()


def live_view(width: int) -> LiveView:
    return LiveView(Console(file=io.StringIO(), force_terminal=True, width=width, height=40, highlight=False))


def test_live_picture_midway(still_clock: list[float]) -> None:
    view = live_view(100)
    view.on_start(info())
    view.on_eval(evaluation(0, 0.16), [])
    assert "held-out accuracy" in picture(view) and "reward" not in picture(view)
    still_clock[0] = 65.0
    view.on_iteration(METRICS, [group()])
    view.on_progress("rollout", 32, 64)
    view.on_eval(evaluation(1, 0.53), [])
    text = picture(view)
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert "1/4" in rows[0] and "3:15 left" in rows[0] and rows[0].startswith("iteration")
    assert "32/64" in rows[1] and rows[1].startswith("rollout")
    for row in ("held-out accuracy 0.530 from 0.160", "no signal 50%", "clipped 31%", "grad norm 3.14"):
        assert row in rows
    assert "57 + 38 = [bold]95" in text and "What is 57 + 38?" in text and "reward 1.000" in text


@pytest.mark.parametrize("width", [30, 44, 80, 200])
def test_live_picture_fits_and_shows_the_newest(width: int) -> None:
    view = live_view(width)
    view.on_start(info(iterations=100))
    view.on_eval(evaluation(0, 0.16), [])
    for iteration in range(1, 61):
        view.on_iteration({**METRICS, "iteration": iteration, "reward/mean": float(iteration)}, [group()])
    lines = picture(view).splitlines()
    assert max(map(len, lines)) <= width
    (reward,) = [line for line in lines if line.startswith("reward")]
    assert "60.000" in reward and reward.rstrip().endswith("█")  # the newest is the highest
    assert not any("…" in line for line in lines if line.startswith("reward"))


def test_the_live_view_plays_to_its_end(still_clock: list[float]) -> None:
    view = live_view(100)
    play(view, still_clock)
    output = view.console.file.getvalue()  # type: ignore[attr-defined]
    assert "checkpoint [2] written" in output
    assert "held-out accuracy 0.160 -> 0.530" in output and "finished in 2:10: runs/demo" in output
    assert output.rindex("finished in") > output.rindex("57 + 38")  # the last lines stand below the picture
    assert view.rewards == [0.25, 0.5]  # an iteration without a reward is not one with reward 0


def test_a_resumed_run_keeps_its_own_pace(still_clock: list[float]) -> None:
    view = PlainView(Console(file=io.StringIO()))
    view.on_start(info(iterations=20, start=10))
    assert view.seconds_left() is None
    still_clock[0] = 30.0
    view.on_iteration({"iteration": 13}, [])
    assert view.seconds_left() == pytest.approx(70.0)


def test_slow_scoring_is_spoken_of_and_quick_scoring_is_not(still_clock: list[float]) -> None:
    """At 5 s and then when the time has doubled; each iteration counts for itself."""
    output = io.StringIO()
    view, drawn = PlainView(Console(file=output)), LiveView(Console(file=io.StringIO(), width=100))
    seen = []
    for start in (100, 200):
        for second in range(24):
            still_clock[0] = start + float(second)
            view.on_progress("reward", second, 64)
            drawn.on_progress("reward", second, 64)
            seen.append("for 0:0" in picture(drawn))
        view.on_progress("reward", 64, 64)
        drawn.on_progress("reward", 64, 64)
        view.on_progress("update", 1, 4)
    still_clock[0] = 300.0
    for done in (0, 64):
        view.on_progress("reward", done, 64)
    said = [line.strip() for line in output.getvalue().splitlines()]
    assert said == [f"rewards: {n} of 64 answers scored after 0:{n:02}" for n in (5, 10, 20)] * 2
    assert seen[:5] == [False] * 5 and all(seen[5:10])


def test_small_pieces() -> None:
    assert [clock(s) for s in (None, 0, 65.9, 3723)] == ["-", "0:00", "1:05", "1:02:03"]
    assert sparkline([]) == "" and sparkline([1.0, 1.0]) == "▁▁" and sparkline([0.0, 7.0, 3.0], 2) == "█▁"
    assert visible("a\x1b[2J\r\x9b\tb\nc") == "a·[2J··\tb\nc"
    assert clip("  short ") == "short"
    assert clip("\n".join("abcdefgh")) == "a\nb\nc\nd\ne\nf ..."
    assert clip("x" * 400) == "x" * 300 + " ..."
