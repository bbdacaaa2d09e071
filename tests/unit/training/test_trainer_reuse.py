"""A GSPOTrainer and its model used again: after a failure, after the run, copied, closed."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from gspo import Callback, Config, GSPOTrainer, train
from gspo.errors import CheckpointError, ConfigError, DataError
from gspo.policy.load import as_policy
from gspo.policy.tiny import build
from gspo.training.loop import RunResult
from gspo.types import Prompt
from tests.light_rewards import vowels

ROWS = [{"prompt": f"say {number}", "answer": str(number)} for number in range(30)]
SMALL = {
    "model.dtype": "float32", "task.max_prompt_tokens": 64, "rollout.prompts_per_iteration": 2,
    "rollout.group_size": 4, "rollout.max_tokens": 6, "algorithm.updates_per_rollout": 2, "eval.num_prompts": 2,
    "optimizer.learning_rate": 1e-2, "run.iterations": 3,
}  # fmt: skip


def here(completions: list[str], **_: Any) -> list[float]:
    return [sum(map(text.count, "aeiou")) / 6 for text in completions]


def trainer(folder: Path, reward: Any = here, model: Any = "builtin:tiny", **more: Any) -> GSPOTrainer:
    values = {"run.directory": folder} | {key.replace("__", "."): v for key, v in more.items() if "__" in key}
    return GSPOTrainer(model, ROWS, reward, SMALL | values, **{k: v for k, v in more.items() if "__" not in k})


def untimed(result: RunResult) -> list[dict[str, Any]]:
    timed = ("time/", "throughput/", "memory/")
    return [{key: value for key, value in line.items() if not key.startswith(timed)} for line in result.metrics]


class RaiseAfter(Callback):
    def __init__(self, iteration: int, error: type[BaseException] = ZeroDivisionError) -> None:
        self.iteration, self.error = iteration, error

    def on_iteration(self, metrics: Mapping[str, Any], groups: Any) -> None:
        if metrics["iteration"] == self.iteration:
            self.iteration = 0
            raise self.error


@pytest.mark.parametrize(
    "settings",
    [
        {"model__dtype": "bfloat16"},
        {"algorithm__kl_weight": 0.1},
        {"algorithm__old_logprobs": "auto", "algorithm__clip_low": 0.1, "algorithm__clip_high": 0.1},
    ],
    ids=["bfloat16", "kl", "auto"],
)
def test_going_on_in_the_same_trainer_is_the_run_that_never_stopped(tmp_path: Path, settings: dict[str, Any]) -> None:
    """The second run's gradients reach its own optimizer, its reference is the starting policy, and what the first
    iteration decided is not lost when a callback raises right after it."""
    straight = trainer(tmp_path / "a", **settings).train()
    broken = trainer(tmp_path / "b", callbacks=[RaiseAfter(1)], **settings)
    with pytest.raises(ZeroDivisionError):
        broken.train()
    result = broken.train(resume=True)
    assert untimed(result) == untimed(straight)
    assert all(line["optimizer/grad_norm"] > 0 for line in result.metrics)


def test_a_pass_that_was_broken_off_leaves_nothing_in_the_gradient(tmp_path: Path) -> None:
    straight = trainer(tmp_path / "a").train()
    broken = trainer(tmp_path / "b", callbacks=[RaiseAfter(2, KeyboardInterrupt)])
    with pytest.raises(KeyboardInterrupt):
        broken.train()
    for parameter in broken.model.parameters():
        parameter.grad = torch.full_like(parameter, 100.0)
    assert untimed(broken.train(resume=True)) == untimed(straight)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_model_is_its_owners_again_afterwards(tmp_path: Path, dtype: str) -> None:
    model, tokenizer = build()
    trainer(tmp_path, model=model, tokenizer=tokenizer, model__dtype=dtype, run__iterations=1).train()
    assert all(parameter.grad is None for parameter in model.parameters())
    model(input_ids=torch.tensor([[5, 6, 7]])).logits.float().square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("way", ["deepcopy", "save"])
def test_a_copy_of_the_model_computes_with_its_own_weights(way: str) -> None:
    model, tokenizer = build()
    model = as_policy(model, tokenizer, "tiny").model
    ids = torch.tensor([[5, 6, 7]])
    before = model(input_ids=ids).logits
    if way == "deepcopy":
        twin = copy.deepcopy(model)
    else:
        torch.save(model, file := io.BytesIO())
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    assert torch.equal(twin(input_ids=ids).logits, before)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(twin(input_ids=ids).logits, before)


def test_resume_takes_a_path_and_nothing_odd(tmp_path: Path) -> None:
    first = trainer(tmp_path, run__iterations=1).train()
    again = trainer(tmp_path, run__iterations=2)
    for odd in (5, None):
        with pytest.raises(ConfigError, match="resume must be True, False, or the folder"):
            again.train(resume=odd)
    with pytest.raises(CheckpointError, match="there is no run"):
        again.train(resume=tmp_path / "none")
    assert again.train(resume=first.directory).directory == first.directory


def test_where_gradients_are_switched_off(tmp_path: Path) -> None:
    """As a notebook does for its own work."""
    with torch.no_grad():
        result = trainer(tmp_path).train()
        assert not torch.is_grad_enabled()
    assert result.metrics[-1]["optimizer/grad_norm"] > 0


def test_closing(tmp_path: Path) -> None:
    with trainer(tmp_path, vowels, run__iterations=1) as open_trainer:
        workers = open_trainer.system.task.rewards.workers
        assert open_trainer.train().iterations == 1
        open_trainer.evaluate()
        assert workers[0]._process is not None
    assert workers[0]._process is None
    open_trainer.close()
    open_trainer.save_model(tmp_path / "kept")
    assert (tmp_path / "kept" / "model.safetensors").is_file()
    for use in (open_trainer.train, open_trainer.evaluate):
        with pytest.raises(ConfigError, match="is closed"):
            use()


def test_a_model_cannot_be_saved_there(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    with trainer(tmp_path) as untrained:
        with pytest.raises(CheckpointError, match="cannot be written: Not a directory"):
            untrained.save_model(blocker / "below")
        with pytest.raises(ConfigError, match="exists already"):
            untrained.save_model(blocker)
        with pytest.raises(ConfigError, match="the home folder"):
            untrained.save_model("~nobody-of-that-name/model")


def _frozen() -> Any:
    model, _ = build()
    return model.requires_grad_(False)


MISTAKES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a number as reward": (lambda: GSPOTrainer("builtin:tiny", ROWS, 5), ConfigError, "found a int"),  # type: ignore[arg-type]
    "one callback": (lambda: trainer(Path(), callbacks=Callback()), ConfigError, "must be a list of gspo.Callback"),
    "a class as callback": (lambda: trainer(Path(), callbacks=[Callback]), ConfigError, "an instance: Callback()"),
    "a key that is a number": (lambda: GSPOTrainer("builtin:tiny", ROWS, here, {5: 3}), ConfigError, "'5'"),  # type: ignore[dict-item]
    "a section and its key": (
        lambda: GSPOTrainer("builtin:tiny", ROWS, here, {"rollout": 5, "rollout.max_tokens": 4}),
        ConfigError,
        "'rollout' is a section",
    ),
    "frozen": (lambda: trainer(Path(), model=_frozen(), tokenizer=build()[1]), ConfigError, "are frozen"),
    "no head": (
        lambda: trainer(Path(), model=build()[0].model, tokenizer=build()[1]),
        ConfigError,
        "no language-model",
    ),
    "no tokenizer": (lambda: trainer(Path(), model=build()[0], tokenizer="x"), ConfigError, "found a str"),
    "weights alone": (
        lambda: train(Config().with_values({"task.prompts": "builtin:vowels", "task.reward_weights": [2.0]})),
        ConfigError,
        "needs task.reward",
    ),
    "columns": (lambda: GSPOTrainer("builtin:tiny", [Prompt("a", "x", None)], here), DataError, "must be a mapping"),  # type: ignore[arg-type]
    "a reserved column": (
        lambda: GSPOTrainer("builtin:tiny", [Prompt("a", "x", {"completions": ["y"]})], here),
        DataError,
        "'completions' is reserved",
    ),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_sentences(case: str) -> None:
    make, kind, part = MISTAKES[case]
    with pytest.raises(kind) as error:
        make()
    assert part in str(error.value)


def test_messages_of_a_prompt_may_be_a_tuple(tmp_path: Path) -> None:
    rows = [Prompt(f"{n}", ({"role": "user", "content": f"say {n}"},), {}) for n in range(20)]
    made = GSPOTrainer("builtin:tiny", rows, here, SMALL | {"run.directory": tmp_path, "run.iterations": 1})
    assert made.train().iterations == 1
