"""The examples of docs/data.md load; its table of sources and its keys are real."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gspo.config import Config, known_keys
from gspo.tasks import load_task
from gspo.tasks.builtin import BUILTIN

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "data.md").read_text()
TOML = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
ROWS = [json.loads(line) for line in re.search(r"```json\n(.*?)```", PAGE, re.DOTALL).group(1).splitlines()]  # type: ignore[union-attr]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the examples name."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text("def correct(completions, answer):\n    return [1.0] * len(answer)\n")
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    table = pa.Table.from_pylist([{"prompt": f"question {n}", "answer": str(n)} for n in range(20)])
    (tmp_path / "folder").mkdir()
    for name in ("questions.parquet", "folder/train.parquet"):
        pq.write_table(table, tmp_path / name)


@pytest.mark.parametrize("number", range(len(TOML)))
def test_an_example_loads(files: None, number: int) -> None:
    config = Config.from_toml(TOML[number]).with_values({"eval.num_prompts": 4})
    if config.task.prompts.startswith("hf:openai/"):  # on the hub, which tests do not reach
        assert config.task.prompt_column == "question" and config.eval.prompts
        return
    if config.task.prompts.startswith("reasoning-gym:"):
        pytest.importorskip("reasoning_gym")
    task = load_task(config)
    assert task.heldout and task.train.take(1)[0].columns["answer"]


def test_the_python_example_runs(files: None) -> None:
    made: dict[str, object] = {}
    exec(re.search(r"```python\n(.*?)```", PAGE, re.DOTALL).group(1), made)  # type: ignore[union-attr]
    assert [prompt.columns for prompt in made["prompts"]] == [{"answer": "5"}, {"answer": "8"}]  # type: ignore[attr-defined]


def test_names_are_real() -> None:
    for section, key in re.findall(r"`(task|eval|rollout|run)\.([a-z_]+)", PAGE):
        assert f"{section}.{key}" in known_keys()
    listed = re.search(r"with their rewards: ([a-z_, ]+)", PAGE)
    assert listed is not None and set(listed.group(1).strip().split(", ")) == set(BUILTIN)
    assert len(TOML) >= 6
