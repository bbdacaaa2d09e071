"""What is asked and how it is judged."""

from gspo.tasks.rewards import RewardSuite, Score
from gspo.tasks.rows import prompts_from_rows
from gspo.tasks.task import PromptSource, Task, load_task

__all__ = ["PromptSource", "RewardSuite", "Score", "Task", "load_task", "prompts_from_rows"]
