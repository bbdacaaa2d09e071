"""``gspo train [CONFIG.toml] [--section.key VALUE ...] [--resume RUN|auto] [--dry_run]``"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from gspo.cli.failures import RunFailed
from gspo.cli.options import Switch, parse
from gspo.config import Config
from gspo.errors import Interrupted

DESCRIPTION = (
    "Train with GSPO. Settings come from CONFIG.toml; each can be given here instead, under the same name. With "
    "--resume RUN and no CONFIG.toml they are the run's own."
)


@dataclass(frozen=True)
class TrainOptions:
    resume: str | None = None
    """Go on with a run, by its folder or name, from its newest whole checkpoint. 'auto': the newest run of this name
    that has one, or a new run."""
    dry_run: Switch = False
    """Print the config as it would run, check prompts and rewards, and stop."""


def run(arguments: Sequence[str]) -> int:
    config, options = parse("train", _with_config(list(arguments)), TrainOptions, DESCRIPTION)
    if options.dry_run:
        from gspo.tasks import load_task

        load_task(config)
        print(config.resolved().to_toml())
        return 0
    from gspo.cli.live import LiveView, PlainView
    from gspo.training.loop import train

    view = LiveView() if sys.stdout.isatty() else PlainView()
    try:
        with view:
            train(config, resume=options.resume, callbacks=[view])
    except Interrupted:
        raise
    except Exception as error:
        if view.run is None:
            raise
        raise RunFailed(view.run.directory) from error
    return 0


def _with_config(arguments: list[str]) -> list[str]:
    """``--resume RUN`` without a config file runs the one that the run keeps."""
    if arguments and not arguments[0].startswith("-"):
        return arguments
    for number, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        run = value if equals else "".join(arguments[number + 1 : number + 2])
        if name == "--resume" and run and run != "auto":
            from gspo.training.resume import run_folder

            return [str(run_folder(Config(), run) / "config.toml"), *arguments]
    return arguments
