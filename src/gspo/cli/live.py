"""What a run looks like while it goes: a live view on a terminal, plain lines everywhere else."""

from __future__ import annotations

import time
import unicodedata
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from gspo.evaluation.run import prompt_text
from gspo.training.callbacks import Callback, RunInfo
from gspo.types import Group as RolloutGroup

BARS = "▁▂▃▄▅▆▇█"
WIDTHS = {
    "reward": 5, "length": 4, "cut": 3, "no signal": 3, "clipped": 3, "entropy": 5, "grad norm": 4,
    "rollout tok/s": 4, "update tok/s": 4,
}  # fmt: skip
"""Characters of a figure in a plain line, so that lines stand in columns."""
SLOW_SECONDS = 5.0
"""Scoring that takes longer is spoken of."""


class View(Callback):
    """What both views know: the run, its evaluations, and when it will be done."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self.run: RunInfo | None = None
        self.evals: list[Mapping[str, Any]] = []
        self.started = time.monotonic()
        self.iterations_done = 0
        self.scoring_since: float | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def say(self, text: str) -> None:
        """A line of its own. A terminal gets it wrapped; a file gets it whole, for grep."""
        self.console.print(text, markup=False, soft_wrap=not self.console.is_terminal)

    def on_start(self, run: RunInfo) -> None:
        self.run = run
        self.started = time.monotonic()
        self.say(f"run: {run.directory}")
        for fact in run.facts:
            self.say(fact)

    def on_iteration(self, metrics: Mapping[str, Any], groups: Sequence[RolloutGroup]) -> None:
        self.iterations_done = metrics["iteration"]

    def on_eval(self, record: Mapping[str, Any], answers: Sequence[Mapping[str, Any]]) -> None:
        self.evals.append(record)

    def on_message(self, text: str) -> None:
        self.say(text)

    def on_end(self, reason: str) -> None:
        if reason == "finished" and len(self.evals) > 1:
            first, last = self.evals[0], self.evals[-1]
            self.say(
                f"held-out accuracy {shown(first['accuracy'])} -> {shown(last['accuracy'])} "
                f"({last['num_prompts']} prompts, standard error {shown(last['accuracy_stderr'])})"
            )
        if self.run:
            when = "in" if reason == "finished" else "after"
            self.say(f"{reason} {when} {clock(time.monotonic() - self.started)}: {self.run.directory}")

    def seconds_scoring(self, stage: str, done: int, total: int) -> float:
        """How long the reward functions have been at it; 0 when they begin, end or are not running."""
        now = time.monotonic()
        if stage != "reward" or done == total:
            self.scoring_since = None
            return 0.0
        self.scoring_since = now if self.scoring_since is None else self.scoring_since
        return now - self.scoring_since

    def seconds_left(self) -> float | None:
        """By the pace so far; None before the first iteration."""
        here = self.iterations_done - self.run.start_iteration if self.run else 0
        if not self.run or here <= 0:
            return None
        pace = (time.monotonic() - self.started) / here
        return pace * (self.run.config.run.iterations - self.iterations_done)


class PlainView(View):
    """One line an iteration, each figure named and in its column."""

    next_line = SLOW_SECONDS

    def on_progress(self, stage: str, done: int, total: int) -> None:
        seconds = self.seconds_scoring(stage, done, total)
        if not seconds:
            self.next_line = SLOW_SECONDS
        elif seconds >= self.next_line and done < total:
            self.say(f"      rewards: {done} of {total} answers scored after {clock(seconds)}")
            self.next_line = 2 * seconds

    def on_iteration(self, metrics: Mapping[str, Any], groups: Sequence[RolloutGroup]) -> None:
        super().on_iteration(metrics, groups)
        total = self.run.config.run.iterations if self.run else 0
        named = "  ".join(f"{name} {value:>{WIDTHS[name]}}" for name, value in figures(metrics))
        left = self.seconds_left()
        self.say(f"{metrics['iteration']:>4}/{total}  {named}" + (f"  left {clock(left)}" if left else ""))

    def on_eval(self, record: Mapping[str, Any], answers: Sequence[Mapping[str, Any]]) -> None:
        super().on_eval(record, answers)
        self.say(
            f"held-out after {record['iteration']} iterations: accuracy {shown(record['accuracy'])} "
            f"+- {shown(record['accuracy_stderr'])}, reward {shown(record['reward/mean'])}, "
            f"{record['num_prompts']} prompts, {record['seconds']:.1f} s"
        )


class LiveView(View):
    """A progress bar, the figures with their history, and one sampled answer, redrawn in place."""

    def __init__(self, console: Console | None = None) -> None:
        super().__init__(console)
        self.bar = Progress(
            TextColumn("{task.description:<10}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            _Elapsed(),
            TextColumn("{task.fields[left]}"),
            console=self.console,
        )
        self.whole = self.bar.add_task("iteration", total=None, start=False, visible=False, timed=True, left="")
        self.piece = self.bar.add_task("loading", total=None, timed=True, left="")
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
        self.bar.start_task(self.whole)
        self.bar.update(self.whole, total=run.config.run.iterations, completed=run.start_iteration, visible=True)

    def on_progress(self, stage: str, done: int, total: int) -> None:
        seconds = self.seconds_scoring(stage, done, total)
        spent = f"for {clock(seconds)}" if seconds >= SLOW_SECONDS else ""
        self.bar.update(self.piece, description=f"  {stage}", completed=done, total=total, timed=False, left=spent)

    def on_iteration(self, metrics: Mapping[str, Any], groups: Sequence[RolloutGroup]) -> None:
        super().on_iteration(metrics, groups)
        self.latest = metrics
        if (reward := metrics.get("reward/mean")) is not None:
            self.rewards.append(reward)
        if groups and groups[0].rollouts:
            rollout = groups[0].rollouts[0]
            self.example = (prompt_text(groups[0].prompt), rollout.text, rollout.reward)
        left = self.seconds_left()
        self.bar.update(self.whole, completed=metrics["iteration"], left="" if left is None else f"{clock(left)} left")
        self.live.update(self.picture())

    def on_eval(self, record: Mapping[str, Any], answers: Sequence[Mapping[str, Any]]) -> None:
        super().on_eval(record, answers)
        self.live.update(self.picture())

    def on_end(self, reason: str) -> None:
        self.bar.update(self.piece, visible=False)
        self.live.update(self.picture())
        self.live.stop()  # the last lines go below the picture
        super().on_end(reason)

    def picture(self) -> RenderableType:
        """The whole view as it stands."""
        parts: list[RenderableType] = [self.bar]
        if self.latest or self.evals:
            parts.append(self._table())
        if self.example:
            prompt, answer, reward = self.example
            body = Text(f"{clip(prompt)}\n", style="dim")
            body.append(clip(answer) or "(empty)", style="not dim")
            parts.append(Panel(body, title=f"one answer, reward {shown(reward)}", title_align="left"))
        return Group(*parts)

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True, min_width=17)  # never cut a figure: the last column gives way
        table.add_column(justify="right", no_wrap=True, min_width=6)
        table.add_column(no_wrap=True, overflow="ellipsis")
        if self.evals:
            first, last = self.evals[0], self.evals[-1]
            history = f"from {shown(first['accuracy'])}" if len(self.evals) > 1 else "at the start"
            table.add_row("held-out accuracy", shown(last["accuracy"]), history)
        for name, value in figures(self.latest) if self.latest else []:
            bars = sparkline(self.rewards, min(40, self.console.width - 28)) if name == "reward" else ""
            table.add_row(name, value, Text(bars, style="green"))
        return table


class _Elapsed(TimeElapsedColumn):
    """Elapsed time of the whole; a stage passes too quickly to have one."""

    def render(self, task: Task) -> Text:
        return super().render(task) if task.fields["timed"] else Text("")


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


def clip(text: str, most: int = 300, lines: int = 6) -> str:
    """The beginning of a text, small enough for a panel."""
    text = text.strip()
    short = "\n".join(text[:most].splitlines()[:lines])
    return visible(short + (" ..." if len(short) < len(text) else ""))


def visible(text: str) -> str:
    """What a model wrote, with control characters drawn as a dot: an escape code must not reach the terminal."""
    return "".join("·" if unicodedata.category(char) == "Cc" and char not in "\n\t" else char for char in text)


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """The last ``width`` values as a row of bars."""
    values = values[-max(width, 1) :]
    if not values:
        return ""
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    return "".join(BARS[round((value - low) / span * (len(BARS) - 1))] for value in values)
