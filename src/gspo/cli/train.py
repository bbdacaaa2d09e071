"""``gspo train CONFIG.toml [--section.key VALUE ...] [--dry_run]``"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from gspo.cli.failures import RunFailed
from gspo.cli.options import Switch, parse
from gspo.errors import Interrupted

DESCRIPTION = "Train with GSPO. Settings come from CONFIG.toml; each can be given here instead, under the same name."


@dataclass(frozen=True)
class TrainOptions:
    dry_run: Switch = False
    """Print the config as it would run, check prompts and rewards, and stop."""


def run(arguments: Sequence[str]) -> int:
    config, options = parse("train", arguments, TrainOptions, DESCRIPTION)
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
            train(config, callbacks=[view])
    except Interrupted:
        raise
    except Exception as error:
        if view.run is None:
            raise
        raise RunFailed(view.run.directory) from error
    return 0
