"""``gspo eval CONFIG.toml [--section.key VALUE ...] [--json]``"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from gspo.cli.options import Switch, parse
from gspo.records import to_json

DESCRIPTION = (
    "Measure model.path on held-out prompts. To measure a checkpoint: --model.path runs/NAME/checkpoints/ITERATION."
)


@dataclass(frozen=True)
class EvalOptions:
    json: Switch = False
    """Print the record as one line of JSON."""


def run(arguments: Sequence[str]) -> int:
    config, options = parse("eval", arguments, EvalOptions, DESCRIPTION)
    from gspo.evaluation.run import evaluate
    from gspo.training.callbacks import Callback

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("answers")

        class Watch(Callback):
            def on_progress(self, stage: str, done: int, total: int) -> None:
                bar.update(task, completed=done, total=total)

        record = evaluate(config, callbacks=[Watch()])
    if options.json:
        print(to_json(record))
        return 0
    table = Table(show_header=False, title=f"{config.model.path} on {config.eval.prompts or config.task.prompts}")
    for key, value in record.items():
        if key not in ("iteration", "policy_version"):
            table.add_row(key, f"{value:.4g}" if isinstance(value, float) else str(value))
    Console().print(table)
    return 0
