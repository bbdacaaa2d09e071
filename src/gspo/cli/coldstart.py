"""``gspo coldstart CONFIG.toml [--out FOLDER] [--section.key VALUE ...]``"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.progress import Progress, TextColumn

from gspo.cli.options import parse

DESCRIPTION = (
    "Fine-tune model.path on the worked solutions of task.prompts, as the [coldstart] section says, and write a plain "
    "Hugging Face folder to train from: gspo train CONFIG.toml --model.path FOLDER."
)


@dataclass(frozen=True)
class ColdstartOptions:
    out: str = ""
    """The folder to write; it must not exist yet. Empty: NAME-coldstart beside the runs."""


def run(arguments: Sequence[str]) -> int:
    config, options = parse("coldstart", arguments, ColdstartOptions, DESCRIPTION)
    from gspo.training.coldstart import coldstart

    out = options.out or f"{config.run.directory}/{config.run.name}-coldstart"
    console = Console(stderr=True)
    columns = (*Progress.get_default_columns(), TextColumn("loss {task.fields[loss]:.3f}"))
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("steps", loss=float("nan"))
        result = coldstart(
            config, out, progress=lambda step, steps, loss: bar.update(task, completed=step, total=steps, loss=loss)
        )
    first, last = result.loss[0], result.loss[-1]
    print(f"{len(result.loss)} steps, {result.tokens} tokens, {result.seconds:.0f} s: loss {first:.3f} -> {last:.3f}")
    if result.too_long:
        print(f"{result.too_long} problems left out: longer than rollout.max_tokens or task.max_prompt_tokens")
    if result.evaluation:
        found = result.evaluation
        print(f"held-out accuracy {found['accuracy']:.3f}, reward {found['reward/mean']:.3f} ({found['num_prompts']})")
    print(f"written to {result.folder}; train from it with --model.path {result.folder}")
    return 0
