"""The run directory: what is written, and how it is read back.

    config.toml  environment.json  log.txt
    metrics.jsonl   one line an iteration       rollouts/ITERATION.jsonl   its answers
    eval.jsonl      one line an evaluation      evals/ITERATION.jsonl      its answers
    checkpoints/ITERATION/

Strict JSON everywhere: NaN and infinities become null.
"""

from __future__ import annotations

import errno
import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from gspo.config import as_path
from gspo.errors import CheckpointError, ConfigError, DataError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

ESCAPE = "backslashreplace"
"""What UTF-8 has no bytes for (a file name that is not UTF-8, on the command line) becomes JSON's own escape."""


class RunDirectory:
    """One run's files."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, parent: str | Path, name: str) -> RunDirectory:
        """Make a new run folder ``parent/name``; a number is added when that is taken, so no run is overwritten.

        Raises ConfigError when the folder cannot be written.
        """
        parent = as_path(parent)
        number = 1
        while True:
            path = parent / (name if number == 1 else f"{name}-{number}")
            try:
                path.mkdir(parents=True)
                (path / "checkpoints").mkdir()
            except FileExistsError:
                if not os.path.lexists(path):  # what exists is above it: a file, or a link to nothing
                    raise ConfigError(
                        f"run.directory: {parent} is not a folder and cannot become one. Choose another one."
                    ) from None
                number += 1
                continue
            except OSError as error:
                raise ConfigError(
                    f"run.directory: the run folder {path} cannot be made: {error.strerror}. Choose a writable folder "
                    "with --run.directory."
                ) from None
            return cls(path)

    @contextmanager
    def only_writer(self) -> Iterator[None]:
        """Inside the block no other process writes here. Raises CheckpointError when one does.

        The lock is the process's own: the system drops it with the process, and children do not inherit it.
        """
        if fcntl is None:
            yield
            return
        with _disk_errors(self.path):
            file = (self.path / ".lock").open("a+", encoding="utf-8")
        with file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in (errno.EACCES, errno.EAGAIN):
                    file.seek(0)
                    raise CheckpointError(
                        f"{self.path} is being written by another run (process {file.read().strip() or 'unknown'}). "
                        "Wait for it, stop it, or start a new run."
                    ) from None  # other errors: a file system that knows no locks
            with suppress(OSError):  # a full disk shows elsewhere
                os.ftruncate(file.fileno(), 0)
                os.write(file.fileno(), f"{os.getpid()}\n".encode())
            yield

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def write_environment(self, facts: Mapping[str, Any]) -> None:
        self._replace("environment.json", to_json(facts, indent=2) + "\n")

    def write_config(self, toml: str) -> None:
        self._replace("config.toml", toml)

    def _replace(self, name: str, text: str) -> None:
        """Old or new content, never half of one."""
        partial = self.path / f"{name}.partial"
        with _disk_errors(self.path / name):
            partial.write_text(text, encoding="utf-8", errors=ESCAPE)
            partial.replace(self.path / name)

    def append_metrics(self, line: Mapping[str, Any]) -> None:
        _append(self.path / "metrics.jsonl", [line])

    def append_eval(self, line: Mapping[str, Any], answers: Iterable[Mapping[str, Any]]) -> None:
        """The line of eval.jsonl, and its answers in a file of their own."""
        self._write_rows(Path("evals") / f"{line['iteration']}.jsonl", answers)
        _append(self.path / "eval.jsonl", [line])

    def write_rollouts(self, iteration: int, rows: Iterable[Mapping[str, Any]]) -> None:
        self._write_rows(Path("rollouts") / f"{iteration}.jsonl", rows)

    def _write_rows(self, name: Path, rows: Iterable[Mapping[str, Any]]) -> None:
        text = "".join(to_json(row) + "\n" for row in rows)
        with _disk_errors(self.path / name):
            (self.path / name).parent.mkdir(exist_ok=True)
            (self.path / name).write_text(text, encoding="utf-8", errors=ESCAPE)

    def cut_after(self, iteration: int) -> None:
        """Forget what was recorded of later iterations: a run that goes on from ``iteration`` makes them again."""
        for name in ("metrics.jsonl", "eval.jsonl"):
            path = self.path / name
            if path.exists():
                kept = [row for row in _whole_lines(path) if row["iteration"] <= iteration]
                self._replace(name, "".join(to_json(row) + "\n" for row in kept))
        for folder in ("rollouts", "evals"):
            for path in (self.path / folder).glob("*.jsonl"):
                if path.stem.isdecimal() and int(path.stem) > iteration:
                    with _disk_errors(path):
                        path.unlink()

    def log(self, text: str) -> None:
        with (
            suppress(OSError),
            (self.path / "log.txt").open("a", encoding="utf-8", errors=ESCAPE) as file,
        ):  # a full disk shows elsewhere
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")

    def metrics(self) -> list[dict[str, Any]]:
        return read_jsonl(self.path / "metrics.jsonl")

    def evals(self) -> list[dict[str, Any]]:
        return read_jsonl(self.path / "eval.jsonl")

    def eval_answers(self, iteration: int) -> list[dict[str, Any]]:
        return read_jsonl(self.path / "evals" / f"{iteration}.jsonl")

    def rollouts(self, iteration: int) -> list[dict[str, Any]]:
        return read_jsonl(self.path / "rollouts" / f"{iteration}.jsonl")


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Strict JSON; what JSON has no number for becomes null."""
    return json.dumps(_finite(value), ensure_ascii=False, allow_nan=False, indent=indent)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if value is None or isinstance(value, (str, int)):
        return value
    return str(value)


def _append(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """One write, flushed to disk: a killed run leaves whole lines."""
    with _disk_errors(path), path.open("a", encoding="utf-8", errors=ESCAPE) as file:
        file.write("".join(to_json(line) + "\n" for line in lines))
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be written: {error.strerror or error}. Checkpoints that are there are untouched. Free some "
            "disk space, then go on with --resume."
        ) from error


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    """Rows of a file whose last line may have been cut by a kill, and that a hand may have been in."""
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        with suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict) and isinstance(row.get("iteration"), int):
                rows.append(row)
    return rows


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSON-lines file, empty if there is none. Raises DataError naming the line that is not JSON."""
    if not path.exists():
        return []
    rows = []
    lines = path.read_text(encoding="utf-8").split("\n")  # and nowhere else: models write other ends of lines
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise DataError(f"{path}, line {number} is not valid JSON: {error.msg}.") from None
    return rows
