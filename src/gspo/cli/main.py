"""``gspo VERB ...``: find the verb, run it, and turn errors into one sentence and an exit code."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence

import gspo
from gspo.errors import ConfigError, DataError, GspoError, Interrupted

VERBS = {
    "train": "train a model with GSPO",
    "eval": "measure a model on held-out prompts",
    "sample": "show answers of a model",
}

USAGE = f"""gspo {gspo.__version__}: train language models with Group Sequence Policy Optimization

usage: gspo VERB CONFIG.toml [--section.key VALUE ...]

{chr(10).join(f"  {verb:<8}{text}" for verb, text in VERBS.items())}

  gspo VERB --help lists every setting; flags are named like the keys of the config file.
  Exit codes: 0 done, 1 the run failed, 2 bad usage or config, 130 interrupted after saving."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE)
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version"):
        print(gspo.__version__)
        return 0
    verb, rest = arguments[0], arguments[1:]
    if verb not in VERBS:
        near = difflib.get_close_matches(verb, VERBS, 1)
        return _complain(f"there is no verb {verb!r}." + (f" Did you mean '{near[0]}'?" if near else "\n\n" + USAGE), 2)
    try:
        run = importlib.import_module(f"gspo.cli.{verb}").run
        return int(run(rest))
    except Interrupted as stop:
        return _complain(str(stop), 130)
    except (ConfigError, DataError) as error:
        return _complain(str(error), 2)
    except GspoError as error:
        return _complain(str(error), 1)
    except KeyboardInterrupt:
        return _complain("stopped at once; what was saved before is intact.", 130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:  # a bug of ours: say so in a line, keep the traceback
        with tempfile.NamedTemporaryFile("w", prefix="gspo-", suffix=".log", delete=False) as file:
            traceback.print_exc(file=file)
        return _complain(
            f"this is a bug in gspo: {type(error).__name__}: {error}. The traceback is in {file.name}; do report it",
            1,
        )


def _complain(sentence: str, code: int) -> int:
    print(f"gspo: {sentence}", file=sys.stderr)
    return code
