"""Prompts from Parquet files and from Hugging Face data sets: on the hub, in a folder, in memory or streamed."""

from __future__ import annotations

import importlib
import random
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from gspo.config import as_path
from gspo.errors import ConfigError, DataError, first_line
from gspo.tasks.lists import fingerprint, prompt_key
from gspo.tasks.rows import prompt_from_row, prompts_from_rows
from gspo.types import Prompt

BLOCK_ROWS = 1024
"""Rows of a stream that are read and shuffled together."""

_BETWEEN_PARTS = re.compile(r":(?![^\[]*\])")
"""The colons of NAME:CONFIG:SPLIT, but not one inside a slice such as train[:100]."""


def read_parquet(path: Path, prompt_column: str = "prompt") -> list[Prompt]:
    """Rows of a file (or a folder of parts). Raises DataError with file and row."""
    parquet = _library("pyarrow.parquet", str(path))
    if not path.exists():
        raise DataError(f"The prompt file {path} does not exist.")
    try:
        rows = parquet.read_table(path).to_pylist()
    except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
        raise DataError(f"The prompt file {path} cannot be read as Parquet: {first_line(error)}.") from error
    return prompts_from_rows(map(_tidy, rows), str(path), prompt_column)


def read_dataset(
    spec: str, prompt_column: str = "prompt", *, streaming: bool = False, most: int | None = None
) -> list[Prompt]:
    """Rows of ``hf:NAME[:split]``, all or the first ``most``. Raises DataError for what is not there or no prompt."""
    rows = _read(open_dataset(spec, streaming=streaming), spec)
    return prompts_from_rows(islice(rows, most), spec, prompt_column)


def open_dataset(spec: str, *, streaming: bool) -> Any:
    """The ``Dataset`` or ``IterableDataset`` of ``hf:NAME``, ``hf:NAME:SPLIT`` or ``hf:NAME:CONFIG:SPLIT``.

    NAME is a name on the hub, or a folder (it starts with ``.``, ``/`` or ``~``): one that ``save_to_disk`` wrote, or
    one with JSON, Parquet or CSV files. Without a split: the only one, else ``train``. Raises DataError.
    """
    datasets = _library("datasets", spec)
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    name, config, split = _parts(spec)
    folder = as_path(name) if name.startswith((".", "/", "~")) else None
    if folder is not None and not folder.is_dir():
        raise DataError(f"{spec}: there is no folder {folder.absolute()}.")
    try:
        if folder is not None and any((folder / file).is_file() for file in ("state.json", "dataset_dict.json")):
            found = datasets.load_from_disk(str(folder))
        else:
            found = datasets.load_dataset(str(folder or name), config, split=split, streaming=streaming)
    except Exception as error:  # the library raises what its many back ends raise
        raise DataError(f"{spec} cannot be loaded: {first_line(error)}.{_advice(error)}") from error
    chosen = _choose(found, split, spec)
    if streaming and hasattr(chosen, "to_iterable_dataset"):
        chosen = chosen.to_iterable_dataset()
    return chosen.with_format(None)


class StreamSource:
    """Rows of a data set that is never held in memory, without end.

    With ``shuffle`` each block of ``BLOCK_ROWS`` rows is put in a seeded order that differs between epochs; blocks
    follow each other as in the data set. The cursor holds where the block began, so that going on reads one block
    again and nothing before it. ``skip`` has the keys (``prompt_key``) of held-out prompts. ``fingerprint`` knows the
    first block's rows only. Raises DataError when a row is no prompt and when no row is left.
    """

    def __init__(
        self, dataset: Any, spec: str, seed: int, shuffle: bool, prompt_column: str, skip: Collection[str] = ()
    ) -> None:
        self.dataset, self.spec, self.seed, self.shuffle = dataset, spec, seed, shuffle
        self.prompt_column, self.skip = prompt_column, frozenset(skip)
        self._beginning = dataset.state_dict()
        self._go_to(0, 0, self._beginning)
        self._read_block()
        self.fingerprint = fingerprint(self._block, spec, seed, shuffle, sorted(self.skip))

    def take(self, count: int) -> list[Prompt]:
        taken: list[Prompt] = []
        while len(taken) < count:
            if self._position == len(self._block):
                self._read_block()
            step = self._block[self._position : self._position + count - len(taken)]
            self._position += len(step)
            taken += step
        return taken

    def state_dict(self) -> dict[str, Any]:
        row, start = self._here
        return {"epoch": self._epoch, "row": row, "dataset": start, "position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._go_to(state["epoch"], state["row"], state["dataset"])
        self._read_block()
        self._position = state["position"]

    def _go_to(self, epoch: int, row: int, start: dict[str, Any]) -> None:
        self._epoch, self._next = epoch, (row, start)
        self.dataset.load_state_dict(start)
        self._rows = iter(self.dataset)

    def _read_block(self) -> None:
        """The next block that has a prompt to train on; after the last one the first of the next epoch."""
        self._block: list[Prompt] = []
        self._position = 0
        ends = 0
        while not self._block:
            self._here = self._next
            rows = list(_read(islice(self._rows, BLOCK_ROWS), self.spec))
            if not rows:
                ends += 1
                if ends == 2:
                    raise DataError(f"{self.spec} has no row to train on: it is empty, or all rows are held out.")
                self._go_to(self._epoch + 1, 0, self._beginning)
                continue
            self._next = self._here[0] + len(rows), self.dataset.state_dict()
            self._block = self._prompts(rows)

    def _prompts(self, rows: Sequence[Any]) -> list[Prompt]:
        first = self._here[0]
        prompts = [
            prompt_from_row(row, f"{self.spec}, row {n}", f"{self.spec}/{n}", self.prompt_column)
            for n, row in enumerate(rows, first + 1)
        ]
        if self.shuffle:
            random.Random(f"{self.seed}/{self._epoch}/{first}").shuffle(prompts)
        return [prompt for prompt in prompts if prompt_key(prompt) not in self.skip]


def _parts(spec: str) -> tuple[str, str | None, str | None]:
    """(name, config, split) of hf:NAME[[:CONFIG]:SPLIT]."""
    parts = _BETWEEN_PARTS.split(spec.removeprefix("hf:"))
    if len(parts) > 3 or not all(parts):
        raise ConfigError(f"{spec!r} must be hf:NAME, hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT.")
    return parts[0], parts[1] if len(parts) == 3 else None, parts[-1] if len(parts) > 1 else None


def _choose(found: Any, split: str | None, spec: str) -> Any:
    """The split of what was loaded, which is a data set or a dictionary of them."""
    if not isinstance(found, Mapping):
        if split not in (None, str(found.split)):
            raise DataError(f"{spec}: there is one split in it, {str(found.split)!r}; write {spec.rpartition(':')[0]}.")
        return found
    wanted = split or (next(iter(found)) if len(found) == 1 else "train")
    if wanted not in found:
        raise DataError(
            f"{spec}: there is no split {wanted!r}; there is: {', '.join(found)}. Name one: "
            f"{spec if split is None else spec.rpartition(':')[0]}:{next(iter(found))}."
        )
    return found[wanted]


def _read(rows: Iterable[Any], spec: str) -> Iterator[Any]:
    """The rows, tidied. Raises DataError when the library cannot go on."""
    iterator = iter(rows)
    while True:
        try:
            row = next(iterator)
        except StopIteration:
            return
        except Exception as error:  # the network, a decoder, a broken file
            raise DataError(f"{spec} cannot be read on: {first_line(error)}.") from error
        yield _tidy(row)


def _tidy(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row without the keys of chat messages that are None: tables give each message all keys of any message."""
    return {key: [_set_keys(item) for item in value] if _is_chat(value) else value for key, value in row.items()}


def _is_chat(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, Mapping) and "role" in item for item in value)


def _set_keys(message: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if value is not None or key == "content"}


def _library(name: str, what: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"{what} needs {name.partition('.')[0]!r}, which is not installed. Run: pip install 'gspo[data]'"
        ) from error


def _advice(error: BaseException) -> str:
    if isinstance(error, ConnectionError):
        return (
            " The hub cannot be reached from here (or HF_HUB_OFFLINE is set). Load the data set once where it can, save"
            " it with save_to_disk, and give the folder: hf:./folder."
        )
    return ""
