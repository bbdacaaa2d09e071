"""Engine and trainer on the same weights: what is measured, said and decided, and whose old log-probs are used."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from gspo.algorithm.batch import StepBatch
from gspo.config import Config
from gspo.errors import ConfigError
from gspo.rollout.collect import collect
from gspo.rollout.system import load_system
from gspo.sync.publish import Publisher
from gspo.tasks import RewardSuite
from gspo.training.callbacks import Callback
from gspo.training.iteration import Iteration, IterationResult, run_iteration
from gspo.training.loop import train
from gspo.training.trainer import OldScore, Trainer

TINY = {
    "model.path": "builtin:tiny", "model.dtype": "float32", "task.prompts": "builtin:vowels",
    "task.max_prompt_tokens": 96, "rollout.prompts_per_iteration": 4, "rollout.group_size": 4, "rollout.max_tokens": 12,
    "optimizer.learning_rate": 1e-3, "eval.every": 0, "run.iterations": 3,
}  # fmt: skip


def spread(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(sum(ids)) for ids in completion_ids]


def one_iteration(number: int = 2, source: str = "trainer", **values: Any) -> tuple[IterationResult, list[int]]:
    """(its result, tokens of each forward pass that the updates made)."""
    config = Config().with_values(TINY | values)
    system = load_system(config)
    system.task.rewards = RewardSuite([spread], [1.0])
    trainer, publisher = Trainer(system.policy, config), Publisher(system.policy, system.engine)
    iteration = Iteration(number, collect(system, config, number), source)
    calls: list[int] = []
    handle = system.policy.backbone.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    publisher.publish = lambda version: handle.remove() or 0.0  # type: ignore[func-returns-value,method-assign]
    return run_iteration(iteration, trainer, publisher, config, lambda *_: None), calls


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def test_the_engines_old_logprobs_save_a_pass_and_put_its_rounding_into_the_ratio() -> None:
    """A bfloat16 engine and a float32 trainer: ratios of the first update are exp(mean gap), not 1."""
    ours, passes = one_iteration(**{"engine.dtype": "bfloat16"})
    theirs, fewer = one_iteration(source="engine", **{"engine.dtype": "bfloat16"})
    assert len(passes) == 7 and len(fewer) == 4
    first = [row for row in theirs.rows[:4] if row["ratio"] is not None]
    for row in first:
        assert row["old_logprobs"] == row["rollout_logprobs"]
        gap = mean([a - b for a, b in zip(row["logprobs"], row["rollout_logprobs"], strict=True)])
        assert row["ratio"] == pytest.approx(math.exp(gap), abs=1e-6) and row["ratio"] != 1.0
    assert [row["ratio"] for row in ours.rows[:4]] == [1.0] * 4


def test_what_is_measured_follows_from_the_recorded_logprobs() -> None:
    done, _ = one_iteration(**{"engine.dtype": "bfloat16"})
    rows = [row for row in done.rows if row["old_logprobs"] is not None]
    tokens = [a - b for row in rows for a, b in zip(row["old_logprobs"], row["rollout_logprobs"], strict=True)]
    sequences = [[a - b for a, b in zip(row["old_logprobs"], row["rollout_logprobs"], strict=True)] for row in rows]
    found = done.metrics
    assert found["mismatch/mean_abs"] == pytest.approx(mean([abs(x) for x in tokens]), rel=1e-3)
    assert found["mismatch/kl_k1"] == pytest.approx(-mean(tokens), rel=1e-3, abs=1e-7)
    assert found["mismatch/kl_k3"] == pytest.approx(mean([math.exp(x) - 1 - x for x in tokens]), rel=0.05)
    gaps = sorted(abs(mean(row)) for row in sequences)
    assert found["mismatch/sequence_p50"] == pytest.approx(gaps[math.ceil(len(gaps) / 2) - 1], rel=1e-3)
    assert found["mismatch/sequence_p99"] == pytest.approx(gaps[-1], rel=1e-3)
    outside = mean([float(not 1 - 3e-4 <= math.exp(mean(row)) <= 1 + 4e-4) for row in sequences])
    assert found["mismatch/outside_band"] == pytest.approx(outside, abs=1e-9) and outside > 0.1
    weights = [math.exp(sum(row)) for row in sequences]
    size = sum(weights) ** 2 / len(weights) / sum(w * w for w in weights)
    assert found["mismatch/effective_sample_size"] == pytest.approx(size, rel=1e-3)


def test_the_noise_floor_is_measured_once_and_small_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    done, passes = one_iteration(1)
    assert done.metrics["noise/floor"] < 1e-5 and len(passes) > 7
    honest, calls = Trainer.old_scores, []

    def noisy(self: Trainer, step: StepBatch) -> dict[int, OldScore]:
        """The second pass of the measurement is off by 0.01 nat at every token."""
        calls.append(step)
        off = 0.01 if len(calls) == 5 else 0.0
        return {row: OldScore([x + off for x in score.logprobs]) for row, score in honest(self, step).items()}

    monkeypatch.setattr(Trainer, "old_scores", noisy)
    assert one_iteration(1)[0].metrics["noise/floor"] == pytest.approx(0.01, rel=1e-3)
    assert len(calls) == 5
    monkeypatch.undo()
    assert "noise/floor" not in one_iteration(2)[0].metrics


class Messages(Callback):
    def __init__(self) -> None:
        self.said: list[str] = []

    def on_message(self, text: str) -> None:
        self.said.append(text)


@pytest.mark.parametrize(("dtype", "source"), [("float32", "engine"), ("bfloat16", "trainer")])
def test_auto_decides_once_on_what_it_measured(tmp_path: Path, dtype: str, source: str) -> None:
    watch = Messages()
    values = TINY | {"algorithm.old_logprobs": "auto", "engine.dtype": dtype, "run.directory": str(tmp_path)}
    result = train(Config().with_values(values), callbacks=[watch])
    decisions = [text for text in watch.said if "old_logprobs = auto" in text]
    assert len(decisions) == 1 and f"auto: {source}, because" in decisions[0]
    scored = [row["time/old_logprobs_seconds"] > 1e-4 for row in result.metrics]
    assert scored == ([True, False, False] if source == "engine" else [True] * 3)


def test_the_run_says_when_rounding_exceeds_the_band(tmp_path: Path) -> None:
    """Case: engine log-probs of a bfloat16 sampler against a band of 3e-4 at a dozen tokens."""
    watch = Messages()
    values = TINY | {"algorithm.old_logprobs": "engine", "engine.dtype": "bfloat16", "run.directory": str(tmp_path)}
    train(Config().with_values(values), callbacks=[watch])
    notes = [text for text in watch.said if text.startswith("clip band 0.0003 / 0.0004")]
    assert len(notes) == 2, "after the first iteration and at the end"
    assert all("The noise exceeds the band" in note and "a band of about" in note for note in notes)


@pytest.mark.parametrize("kind", ["mask_sequence", "truncate_sequence", "mask_token", "truncate_token"])
@pytest.mark.parametrize("objective", ["gspo", "grpo"])
def test_corrections_leave_an_exact_engine_alone(kind: str, objective: str) -> None:
    plain, _ = one_iteration(**{"algorithm.objective": objective})
    corrected, _ = one_iteration(**{"algorithm.correction": kind, "algorithm.objective": objective})
    assert corrected.metrics["objective/loss"] == pytest.approx(plain.metrics["objective/loss"], abs=1e-5)
    assert corrected.metrics["optimizer/grad_norm"] == pytest.approx(plain.metrics["optimizer/grad_norm"], rel=1e-3)
    assert corrected.metrics["mismatch/rho_mean"] == pytest.approx(1.0, abs=1e-4)


def test_a_mask_that_leaves_nothing_is_said_and_moves_no_weight(tmp_path: Path) -> None:
    watch = Messages()
    values = TINY | {
        "algorithm.correction": "mask_sequence", "algorithm.correction_cap": 1.0000001, "engine.dtype": "bfloat16",
        "run.directory": str(tmp_path), "run.iterations": 2,
    }  # fmt: skip
    result = train(Config().with_values(values), callbacks=[watch])
    assert result.metrics[0]["optimizer/updates_masked"] + result.metrics[0]["optimizer/updates_without_signal"] == 4
    assert result.metrics[0]["mismatch/corrected_fraction"] == 1.0
    assert any("mask_sequence masked every answer" in text for text in watch.said)
    assert result.metrics[1]["policy/kl_old"] == 0.0, "weights moved"


def test_a_correction_needs_the_trainers_logprobs() -> None:
    with pytest.raises(ConfigError, match="does not make the trainer's"):
        Config().with_values({"algorithm.correction": "mask_token", "algorithm.old_logprobs": "engine"})
    with pytest.raises(ConfigError, match="correction_cap must be above 1"):
        Config().with_values({"algorithm.correction_cap": 1.0})
