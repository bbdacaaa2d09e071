"""How the cost of a completion token changes with group size, answer length, head tile, decoder batch and threads.

    python -m benchmarks.scaling

One process, the demo's model, random tokens; medians of three. Prints tables, writes
benchmarks/results/scaling-DTYPE.json.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.bench import hardware
from gspo.config import Config
from gspo.engines.base import Request, Sampling
from gspo.engines.native import NativeEngine
from gspo.metrics import Means
from gspo.packing import Row, pack_step
from gspo.rollout.system import System, load_system
from gspo.training.trainer import Trainer

PROMPT_TOKENS = 256
"""Longer than the demo's, so that what sharing a prompt saves can be seen."""


def main() -> None:
    config = Config().with_values({"batch.max_tokens": 4096, "task.max_prompt_tokens": 300})
    system = load_system(config)
    trainer = Trainer(system.policy, config)
    threads = range(1, torch.get_num_threads() + 1)
    curves: dict[str, dict[int, float]] = {}
    for title, sizes, measure in (
        (
            "update: ms a completion token by group size (64 tokens an answer, 256 a prompt)",
            (2, 4, 8, 16),
            lambda size: update(trainer, groups=16 // size, size=size, length=64),
        ),
        (
            "update: ms a completion token by answer length (1,024 tokens in all)",
            (64, 128, 256, 512, 1024),
            lambda length: update(trainer, groups=1, size=1024 // length, length=length),
        ),
        (
            "update: ms a completion token by vocabulary chunk",
            (512, 1024, 2048, 4096, 8192, 49152),
            lambda chunk: update(
                Trainer(system.policy, config.with_values({"batch.vocab_chunk": chunk})), groups=1, size=8, length=64
            ),
        ),
        (
            "update: ms a completion token by threads",
            threads,
            with_threads(lambda: update(trainer, groups=1, size=8, length=64)),
        ),
        ("decode: tokens a second by batch", (1, 2, 4, 8, 16, 32, 64, 128), lambda batch: decode(system, batch)),
        ("decode at batch 64: tokens a second by threads", threads, with_threads(lambda: decode(system, 64))),
    ):
        curves[title] = {}
        for size in track(sizes, description=title.split(" (")[0]):
            curves[title][size] = measure(size)
        table = Table(title=title, title_justify="left")
        for size in curves[title]:
            table.add_column(str(size), justify="right")
        table.add_row(*(f"{value:.2f}" if value < 100 else f"{value:.0f}" for value in curves[title].values()))
        Console().print(table)
    dtype = str(system.policy.dtype).removeprefix("torch.")
    target = Path(__file__).parent / "results" / f"scaling-{dtype}.json"
    target.write_text(json.dumps({"curves": curves, "dtype": dtype, "hardware": hardware()}, indent=2) + "\n")


def update(trainer: Trainer, *, groups: int, size: int, length: int) -> float:
    """Milliseconds of forward and backward a completion token."""
    generator = torch.Generator().manual_seed(0)

    def ids(count: int) -> list[int]:
        return torch.randint(5, 40_000, (count,), generator=generator).tolist()

    rows = []
    for _ in range(groups):
        prompt = ids(PROMPT_TOKENS)
        for number in range(size):
            rows.append(Row(prompt, ids(length), [True] * length, 1.0 if number % 2 else -1.0, [-1.0] * length))
    step = pack_step(rows, max_tokens=trainer.config.batch.max_tokens)

    def once() -> Any:
        result = trainer.forward_backward(step, Means())
        trainer.optimizer.clear()
        return result

    return 1000 * seconds(once) / (groups * size * length)


def decode(system: System, batch: int, tokens: int = 32) -> float:
    """Completion tokens a second."""
    engine = NativeEngine(system.policy, max_batch=batch)
    requests = [Request(list(range(100, 140)), 1, (number,)) for number in range(batch)]
    taken = seconds(lambda: engine.generate(requests, Sampling(tokens, 1.0, frozenset())))
    return batch * tokens / taken


def with_threads(measure: Callable[[], float]) -> Callable[[int], float]:
    def measured(count: int) -> float:
        before = torch.get_num_threads()
        torch.set_num_threads(count)
        try:
            return measure()
        finally:
            torch.set_num_threads(before)

    return measured


def seconds(function: Callable[[], Any]) -> float:
    function()
    times = []
    for _ in range(3):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return median(times)


if __name__ == "__main__":
    main()
