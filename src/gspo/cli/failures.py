"""Every error of the command line becomes one sentence and an exit code here."""

from __future__ import annotations

import os
import sys
import tempfile
import time
import traceback
from pathlib import Path

from gspo.errors import ConfigError, DataError, GspoError, Interrupted


class RunFailed(Exception):
    """A run that had started was ended by ``__cause__``; the traceback belongs in its directory."""

    def __init__(self, directory: Path) -> None:
        super().__init__(str(directory))
        self.directory = directory


def complain(sentence: str, code: int) -> int:
    print(f"gspo: {sentence}", file=sys.stderr)
    return code


def report(error: BaseException, *, show_traceback: bool = False) -> int:
    """Say what went wrong in a sentence, keep the traceback where it can be found; returns the exit code."""
    directory = None
    if isinstance(error, RunFailed) and error.__cause__ is not None:
        directory, error = error.directory, error.__cause__
    if isinstance(error, BrokenPipeError):  # the reader of our output left; say nothing more into the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    if isinstance(error, Interrupted):
        return complain(str(error), 130)
    if isinstance(error, KeyboardInterrupt):
        return complain("stopped at once; what was saved before is intact.", 130)
    if show_traceback:
        traceback.print_exception(error)
    log = _keep(error, directory)
    if isinstance(error, GspoError):
        where = f" (traceback: {log})" if log else ""
        return complain(f"{error}{where}", 2 if isinstance(error, (ConfigError, DataError)) else 1)
    kept = f"The traceback is in {log}" if log else "Run it again with --traceback"
    return complain(f"this is a bug in gspo: {type(error).__name__}: {error}. {kept}; do report it.", 1)


def _keep(error: BaseException, directory: Path | None) -> Path | None:
    """Write the traceback to the run's log; without a run, a bug's goes to a temporary file. None: not written."""
    text = "".join(traceback.format_exception(error))
    try:
        if directory is not None:
            with (directory / "log.txt").open("a", encoding="utf-8") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}")
            return directory / "log.txt"
        if isinstance(error, GspoError):  # the sentence says it all
            return None
        with tempfile.NamedTemporaryFile("w", prefix="gspo-", suffix=".log", delete=False) as kept:
            kept.write(text)
        return Path(kept.name)
    except OSError:  # a full disk must not hide the error itself
        return None
