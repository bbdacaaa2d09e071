"""Supervised fine-tuning on worked solutions: the model that reinforcement learning starts from (section 5.1)."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from gspo.config import Config, as_path
from gspo.errors import ConfigError, DataError, DivergenceError
from gspo.evaluation.run import evaluate_system
from gspo.metrics import Means, mean
from gspo.packing import Row, pack_step
from gspo.records import to_json
from gspo.rollout.system import System, load_system
from gspo.training.checkpoint import SLACK, write_model, write_whole
from gspo.training.trainer import Balance, Trainer
from gspo.types import Prompt

SEED_OFFSET = 0xC01D
"""Added to ``run.seed``, so that a run with the same seed does not begin with the very prompts it was fine-tuned on."""
MAX_DRAWS = 20
"""Times the batch size that may be drawn in search of solutions short enough, before it is an error."""

Progress = Callable[[int, int, float], None]


@dataclass(frozen=True)
class ColdstartResult:
    """``loss``: nats a token, by step. ``evaluation``: as in eval.jsonl, None when ``eval.every`` is 0."""

    folder: Path
    loss: list[float]
    tokens: int
    too_long: int
    seconds: float
    evaluation: dict[str, Any] | None


def coldstart(config: Config, folder: str | Path, *, progress: Progress = lambda *_: None) -> ColdstartResult:
    """Fine-tune ``config.model`` on the task's solutions and write a plain Hugging Face folder for ``model.path``.

    The same config and seed give the same weights, bit for bit, on one kind of machine. The folder also has
    coldstart.toml, the config, and coldstart.json, what happened. ``progress(step, steps, loss)`` is called after each
    step. Raises ConfigError when the folder exists, DataError when a row has no solution or hardly one is short enough,
    DivergenceError when a gradient is not finite, CheckpointError when the disk does not take the folder.
    """
    folder, start = as_path(folder), time.perf_counter()
    if folder.exists():
        raise ConfigError(f"{folder} exists already; choose a folder that does not, so that nothing is overwritten.")
    config = _for_fine_tuning(config)
    torch.manual_seed(config.run.seed)
    system = load_system(config)
    trainer = Trainer(system.policy, config)
    solutions = _Solutions(system, config)
    loss: list[float] = []
    for step in range(1, config.coldstart.steps + 1):
        loss.append(_step(trainer, solutions.take(config.coldstart.batch_size), step))
        progress(step, config.coldstart.steps, loss[-1])
    system.engine.load_weights(config.coldstart.steps)
    evaluation = evaluate_system(system, config, 0)[0] if config.eval.every else None
    result = ColdstartResult(
        folder, loss, solutions.tokens, solutions.too_long, time.perf_counter() - start, evaluation
    )
    _write(result, system, trainer, config)
    return result


def _for_fine_tuning(config: Config) -> Config:
    """The same config as the trainer must see it here."""
    settings = config.coldstart
    optimizer = replace(
        config.optimizer,
        learning_rate=settings.learning_rate,
        warmup=max(settings.steps // 10, 1),
        schedule="cosine",
        betas=(0.9, 0.95),
    )
    return replace(
        config,
        run=replace(config.run, seed=config.run.seed + SEED_OFFSET, iterations=settings.steps),
        rollout=replace(config.rollout, temperature=1.0),
        optimizer=optimizer,
        algorithm=replace(
            config.algorithm, updates_per_rollout=1, routing_replay="none", router_aux_weight=0.0, kl_weight=0.0
        ),
    )


class _Solutions:
    """Rows of the task's train side; tokens of a solution are drawn anew with probability ``noise``."""

    def __init__(self, system: System, config: Config) -> None:
        self.system, self.config = system, config
        self.drawn = self.tokens = self.too_long = 0
        ends = system.chat.end_token_ids
        own = system.policy.tokenizer.eos_token_id
        self.end = own if own in ends else min(ends)

    def take(self, count: int) -> list[Row]:
        rows: list[Row] = []
        drawn = 0
        while len(rows) < count:
            if drawn >= MAX_DRAWS * count:
                raise DataError(
                    f"Of {drawn} problems drawn only {len(rows)} have a solution within rollout.max_tokens = "
                    f"{self.config.rollout.max_tokens} and a prompt within task.max_prompt_tokens = "
                    f"{self.config.task.max_prompt_tokens}. Raise them."
                )
            prompts = self.system.task.train.take(count - len(rows))
            drawn += len(prompts)
            rows += [row for row in map(self._row, prompts) if row is not None]
        self.tokens += sum(len(row.token_ids) for row in rows)
        self.too_long += drawn - count
        return rows

    def _row(self, prompt: Prompt) -> Row | None:
        self.drawn += 1
        column = self.config.coldstart.solution_column
        solution = prompt.columns.get(column)
        if not isinstance(solution, str):
            raise DataError(
                f"The prompt {prompt.prompt_id} has no text in the column {column!r}, which gspo coldstart fine-tunes "
                f"on; its columns are {sorted(prompt.columns)}. Set coldstart.solution_column to one with worked "
                "solutions."
            )
        prompt_ids = self.system.chat.encode(prompt)
        ids = list(self.system.policy.tokenizer(solution, add_special_tokens=False)["input_ids"])
        rng = random.Random(f"{self.config.run.seed}/{self.drawn}")
        ids = [rng.choice(ids) if rng.random() < self.config.coldstart.noise else token for token in ids]
        ids.append(self.end)
        if len(prompt_ids) > self.config.task.max_prompt_tokens or len(ids) > self.config.rollout.max_tokens:
            return None
        return Row(prompt_ids, ids, [True] * len(ids), 1.0, [0.0] * len(ids))


def _step(trainer: Trainer, rows: Sequence[Row], number: int) -> float:
    """One update; returns the mean negative log-probability of a solution's token, in nats."""
    config = trainer.config
    step = pack_step(rows, max_tokens=config.batch.max_tokens)
    weight = config.coldstart.router_aux_weight if trainer.policy.routers else 0.0
    balance = Balance(trainer, step, Means()) if weight else None
    total = 0.0
    for batch in step.batches:
        scored = trainer.score(batch, entropy=False, router_logits=balance is not None)
        loss = -scored.logprobs.sum() / step.num_completion_tokens
        total += float(loss.detach())
        if balance is not None:
            loss = loss + weight * balance.loss(batch, scored)
        loss.backward()
    if not trainer.optim_step()[1]:
        raise DivergenceError(
            f"The gradient of step {number} is not finite. Lower coldstart.learning_rate, or set model.dtype = "
            "'float32'."
        )
    return total


def _write(result: ColdstartResult, system: System, trainer: Trainer, config: Config) -> None:
    facts = {
        "loss_last_tenth": mean(result.loss[-max(len(result.loss) // 10, 1) :]),
        "loss": [round(value, 5) for value in result.loss],
        "tokens": result.tokens,
        "too_long": result.too_long,
        "seconds": result.seconds,
        "evaluation": result.evaluation,
    }

    def write(partial: Path) -> None:
        write_model(system.policy, trainer.optimizer, partial)
        (partial / "coldstart.toml").write_text(config.to_toml(), encoding="utf-8")
        (partial / "coldstart.json").write_text(to_json(facts, indent=1) + "\n", encoding="utf-8")

    needed = sum(master.numel() * 4 for master in trainer.optimizer.master) + SLACK
    write_whole(result.folder, write, needed)
