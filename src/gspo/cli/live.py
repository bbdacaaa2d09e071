"""What a run looks like while it goes: a live view on a terminal, plain lines everywhere else."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from gspo.evaluation.run import prompt_text
from gspo.training.callbacks import Callback, RunInfo
from gspo.types import Group as RolloutGroup

BARS = "▁▂▃▄▅▆▇█"


class View(Callback):
    """What both views know: the run, its evaluations, and when it will be done."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self.run: RunInfo | None = None
        self.evals: list[Mapping[str, Any]] = []
        self.started = time.monotonic()
        self.iterations_done = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def on_start(self, run: RunInfo) -> None:
        self.run = run
        self.started = time.monotonic()
        self.console.print(f"run: {run.directory}", markup=False)
        for fact in run.facts:
            self.console.print(fact, markup=False)

    def on_iteration(self, metrics: Mapping[str, Any], groups: Sequence[RolloutGroup]) -> None:
        self.iterations_done = metrics["iteration"]

    def on_eval(self, record: Mapping[str, Any], answers: Sequence[Mapping[str, Any]]) -> None:
        self.evals.append(record)

    def on_message(self, text: str) -> None:
        self.console.print(text, markup=False)

    def on_end(self, reason: str) -> None:
        if reason == "finished" and len(self.evals) > 1:
            first, last = self.evals[0], self.evals[-1]
            self.console.print(
                f"held-out accuracy {first['accuracy']:.3f} -> {last['accuracy']:.3f} "
                f"({last['num_prompts']} prompts, standard error {last['accuracy_stderr']:.3f})",
                markup=False,
            )
        if self.run:
            self.console.print(
                f"{reason} in {clock(time.monotonic() - self.started)}: {self.run.directory}", markup=False
            )

    def seconds_left(self) -> float | None:
        """By the pace so far; None before the first iteration."""
        if not self.run or not self.iterations_done:
            return None
        pace = (time.monotonic() - self.started) / self.iterations_done
        return pace * (self.run.config.run.iterations - self.iterations_done)


class PlainView(View):
    """One line an iteration, each figure named."""

    def on_iteration(self, metrics: Mapping[str, Any], groups: Sequence[RolloutGroup]) -> None:
        super().on_iteration(metrics, groups)
        total = self.run.config.run.iterations if self.run else 0
        left = self.seconds_left()
        self.console.print(
            f"{metrics['iteration']:>4}/{total}  " + "  ".join(f"{name} {value}" for name, value in figures(metrics))
            + (f"  left {clock(left)}" if left else ""),
            markup=False, soft_wrap=True,
        )  # fmt: skip

    def on_eval(self, record: Mapping[str, Any], answers: Sequence[Mapping[str, Any]]) -> None:
        super().on_eval(record, answers)
        self.console.print(
            f"held-out after {record['iteration']} iterations: accuracy {record['accuracy']:.3f} "
            f"+- {record['accuracy_stderr']:.3f}, reward {shown(record['reward/mean'])}, "
            f"{record['num_prompts']} prompts, {record['seconds']:.1f} s",
            markup=False, soft_wrap=True,
        )  # fmt: skip


class LiveView(View):
    """A progress bar, the figures with their history, and one sampled answer, redrawn in place."""

    def __init__(self, console: Console | None = None) -> None:
        super().__init__(console)
        self.bar = Progress(
            TextColumn("{task.description:<10}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=self.console,
        )
        self.whole: TaskID | None = None
        self.piece: TaskID = self.bar.add_task("loading", total=None, left="")
        self.rewards: list[float] = []
        self.latest: Mapping[str, Any] = {}
        self.example: tuple[str, str, float | None] | None = None
        self.live = Live(self.picture(), console=self.console, refresh_per_second=4)

    def __enter__(self) -> Self:
        self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.live.stop()

    def on_start(self, run: RunInfo) -> None:
        super().on_start(run)
        self.whole = self.bar.add_task("iteration", total=run.config.run.iterations, left="")

    def on_progress(self, stage: str, done: int, total: int) -> None:
        self.bar.update(self.piece, description=stage, completed=done, total=total)
        self.live.update(self.picture())

    def on_iteration(self, metrics: Mapping[str, Any], groups: Sequence[RolloutGroup]) -> None:
        super().on_iteration(metrics, groups)
        self.latest = metrics
        self.rewards.append(metrics.get("reward/mean") or 0.0)
        if groups:
            rollout = groups[0].rollouts[0]
            self.example = (prompt_text(groups[0].prompt), rollout.text, rollout.reward)
        left = self.seconds_left()
        if self.whole is not None:
            self.bar.update(self.whole, completed=metrics["iteration"], left=f"{clock(left)} left" if left else "")
        self.live.update(self.picture())

    def on_eval(self, record: Mapping[str, Any], answers: Sequence[Mapping[str, Any]]) -> None:
        super().on_eval(record, answers)
        self.live.update(self.picture())

    def on_end(self, reason: str) -> None:
        self.bar.update(self.piece, visible=False)
        self.live.update(self.picture())
        super().on_end(reason)

    def picture(self) -> RenderableType:
        """The whole view as it stands."""
        parts: list[RenderableType] = [self.bar]
        if self.latest:
            table = Table.grid(padding=(0, 2))
            table.add_row("reward", f"{self.rewards[-1]:.3f}", Text(sparkline(self.rewards), style="green"))
            for name, value in figures(self.latest)[1:]:
                table.add_row(name, value, "")
            parts.append(table)
        if self.evals:
            parts.append(
                Text(
                    "held-out accuracy  " + "  ".join(f"{e['iteration']}: {e['accuracy']:.3f}" for e in self.evals[-8:])
                )
            )
        if self.example:
            prompt, answer, reward = self.example
            body = Text(f"{clip(prompt)}\n", style="dim")
            body.append(clip(answer) or "(empty)", style="none")
            parts.append(Panel(body, title=f"one answer, reward {shown(reward)}", title_align="left"))
        return Group(*parts)


def figures(metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(name, value) of what is shown of an iteration, in order; what does not apply is left out."""
    found = [
        ("reward", shown(metrics.get("reward/mean"))),
        ("length", shown(metrics.get("rollout/length_mean"), ".1f")),
        ("cut", share(metrics.get("rollout/truncated_fraction"))),
        ("no signal", share(metrics.get("group/no_signal_fraction"))),
        ("clipped", share(metrics.get("objective/clip_fraction"))),
        ("entropy", shown(metrics.get("policy/entropy"))),
        ("grad norm", shown(metrics.get("optimizer/grad_norm"), ".3g")),
        ("rollout tok/s", shown(metrics.get("throughput/rollout_tokens_per_second"), ".0f")),
        ("update tok/s", shown(metrics.get("throughput/update_tokens_per_second"), ".0f")),
    ]
    return [(name, value) for name, value in found if value != "-" or name == "reward"]


def shown(value: float | None, form: str = ".3f") -> str:
    return "-" if value is None else format(value, form)


def share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f}%"


def clock(seconds: float | None) -> str:
    """4:05, or 1:02:03."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def clip(text: str, most: int = 300) -> str:
    text = text.strip()
    return text if len(text) <= most else text[:most] + " ..."


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """The last ``width`` values as a row of bars."""
    values = values[-width:]
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    return "".join(BARS[round((value - low) / span * (len(BARS) - 1))] for value in values)
