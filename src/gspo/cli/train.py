"""``gspo train CONFIG.toml [--section.key VALUE ...] [--dry-run]``"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from gspo.cli.options import load, parse
from gspo.config import Config

DESCRIPTION = (
    "Train with GSPO. Settings come from CONFIG.toml; each can be given here instead, under the same name. "
    "--dry-run prints the config as it would run, checks prompts and rewards, and stops."
)


def run(arguments: Sequence[str]) -> int:
    dry = "--dry-run" in arguments or "--dry_run" in arguments
    config, flags = load("train", [a for a in arguments if a not in ("--dry-run", "--dry_run")])
    config = parse("train", Config, config, flags, DESCRIPTION)
    if dry:
        from gspo.tasks import load_task

        load_task(config)
        print(config.resolved().to_toml())
        return 0
    from gspo.cli.live import LiveView, PlainView
    from gspo.training.loop import train

    view = LiveView() if sys.stdout.isatty() else PlainView()
    with view:
        train(config, callbacks=[view])
    return 0
