"""Rows of any origin -> Prompts: one rule for files, data sets and Python lists."""

from __future__ import annotations

import datetime
import decimal
import difflib
import fractions
from collections.abc import Iterable, Mapping
from typing import Any

from gspo.errors import DataError, brief
from gspo.types import Prompt

RESERVED = ("completions", "prompts", "completion_ids")
"""Names that reward functions get from the trainer, so that no column may have them."""

MAX_DEPTH = 100
"""Lists and mappings inside each other in one value."""

USUAL_NAMES = ("question", "problem", "query", "instruction", "input", "messages", "text")
"""What data sets call the prompt when they do not call it ``prompt``."""


def prompts_from_rows(
    rows: Iterable[Mapping[str, Any] | Prompt], name: str, prompt_column: str = "prompt"
) -> list[Prompt]:
    """Prompts of dictionaries (or Prompts, which stay as they are); ``name`` says in errors whose rows they are.

    A row has text or chat messages in ``prompt_column``; ``prompt_id`` or ``id`` names it, else its number does. All
    other keys become columns, as plain Python values; a key that a row does not have is not among its columns. Raises
    DataError with the row's number, counted from 1, and when there is no row.
    """
    if isinstance(rows, (str, bytes, Mapping)) or not isinstance(rows, Iterable):
        raise DataError(
            f"{name}: expected rows (dictionaries with a {prompt_column!r}, one for each prompt), found a "
            f"{type(rows).__name__}."
        )
    prompts = [
        prompt_from_row(row, f"{name}, row {number}", f"{name}/{number}", prompt_column)
        for number, row in enumerate(rows, 1)
    ]
    if not prompts:
        raise DataError(f"{name} has no rows; it needs at least one with a {prompt_column!r}.")
    return prompts


def prompt_from_row(row: Any, where: str, name: str, prompt_column: str = "prompt") -> Prompt:
    """One row; ``name`` is its id when it brings none. Raises DataError, which starts with ``where``."""
    if isinstance(row, Prompt):
        check_content(row.content, where)
        if not isinstance(row.columns, Mapping):
            raise DataError(f"{where}: a Prompt's columns must be a mapping, found a {type(row.columns).__name__}.")
        _check_names(row.columns, where)
        return row
    if not isinstance(row, Mapping):
        raise DataError(f"{where}: expected a JSON object with a {prompt_column!r}, found {type(row).__name__}.")
    if prompt_column not in row:
        raise DataError(_no_prompt(row, where, prompt_column))
    _check_names([key for key in row if key != prompt_column], where)
    content = plain(row[prompt_column], where, prompt_column)
    check_content(content, where, prompt_column)
    columns = {_key(key, where, key): plain(value, where, key) for key, value in row.items() if key != prompt_column}
    given = [columns[key] for key in ("prompt_id", "id") if columns.get(key) is not None]
    return Prompt(str(given[0] if given else name), content, columns)


def _check_names(columns: Iterable[Any], where: str) -> None:
    for reserved in set(RESERVED) & set(columns):
        raise DataError(f"{where}: the column {reserved!r} is reserved for what reward functions get; rename it.")


def check_content(content: Any, where: str, prompt_column: str = "prompt") -> None:
    """Raise DataError unless ``content`` is non-empty text or a list of chat messages."""
    if isinstance(content, str) and content.strip():
        return
    if isinstance(content, (list, tuple)) and content and all(_is_message(message) for message in content):
        return
    raise DataError(
        f"{where}: {prompt_column!r} must be text or a list of messages with 'role' and 'content', found "
        f"{brief(content)}."
    )


def _is_message(message: Any) -> bool:
    """Content is text, or a list of parts; it may be None where other keys say something, as tool calls do."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
        return False
    return isinstance(message["content"], (str, list)) or (message["content"] is None and len(message) > 2)


def _no_prompt(row: Mapping[str, Any], where: str, prompt_column: str) -> str:
    keys = [str(key) for key in row]
    near = difflib.get_close_matches(prompt_column, keys, 1, 0.7) or [key for key in USUAL_NAMES if key in keys]
    advice = f" Set task.prompt_column = {near[0]!r} to use that one." if near else ""
    return f"{where}: the row has no {prompt_column!r}; its keys are {sorted(keys)}.{advice}"


def plain(value: Any, where: str, column: str, depth: int = 0) -> Any:
    """The value in JSON's types: arrays and tuples become lists, dates ISO text, decimals and
    fractions text, durations seconds.

    Raises DataError for what has no such form (bytes, images, objects, half a surrogate pair).
    """
    if depth > MAX_DEPTH:
        raise DataError(f"{where}: the column {column!r} is nested more than {MAX_DEPTH} levels deep.")
    if isinstance(value, str) and not value.isascii():
        _check_text(value, where, column)
    if value is None or (isinstance(value, (str, bool, int, float)) and type(value).__module__ == "builtins"):
        return value
    if isinstance(value, Mapping):
        return {_key(key, where, column): plain(item, where, column, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, where, column, depth + 1) for item in value]
    if isinstance(value, (datetime.date, datetime.time)):  # a datetime is a date
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, (decimal.Decimal, fractions.Fraction)):
        return str(value)
    if hasattr(value, "tolist"):  # numpy's and torch's arrays and scalars
        if str(value.dtype).endswith("[ns]"):  # finer than Python's dates, so it would become a number
            value = value.astype(str(value.dtype).replace("[ns]", "[us]"))
        return plain(value.tolist(), where, column, depth + 1)
    raise DataError(
        f"{where}: the column {column!r} holds a {type(value).__name__}, which is neither text, a number, a date nor "
        "made of these. Remove the column, or turn it into one of these before."
    )


def _key(key: Any, where: str, column: str) -> str:
    text = str(key)
    _check_text(text, where, column)
    return text


def _check_text(text: str, where: str, column: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: {brief(column)} holds {text[error.start]!r}, half of a surrogate pair, which is no text. Write "
            "the file anew as UTF-8."
        ) from None
