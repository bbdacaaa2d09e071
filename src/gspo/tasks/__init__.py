"""What is asked and how it is judged: prompt sources and reward functions.

The names are imported when first used: a reward function's process starts with little more than its own module.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gspo.tasks.rewards import RewardSuite, Score
    from gspo.tasks.rows import prompts_from_rows
    from gspo.tasks.task import PromptSource, Task, load_task

_PUBLIC = {
    "PromptSource": "gspo.tasks.task",
    "RewardSuite": "gspo.tasks.rewards",
    "Score": "gspo.tasks.rewards",
    "Task": "gspo.tasks.task",
    "load_task": "gspo.tasks.task",
    "prompts_from_rows": "gspo.tasks.rows",
}
__all__ = ["PromptSource", "RewardSuite", "Score", "Task", "load_task", "prompts_from_rows"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'gspo.tasks' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)
