"""``gspo VERB ...``: find the verb and run it."""

from __future__ import annotations

import difflib
import importlib
import io
import os
import sys
from collections.abc import Sequence

import gspo
from gspo.cli.failures import complain, report

VERBS = {
    "train": "train a model with GSPO",
    "eval": "measure a model on held-out prompts",
    "sample": "show answers of a model",
    "doctor": "check a run before hours are spent on it",
    "coldstart": "fine-tune a model on worked solutions before training",
    "export": "write a run's policy as a Hugging Face folder",
}

USAGE = f"""gspo {gspo.__version__}: train language models with Group Sequence Policy Optimization

usage: gspo VERB CONFIG.toml [--section.key VALUE ...]

{chr(10).join(f"  {verb:<10}{text}" for verb, text in VERBS.items())}

  gspo VERB --help lists every setting; flags are named like the keys of the config file.
  --traceback (or GSPO_TRACEBACK=1) shows where in the code an error came from.
  Exit codes: 0 done, 1 the run failed, 2 bad usage or config, 130 interrupted after saving."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that is not UTF-8 gets a question mark, not an error
            stream.reconfigure(errors="replace")
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE)
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version"):
        print(gspo.__version__)
        return 0
    verb, rest = arguments[0], [argument for argument in arguments[1:] if argument != "--traceback"]
    if verb not in VERBS:
        near = difflib.get_close_matches(verb, VERBS, 1)
        return complain(f"there is no verb {verb!r}." + (f" Did you mean '{near[0]}'?" if near else "\n\n" + USAGE), 2)
    show_traceback = len(rest) < len(arguments) - 1 or os.environ.get("GSPO_TRACEBACK", "0") not in ("", "0")
    try:
        return int(importlib.import_module(f"gspo.cli.{verb}").run(rest))
    except SystemExit:  # the flag parser has printed help or what is wrong
        raise
    except BaseException as error:
        return report(error, show_traceback=show_traceback)
