"""``gspo doctor CONFIG.toml [--section.key VALUE ...] [--json]``"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from gspo.cli.options import Switch, parse
from gspo.errors import ConfigError
from gspo.records import to_json

DESCRIPTION = (
    "Check a run before hours are spent on it: machine, memory, chat format, rewards, signal, noise against the clip "
    "band, weights, time. Samples at most eight prompts; changes nothing. Exit code 1: the run would be worthless."
)
MARKS = {"ok": "[green]ok[/]  ", "warn": "[yellow]look[/]", "fail": "[red]fail[/]"}


@dataclass(frozen=True)
class DoctorOptions:
    json: Switch = False
    """Print the findings as one JSON list."""


def run(arguments: Sequence[str]) -> int:
    as_json = "--json" in arguments
    try:
        config, _ = parse("doctor", arguments, DoctorOptions, DESCRIPTION)
    except ConfigError as error:
        return show([{"name": "config", "level": "fail", "text": str(error), "advice": "", "measured": {}}], as_json)
    from gspo.doctor import examine

    errors = Console(stderr=True)
    with Progress(console=errors, transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("answers", visible=False)

        def progress(stage: str, done: int, total: int) -> None:
            bar.update(task, description=stage, completed=done, total=total, visible=True)

        return show((asdict(finding) for finding in examine(config, progress)), as_json)


def show(findings: Iterable[dict[str, object]], as_json: bool) -> int:
    """Print findings as they come; returns the exit code."""
    console = Console(highlight=False, soft_wrap=True)
    seen = []
    for finding in findings:
        seen.append(finding)
        if as_json:
            continue
        console.print(f"{MARKS[str(finding['level'])]}  [bold]{finding['name']}[/]: {escape(str(finding['text']))}")
        if finding["advice"]:
            console.print(f"      -> {escape(str(finding['advice']))}")
    failed = [finding for finding in seen if finding["level"] == "fail"]
    looks = [finding for finding in seen if finding["level"] == "warn"]
    if as_json:
        print(to_json(seen))
    elif failed:
        console.print(f"{len(failed)} of {len(seen)} checks failed: this run would be worthless or end early.")
    else:
        console.print(f"{len(seen)} checks, {len(looks)} to look at." if looks else f"{len(seen)} checks, all well.")
    return 1 if failed else 0
