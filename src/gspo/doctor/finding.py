"""One line of the doctor's report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """``fail``: the run would be worthless or end early. ``warn``: it would go on, less well than it could.

    ``text`` says what was found, ``advice`` what to do (empty when all is well), ``measured`` holds the numbers.
    """

    name: str
    level: Level
    text: str
    advice: str = ""
    measured: dict[str, Any] = field(default_factory=dict)


def ok(name: str, text: str, **measured: Any) -> Finding:
    return Finding(name, "ok", text, "", measured)


def warn(name: str, text: str, advice: str, **measured: Any) -> Finding:
    return Finding(name, "warn", text, advice, measured)


def fail(name: str, text: str, advice: str, **measured: Any) -> Finding:
    return Finding(name, "fail", text, advice, measured)
