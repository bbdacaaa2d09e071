"""TRL's side, in a virtual environment of its own: the same weights, prompts, lengths, updates and precision."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import warnings
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.common import (
    CLIP_HIGH,
    CLIP_LOW,
    LEARNING_RATE,
    SCENARIOS,
    distinct_reward,
    iteration_record,
    peak_memory_bytes,
    problems,
    task_reward,
)


class Clock(TrainerCallback):  # type: ignore[misc]
    """Cuts the run into iterations of ``updates`` steps."""

    def __init__(self, updates: int) -> None:
        self.updates = updates
        self.start = 0.0
        self.rollout = 0.0
        self.tokens = 0
        self.case = "fixed"
        self.rows: list[dict[str, Any]] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self.updates == 0 and not self.start:
            self.begin()

    def begin(self) -> None:
        self.start, self.rollout, self.tokens = time.perf_counter(), 0.0, 0

    def end(self) -> None:
        seconds = time.perf_counter() - self.start
        self.rows.append(
            iteration_record(
                case=self.case,
                seconds=seconds,
                tokens=self.tokens,
                rollout_seconds=self.rollout,
                update_seconds=seconds - self.rollout,
            )
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--scenario", choices=SCENARIOS, default="short")
    parser.add_argument("--model", required=True)
    parser.add_argument("--cases", nargs="+", default=["fixed", "natural"])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    scenario = SCENARIOS[options.scenario]
    cases = ["fixed", *options.cases]
    clock = Clock(scenario.updates)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    rows = [
        {"prompt": [{"role": "user", "content": question}], "answer": answer}
        for question, answer in problems(scenario.prompts * (len(cases) + 1), 0)
    ]

    def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        return distinct_reward(texts) if clock.case == "fixed" else task_reward(texts, answer)

    per_step = scenario.prompts * scenario.group_size // scenario.updates
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=reward,
        train_dataset=Dataset.from_list(rows),
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            use_cpu=True,
            bf16=options.dtype == "bfloat16",
            per_device_train_batch_size=per_step,
            gradient_accumulation_steps=1,
            steps_per_generation=scenario.updates,
            num_generations=scenario.group_size,
            max_completion_length=scenario.tokens,
            max_steps=scenario.updates * len(cases),
            importance_sampling_level="sequence",
            loss_type="grpo",
            epsilon=CLIP_LOW,
            epsilon_high=CLIP_HIGH,
            beta=0.0,
            temperature=1.0,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            shuffle_dataset=False,
            report_to=[],
            logging_steps=1000,
            save_strategy="no",
            disable_tqdm=True,
            gradient_checkpointing=False,
        ),
        callbacks=[clock],
    )
    generate, score = trainer.model.generate, trainer._generate_and_score_completions

    def timed_generate(*args: Any, **kwargs: Any) -> Any:
        if clock.case == "fixed":
            kwargs["min_new_tokens"] = scenario.tokens
        start = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=options.dtype == "bfloat16"):
            ids = generate(*args, **kwargs)
        clock.rollout += time.perf_counter() - start
        return ids

    def timed_batch(inputs: Any) -> Any:
        if clock.rows or clock.start:  # the batch before this one is finished
            if clock.start and clock.tokens:
                clock.end()
            clock.case = cases[len(clock.rows)] if len(clock.rows) < len(cases) else clock.case
        clock.begin()
        batch = score(inputs)
        clock.tokens += int(batch["completion_mask"].sum())
        return batch

    trainer.model.generate = timed_generate
    trainer._generate_and_score_completions = timed_batch
    trainer.train()
    clock.end()
    print(
        "RESULT " + json.dumps({"side": "trl", "iterations": clock.rows[1:], "peak_memory_bytes": peak_memory_bytes()})
    )


if __name__ == "__main__":
    main()
