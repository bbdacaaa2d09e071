"""Every error a user can meet.

Each one is a sentence that says what was expected, what was found, where, and what to do. Each also inherits
the built-in exception it stands for, so ``except ValueError`` written against the standard library still works.
The command line turns a ``GspoError`` into that sentence and an exit code; anything else is a bug of ours.
"""

from __future__ import annotations

import re

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


class GspoError(Exception):
    """Base of all errors raised on purpose by gspo."""


class ConfigError(GspoError, ValueError):
    """A setting is unknown, of the wrong type, out of range, or does not go with another one."""


class DataError(GspoError, ValueError):
    """Prompts cannot be read, or a row does not have the form that is asked for."""


class RewardError(GspoError, RuntimeError):
    """A reward function raised, or returned something that is not one score an answer."""


class EngineError(GspoError, RuntimeError):
    """The inference engine cannot start, died, or answered with something unusable."""


class WeightSyncError(EngineError):
    """The engine does not sample from the weights that were published."""


class PackingError(GspoError, ValueError):
    """Rows do not fit the packed layout or are inconsistent with each other."""


class DivergenceError(GspoError, ArithmeticError):
    """Training produced NaN or infinite gradients too many times in a row."""


class CheckpointError(GspoError, OSError):
    """A checkpoint cannot be written, is incomplete, or does not fit the run."""


class Interrupted(GspoError):
    """The run was asked to stop (Ctrl-C, SIGTERM) and saved what it had; ``directory`` is where."""

    def __init__(self, directory: object) -> None:
        super().__init__(
            f"Interrupted; everything up to here is saved in {directory}. Go on with: gspo train --resume {directory}"
        )
        self.directory = directory


def brief(value: object, most: int = 60) -> str:
    """A value as a sentence shows it: its repr on one line, cut, without addresses. Never raises."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # a __repr__ of the user's, a number too long to print, lists nested without end
        text = f"a {type(value).__name__}"
    text = _ADDRESS.sub("", text)
    return text if len(text) <= most else text[: most - 4] + " ..."


def first_line(error: BaseException) -> str:
    """What an error says: its first line, printable, without a stop at the end; else its type. Never raises."""
    try:
        text = str(error).strip()
    except Exception:
        text = ""
    line = text.splitlines()[0].rstrip(". ") if text else type(error).__name__
    return _ADDRESS.sub("", "".join(char if char.isprintable() else ascii(char)[1:-1] for char in line))
