"""Supervised fine-tuning before training: the loss is the plain one, the folder loads, every key does something."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gspo.cli.main import main
from gspo.config import Config
from gspo.errors import ConfigError, DataError, DivergenceError
from gspo.policy import tiny
from gspo.tasks.builtin import BUILTIN, BuiltinSource
from gspo.training.coldstart import SEED_OFFSET, ColdstartResult, coldstart

BASE: dict[str, Any] = {
    "model.path": "builtin:tiny-moe-1x32-2of4",
    "model.dtype": "float32",
    "task.prompts": "builtin:vowels",
    "task.max_prompt_tokens": 40,
    "rollout.max_tokens": 16,
    "eval.every": 0,
    "coldstart.steps": 3,
    "coldstart.batch_size": 4,
}


def fine_tune(folder: Path, **values: Any) -> ColdstartResult:
    given = {key.replace("__", "."): value for key, value in values.items()}
    return coldstart(Config().with_values(BASE | given), folder)


def fingerprint(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    first, second = (tmp_path_factory.mktemp("base") / "model" for _ in range(2))
    fine_tune(first)
    fine_tune(second)
    assert fingerprint(first) == fingerprint(second), "two equal runs differ"
    return fingerprint(first)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("coldstart.steps", 4),
        ("coldstart.batch_size", 5),
        ("coldstart.learning_rate", 1e-3),
        ("coldstart.noise", 0.5),
        ("coldstart.router_aux_weight", 1.0),
        ("coldstart.solution_column", "answer"),
        ("run.seed", 1),
    ],
)
def test_turning_it_changes_the_weights(base: str, tmp_path: Path, key: str, value: Any) -> None:
    fine_tune(tmp_path / "model", **{key: value, "task.prompts": "builtin:vowels"})
    same = key == "coldstart.solution_column"  # of this task the two columns are equal
    assert (fingerprint(tmp_path / "model") == base) == same


def test_the_loss_is_the_plain_cross_entropy(tmp_path: Path) -> None:
    """Of transformers' own loss on each row, weighted by its tokens."""
    model, tokenizer = tiny.build("builtin:tiny-2x32")
    total, count = 0.0, 0
    for prompt in BuiltinSource(BUILTIN["vowels"], SEED_OFFSET).take(4):
        asked = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt.content}], add_generation_prompt=True, return_dict=False
        )
        answer = [*tokenizer(prompt.columns["solution"])["input_ids"], tokenizer.eos_token_id]
        ids = torch.tensor([[*asked, *answer]])
        labels = torch.tensor([[-100] * len(asked) + answer])
        total += model(input_ids=ids, labels=labels).loss.item() * len(answer)
        count += len(answer)
    result = fine_tune(tmp_path / "model", **{"model.path": "builtin:tiny-2x32", "coldstart.steps": 1})
    assert result.loss == pytest.approx([total / count], rel=1e-5)
    assert result.tokens == count


def test_it_learns_and_the_folder_is_plain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "vowels.toml"
    values = BASE | {"model.path": "builtin:tiny-2x32", "coldstart.steps": 40, "coldstart.batch_size": 16}
    values |= {"eval.every": 1, "eval.num_prompts": 16, "run.directory": str(tmp_path), "coldstart.learning_rate": 1e-2}
    Config().with_values(values).save(config)
    assert main(["coldstart", str(config)]) == 0
    folder = tmp_path / "vowels-coldstart"
    said = capsys.readouterr()
    assert f"--model.path {folder}" in said.out
    lines = [line for line in said.err.splitlines() if line.startswith("step ")]
    assert len(lines) == 11 and lines[-1].startswith("step 40 of 40: loss ")  # no terminal: the first and each tenth
    facts = json.loads((folder / "coldstart.json").read_text())
    assert facts["loss"][0] > 4 and facts["loss_last_tenth"] < 2
    assert facts["evaluation"]["num_prompts"] == 16 and facts["evaluation"]["accuracy"] > 0.5
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32 and AutoTokenizer.from_pretrained(folder).chat_template
    assert main(["eval", str(config), "--model.path", str(folder), "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["accuracy"] == facts["evaluation"]["accuracy"]
    assert main(["coldstart", str(config)]) == 2
    assert "exists already" in capsys.readouterr().err


def test_problems_that_do_not_fit_are_left_out_and_counted(tmp_path: Path) -> None:
    result = fine_tune(tmp_path / "model", **{"rollout.max_tokens": 2})
    assert result.too_long > 0 and result.tokens <= 2 * 4 * 3
    with pytest.raises(DataError, match=r"only 0 .*rollout.max_tokens = 1 "):
        fine_tune(tmp_path / "none", **{"rollout.max_tokens": 1})


def test_mistakes_are_sentences(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="exists already"):
        fine_tune(tmp_path)
    with pytest.raises(DataError, match=r"no text in the column 'worked'.*\['answer', 'solution'\]"):
        fine_tune(tmp_path / "model", **{"coldstart.solution_column": "worked"})
    with pytest.raises(DivergenceError, match=r"Lower coldstart.learning_rate"):
        fine_tune(tmp_path / "model", **{"coldstart.learning_rate": 1e29})
    for key, value in (("coldstart.noise", 1.0), ("coldstart.steps", 0), ("coldstart.batch_size", 0)):
        with pytest.raises(ConfigError, match=key):
            Config().with_values({key: value})
    assert not (tmp_path / "model").exists()
