"""Prompts from JSON-lines files: one object a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gspo.errors import DataError
from gspo.tasks.rows import prompt_from_row
from gspo.types import Prompt


def read_jsonl(path: Path, prompt_column: str = "prompt") -> list[Prompt]:
    """Rows of a file; a row without an id is named by its line. Raises DataError with file and line."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors begin a file with a byte order mark
    except FileNotFoundError:
        raise DataError(f"The prompt file {path} does not exist.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"The prompt file {path} cannot be read: {error}.") from None
    prompts = [
        prompt_from_row(_row(line, f"{path}, line {number}"), f"{path}, line {number}", name, prompt_column)
        for number, line in enumerate(text.split("\n"), 1)
        for name in [f"{path.stem}/{number}"]
        if line.strip()
    ]
    if not prompts:
        raise DataError(f"The prompt file {path} is empty; it needs one JSON object a line, with a {prompt_column!r}.")
    return prompts


def _row(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not valid JSON ({error.msg} at column {error.colno}).") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, nesting without end
        raise DataError(f"{where}: not usable JSON ({error}).") from None
