"""Ten planted faults are found, a sound run has nothing to be said about it, and nothing is changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gspo.cli.main import main
from gspo.config import Config, ModelConfig
from gspo.doctor import examine
from gspo.doctor.finding import Finding
from gspo.engines.native import NativeEngine
from gspo.policy.load import load_policy

SOUND = {
    "model.path": "builtin:tiny", "model.dtype": "float32", "task.prompts": "builtin:vowels",
    "task.max_prompt_tokens": 96, "rollout.max_tokens": 200, "rollout.prompts_per_iteration": 8, "eval.num_prompts": 16,
}  # fmt: skip


def findings(**values: Any) -> dict[str, Finding]:
    return {finding.name: finding for finding in examine(Config().with_values(SOUND | values))}


def troubles(found: dict[str, Finding]) -> dict[str, str]:
    return {name: finding.level for name, finding in found.items() if finding.level != "ok"}


def test_a_sound_run_is_met_with_silence(tmp_path: Path) -> None:
    found = findings(**{"run.directory": str(tmp_path / "runs")})
    assert troubles(found) == {}
    assert len(found) == 14
    assert list(tmp_path.iterdir()) == [], "something was written"
    assert found["reward"].measured["gold"] > found["reward"].measured["junk"]
    assert found["signal"].measured == {"groups": 8, "with_signal": 8}


def a_model(folder: Path, change: Callable[[Any, Any], None]) -> str:
    """The tiny model with a changed tokenizer, saved."""
    policy = load_policy(ModelConfig(path="builtin:tiny"))
    change(policy.model, policy.tokenizer)
    policy.model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    return str(folder)


def wrong_end(model: Any, tokenizer: Any) -> None:
    tokenizer.eos_token = tokenizer.pad_token = "<unk>"
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.config.eos_token_id = tokenizer.eos_token_id


def begin_token(model: Any, tokenizer: Any) -> None:
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    tokenizer.chat_template = "<s>" + tokenizer.chat_template
    model.resize_token_embeddings(len(tokenizer))


def rows(folder: Path, **columns: Any) -> str:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"question {n}"} | columns) + "\n" for n in range(300)))
    return str(path)


def reward(folder: Path, code: str) -> tuple[str, ...]:
    (folder / "rewards.py").write_text(f"def score(completions, **columns):\n    return {code}\n")
    return (f"{folder / 'rewards.py'}:score",)


def test_wrong_end_token(tmp_path: Path) -> None:
    found = findings(**{"model.path": a_model(tmp_path, wrong_end)})
    assert troubles(found)["chat format"] == "fail" and "<end>" in found["chat format"].text


def test_double_begin_token(tmp_path: Path) -> None:
    model = a_model(tmp_path / "m", begin_token)
    assert troubles(findings(**{"model.path": model})) == {}
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"<s>question {n}"}) + "\n" for n in range(300)))
    values = {"task.prompts": str(path), "task.reward": reward(tmp_path, "[float(len(c)) for c in completions]")}
    found = findings(**{"model.path": model} | values)
    assert troubles(found) == {"chat format": "fail"} and "begin token '<s>' of its own" in found["chat format"].text


def test_no_signal(tmp_path: Path) -> None:
    values = {"task.prompts": rows(tmp_path), "task.reward": reward(tmp_path, "[1.0] * len(completions)")}
    found = findings(**values)
    assert troubles(found) == {"signal": "fail"} and "0 of 8 groups" in found["signal"].text


def test_answers_cut_too_soon() -> None:
    found = findings(**{"rollout.max_tokens": 2})
    assert troubles(found)["answer length"] == "warn" and "cut at 2 tokens" in found["answer length"].text


def test_too_few_held_out_prompts_to_tell_a_change_from_chance(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"prompt": f"Name a vowel, please ({n}).", "answer": "a"}) for n in range(30)))
    values = {"task.prompts": str(rows), "task.reward": ("text",), "rollout.max_tokens": 4}
    few = findings(**values)["held-out"]
    assert few.level == "warn" and few.text.startswith("3 prompts; ") and "at most 0.29" in few.text
    assert findings(**values, **{"eval.every": 0})["held-out"].level == "ok"


def test_a_reward_that_fails_on_gold(tmp_path: Path) -> None:
    """It looks for the answer in a text that is a list of messages, or has another format in mind."""
    code = "[float(len(c) % 7) if c != 'Paris' else 0.0 for c in completions]"
    found = findings(**{"task.prompts": rows(tmp_path, answer="Paris"), "task.reward": reward(tmp_path, code)})
    assert troubles(found)["reward"] == "fail" and "scores 0" in found["reward"].text


def test_a_reward_that_raises(tmp_path: Path) -> None:
    found = findings(**{"task.prompts": rows(tmp_path), "task.reward": reward(tmp_path, "1 / 0")})
    assert troubles(found)["reward"] == "fail" and "ZeroDivisionError" in found["reward"].text


def test_an_engine_on_old_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NativeEngine, "load_weights", lambda self, version: None)
    found = findings(**{"engine.dtype": "bfloat16"})
    assert troubles(found)["weights reach the engine"] == "fail"


def test_a_band_for_the_other_kind_of_ratio() -> None:
    assert troubles(findings(**{"algorithm.clip_low": 0.2, "algorithm.clip_high": 0.2})) == {"clip range": "warn"}
    grpo = {"algorithm.objective": "grpo", "algorithm.clip_low": 3e-4, "algorithm.clip_high": 4e-4}
    assert troubles(findings(**grpo)) == {"clip range": "warn"}
    assert troubles(findings(**{"algorithm.objective": "grpo"})) == {}


def test_too_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gspo.doctor.machine.memory_now_and_available", lambda: (1 << 20, 2 << 20))
    found = findings()
    assert troubles(found) == {"memory": "fail"} and "batch.max_tokens" in found["memory"].advice
    assert "signal" not in found, "it went on to what the memory is too small for"


@pytest.mark.parametrize("directory", ["/proc/runs", "/dev/null/runs"])
def test_a_disk_that_cannot_be_written(directory: str) -> None:
    found = findings(**{"run.directory": directory})
    assert troubles(found) == {"disk": "fail"} and "cannot be written" in found["disk"].text


def test_noise_above_the_band_is_said_where_it_is_in_the_ratio() -> None:
    quiet = findings(**{"engine.dtype": "bfloat16"})
    assert quiet["noise"].level == "ok" and quiet["noise"].measured["outside_band"] > 0
    loud = findings(**{"engine.dtype": "bfloat16", "algorithm.old_logprobs": "engine"})
    assert troubles(loud) == {"noise": "warn"} and "rounding alone clips" in loud["noise"].advice


def test_activations_are_counted_as_the_allocator_sees_them() -> None:
    """What the tiny model keeps for each token: between its widest layer alone and twenty times that a layer."""
    from gspo.doctor.machine import activation_bytes
    from gspo.training.trainer import Trainer

    policy = load_policy(ModelConfig(path="builtin:tiny"))
    before = [p.clone() for p in policy.model.parameters()]
    found = activation_bytes(Trainer(policy, Config().with_values(SOUND)))
    assert 2 * 128 * 4 < found < 2 * 20 * 128 * 4
    assert all(torch.equal(a, b) for a, b in zip(before, policy.model.parameters(), strict=True))
    assert all(p.grad is None for p in policy.model.parameters())
    policy.recompute = True
    fewer = activation_bytes(Trainer(policy, Config().with_values(SOUND)))
    assert found / 2 < fewer < found  # two layers: one of them whole, and the inputs of both


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "c.toml"
    Config().with_values(SOUND | {"run.directory": str(tmp_path)}).save(config)
    assert main(["doctor", str(config)]) == 0
    assert "14 checks, all well." in capsys.readouterr().out
    assert main(["doctor", str(config), "--json", "--algorithm.clip_high", "0.2", "--algorithm.clip_low", "0.2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [f["name"] for f in found if f["level"] == "warn"] == ["clip range"]
    assert main(["doctor", str(config), "--rollout.top_p", "0.9"]) == 1
    assert "rollout.top_p = 0.9 is refused" in capsys.readouterr().out
    assert main(["doctor", str(config), "--model.path", "/nowhere", "--json"]) == 1
    assert "there is no folder" in json.loads(capsys.readouterr().out)[-1]["text"]
