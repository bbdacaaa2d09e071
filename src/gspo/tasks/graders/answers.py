"""What all graders share: the text of a completion, the part of it that is the answer, the gold column."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from gspo.errors import RewardError

_TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_END_MARKS = re.compile(r"(?:\s*(?:<\|[^<>|]{1,40}\|>|</s>|<eos>))+\s*$")


def text_of(completion: Any) -> str:
    """The text of a completion: text, or chat messages as TRL passes them. End tokens at its end are removed."""
    if not isinstance(completion, str):
        completion = completion[-1]["content"] if completion else ""
    return _END_MARKS.sub("", completion or "")


def answer_part(text: str) -> str:
    """The last ``<answer>...</answer>`` after the thinking; without one, all that follows the thinking.

    The thinking ends with the last ``</think>``. Thinking that is not closed (the answer was cut) leaves nothing.
    """
    _, closed, after = text.rpartition("</think>")
    if not closed and "<think>" in text:
        return ""
    if closed and "<think>" in after:
        return ""
    tagged = _TAGGED.findall(after)
    return (tagged[-1] if tagged else after).strip()


def golds(grader: str, rows: int, *columns: tuple[str, Sequence[Any] | None]) -> list[Any]:
    """One gold value a row, from the first of the columns that has one; None where no column does.

    Raises RewardError when no prompt of the batch has any of these columns.
    """
    given = [values for _, values in columns if values is not None]
    if not given:
        names = " or ".join(repr(name) for name, _ in columns)
        raise RewardError(
            f"The grader {grader} needs a column {names} with the right answer, which no prompt has. Add it to the "
            "rows of task.prompts."
        )
    return [next((values[row] for values in given if values[row] is not None), None) for row in range(rows)]
