"""What a run tells the outside while it goes: subclass ``Callback`` and override what you need.

Callbacks watch; they never change the run. An exception in one ends the run like any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo.config import Config
from gspo.types import Group


@dataclass(frozen=True)
class RunInfo:
    """What is known once everything is loaded and before the first rollout.

    ``facts`` are lines for people: model and size, precision, attention, sampling values, warnings.
    """

    config: Config
    directory: Path
    facts: Sequence[str]
    start_iteration: int = 0


class Callback:
    """All methods do nothing; override the ones of interest."""

    def on_start(self, run: RunInfo) -> None:
        """Everything is loaded; the first evaluation comes next."""

    def on_progress(self, stage: str, done: int, total: int) -> None:
        """Inside an iteration or evaluation: ``stage`` is 'rollout', 'reward', 'update' or 'eval'."""

    def on_iteration(self, metrics: Mapping[str, Any], groups: Sequence[Group]) -> None:
        """An iteration is done: its line of metrics.jsonl and its rollouts."""

    def on_eval(self, record: Mapping[str, Any], answers: Sequence[Mapping[str, Any]]) -> None:
        """An evaluation is done: its line of eval.jsonl, and one row an answer (prompt, text, reward, correct)."""

    def on_message(self, text: str) -> None:
        """A sentence for the user: a warning, a checkpoint written, what was skipped."""

    def on_end(self, reason: str) -> None:
        """The run is over: 'finished', 'interrupted' or 'failed'."""
