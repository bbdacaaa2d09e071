"""gspo's side: one process, a warm-up iteration and then measured ones; prints one JSON object."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.common import (
    LEARNING_RATE,
    SCENARIOS,
    Scenario,
    distinct_reward,
    iteration_record,
    peak_memory_bytes,
    problems,
    task_reward,
)
from gspo.config import Config
from gspo.engines.base import Sampling
from gspo.rollout.collect import collect
from gspo.rollout.system import System, load_system
from gspo.sync.publish import Publisher
from gspo.tasks import RewardSuite
from gspo.training.iteration import Iteration, run_iteration
from gspo.training.trainer import Trainer
from gspo.types import Prompt


class Problems:
    """Prompts in order, as the other side gets them."""

    fingerprint = "bench"

    def __init__(self) -> None:
        self.rows = problems(10_000, 0)
        self.position = 0

    def take(self, count: int) -> list[Prompt]:
        rows = self.rows[self.position : self.position + count]
        self.position += count
        return [Prompt(str(number), question, {"answer": answer}) for number, (question, answer) in enumerate(rows)]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def distinct(completions: list[str], **_: Any) -> list[float]:
    return distinct_reward(completions)


def correct(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    return task_reward(completions, answer)


class FixedLength(System):
    """No end token: every answer has the full number of tokens."""

    def sampling(self, config: Config, temperature: float) -> Sampling:
        return Sampling(config.rollout.max_tokens, temperature, frozenset())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--scenario", choices=SCENARIOS, default="short")
    parser.add_argument("--model", required=True)
    parser.add_argument("--cases", nargs="+", default=["fixed", "natural"])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--max_tokens", type=int, default=900)
    parser.add_argument("--old_logprobs", choices=["trainer", "engine"], default="trainer")
    options = parser.parse_args()
    scenario = SCENARIOS[options.scenario]
    config = Config().with_values(
        {
            "model.path": options.model,
            "task.max_prompt_tokens": 96,
            "rollout.max_tokens": scenario.tokens,
            "rollout.prompts_per_iteration": scenario.prompts,
            "rollout.group_size": scenario.group_size,
            "algorithm.updates_per_rollout": scenario.updates,
            "optimizer.learning_rate": LEARNING_RATE,
            "batch.max_tokens": options.max_tokens,
            "model.dtype": options.dtype,
            "algorithm.old_logprobs": options.old_logprobs,
            "run.iterations": 1000,
        }
    )
    system = load_system(config)
    trainer = Trainer(system.policy, config)
    publisher = Publisher(system.policy, system.engine)
    source = Problems()
    fixed = FixedLength(**vars(system))
    fixed.task = replace(system.task, train=source, rewards=RewardSuite([distinct], [1.0]))
    system.task = replace(system.task, train=source, rewards=RewardSuite([correct], [1.0]))
    rows = []
    for number, case in enumerate(["fixed", *options.cases]):
        start, cpu = time.perf_counter(), time.process_time()
        chosen = fixed if case == "fixed" else system
        iteration = Iteration(number + 1, collect(chosen, config, number + 1), options.old_logprobs)
        metrics = run_iteration(iteration, trainer, publisher, config, lambda *_: None).metrics
        seconds = time.perf_counter() - start
        if number:
            rows.append(record(case, metrics, seconds) | {"cpu_seconds": time.process_time() - cpu})
    result = {"side": "gspo", "iterations": rows, "peak_memory_bytes": peak_memory_bytes()}
    result["limits"] = limits(system, config, scenario)
    print("RESULT " + json.dumps(result))


def record(case: str, metrics: dict[str, Any], seconds: float) -> dict[str, Any]:
    return iteration_record(
        case=case,
        seconds=seconds,
        tokens=metrics["rollout/completion_tokens"],
        rollout_seconds=metrics["time/rollout_seconds"],
        update_seconds=metrics["time/old_logprobs_seconds"] + metrics["time/update_seconds"],
        update_only_seconds=metrics["time/update_seconds"],
        length_mean=metrics["rollout/length_mean"],
        no_signal_fraction=metrics["group/no_signal_fraction"],
    )


@torch.inference_mode()
def limits(system: System, config: Config, scenario: Scenario) -> dict[str, float]:
    """What the machine can do at the shapes that occur: the products of an update, and those of a decode step."""
    weights = [m.weight for m in system.policy.model.modules() if isinstance(m, torch.nn.Linear)]
    tokens = min(config.batch.max_tokens, 1536)
    shapes = {tuple(weight.shape): weight for weight in weights if weight.shape[0] < 20_000}
    flops = seconds = 0.0
    for (rows, columns), weight in shapes.items():
        x = torch.randn(tokens, columns).to(weight.dtype)
        count = sum(tuple(other.shape) == (rows, columns) for other in weights)
        flops += count * 2.0 * tokens * rows * columns
        seconds += count * best(lambda x=x, weight=weight: F.linear(x, weight))
    batch = scenario.prompts * scenario.group_size
    inputs = {columns: torch.randn(batch, columns).to(weights[0].dtype) for columns in {w.shape[1] for w in weights}}

    def products() -> None:
        for weight in weights:
            F.linear(inputs[weight.shape[1]], weight)

    body = sum(weight.numel() for weight in weights if weight.shape[0] < 20_000)
    head = sum(weight.numel() for weight in weights if weight.shape[0] >= 20_000)
    return {
        "matrix_flops_per_second": flops / seconds,
        "decode_products_seconds": best(products),
        "body_parameters": body,
        "head_parameters": head,
    }


def best(function: Any, repeats: int = 7) -> float:
    """Median seconds of a call, after a warm-up."""
    function()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return sorted(times)[repeats // 2]


if __name__ == "__main__":
    main()
