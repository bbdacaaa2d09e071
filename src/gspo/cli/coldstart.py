"""``gspo coldstart CONFIG.toml [--out FOLDER] [--section.key VALUE ...]``"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import Progress as RichProgress
from rich.progress import TextColumn

from gspo.cli.options import parse

DESCRIPTION = (
    "Fine-tune model.path on the worked solutions of task.prompts, as the [coldstart] section says, and write a plain "
    "Hugging Face folder to train from: gspo train CONFIG.toml --model.path FOLDER."
)


@dataclass(frozen=True)
class ColdstartOptions:
    out: str = ""
    """The folder to write; it must not exist yet. Empty: NAME-coldstart beside the runs."""


@contextmanager
def _progress() -> Iterator[Callable[[int, int, float], None]]:
    """A bar on a terminal; in a log file ten lines and the first step's, so that a slow start shows."""
    if not sys.stderr.isatty():
        yield _line
        return
    columns = (*RichProgress.get_default_columns(), TextColumn("loss {task.fields[loss]:.3f}"))
    with RichProgress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("steps", loss=float("nan"))
        yield lambda step, steps, loss: bar.update(task, completed=step, total=steps, loss=loss)


def _line(step: int, steps: int, loss: float) -> None:
    if step == 1 or step * 10 // steps > (step - 1) * 10 // steps:
        print(f"step {step} of {steps}: loss {loss:.3f}", file=sys.stderr, flush=True)


def run(arguments: Sequence[str]) -> int:
    config, options = parse("coldstart", arguments, ColdstartOptions, DESCRIPTION)
    from gspo.training.coldstart import coldstart

    out = options.out or f"{config.run.directory}/{config.run.name}-coldstart"
    with _progress() as progress:
        result = coldstart(config, out, progress=progress)
    first, last = result.loss[0], result.loss[-1]
    print(f"{len(result.loss)} steps, {result.tokens} tokens, {result.seconds:.0f} s: loss {first:.3f} -> {last:.3f}")
    if result.too_long:
        print(f"{result.too_long} problems left out: longer than rollout.max_tokens or task.max_prompt_tokens")
    if result.evaluation:
        found = result.evaluation
        print(f"held-out accuracy {found['accuracy']:.3f}, reward {found['reward/mean']:.3f} ({found['num_prompts']})")
    print(f"written to {result.folder}; train from it with --model.path {result.folder}")
    return 0
