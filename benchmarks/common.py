"""What both sides of the comparison share: scenarios, prompts, rewards. No gspo and no TRL in here."""

from __future__ import annotations

import hashlib
import random
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

CLIP_LOW, CLIP_HIGH, LEARNING_RATE = 3e-4, 4e-4, 1e-6


@dataclass(frozen=True)
class Scenario:
    """One rollout batch: prompts x group_size answers of at most ``tokens`` tokens, ``updates`` optimizer steps."""

    name: str
    model: str
    tokens: int
    prompts: int = 8
    group_size: int = 8
    updates: int = 4


SCENARIOS = {
    "short": Scenario("short", "smollm2", 96),
    "long": Scenario("long", "smollm2", 512),
    "moe": Scenario("moe", "moe", 96),
}


def problems(count: int, seed: int) -> list[tuple[str, str]]:
    """(question, answer) of two-digit additions."""
    rng = random.Random(seed)
    pairs = [(rng.randint(10, 99), rng.randint(10, 99)) for _ in range(count)]
    return [(f"Calculate {a} + {b}. Reply with just the number.", str(a + b)) for a, b in pairs]


def distinct_reward(texts: Sequence[str]) -> list[float]:
    """A pseudo-random reward of the text: every group has a signal, so that every answer must be computed."""
    return [int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) / 16**8 for text in texts]


def task_reward(texts: Sequence[str], answers: Sequence[str]) -> list[float]:
    """1 if the answer holds the sum: what a real run sees, groups without signal included."""
    return [float(answer in text) for text, answer in zip(texts, answers, strict=True)]


def peak_memory_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def iteration_record(**values: Any) -> dict[str, Any]:
    """Seconds and tokens of one iteration, with the rates that are compared."""
    rollout, update = values["rollout_seconds"], values["update_seconds"]
    return values | {
        "rollout_tokens_per_second": values["tokens"] / rollout,
        "update_tokens_per_second": values["tokens"] / update,
    }
