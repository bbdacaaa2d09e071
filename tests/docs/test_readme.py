"""The README's example runs as it stands, on a small model; its links and keys exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from gspo.cli.main import VERBS, main
from gspo.config import Config, known_keys

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The three files of the README in an empty folder, with a few more rows."""
    monkeypatch.chdir(tmp_path)
    row = json.loads(blocks("json")[0])
    rows = [row | {"prompt": f"{row['prompt']} ({number})"} for number in range(30)]
    (tmp_path / "capitals.jsonl").write_text("\n".join(map(json.dumps, rows)))
    rewards = next(block for block in blocks("python") if "rewards.py" in block)
    (tmp_path / "rewards.py").write_text(rewards)
    (tmp_path / "capitals.toml").write_text(blocks("toml")[0])
    return tmp_path


SMALL = [
    "--model.path",
    "builtin:tiny",
    "--rollout.max_tokens",
    "6",
    "--run.iterations",
    "1",
    "--task.max_prompt_tokens",
    "90",
]


def test_the_example_runs(example: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "capitals.toml", *SMALL]) == 0
    capsys.readouterr()
    metrics = json.loads((example / "runs" / "capitals" / "metrics.jsonl").read_text())
    assert set(metrics) >= {"reward/correct", "reward/brief"}
    assert metrics["reward/mean"] == pytest.approx(0.8 * metrics["reward/correct"] + 0.2 * metrics["reward/brief"])
    checkpoint = ["--model.path", "runs/capitals/checkpoints/1", *SMALL[2:]]
    assert main(["eval", "capitals.toml", *checkpoint]) == 0
    assert main(["sample", "capitals.toml", *checkpoint, "--prompt", "What is the capital of Peru?"]) == 0
    assert "What is the capital of Peru?" in capsys.readouterr().out


def test_the_python_lines_run(example: Path) -> None:
    code = next(block for block in blocks("python") if "Config.load" in block)
    config = Config.load("capitals.toml").with_values(
        {"model.path": "builtin:tiny", "rollout.max_tokens": 6, "run.iterations": 1, "task.max_prompt_tokens": 90}
    )
    config.save("capitals.toml")
    exec(compile(code, "README.md", "exec"), {})
    assert (example / "runs").is_dir()


def test_keys_verbs_and_links_exist() -> None:
    for text in (
        README,
        (ROOT / "ARCHITECTURE.md").read_text(),
        (ROOT / "docs" / "adr" / "0001-decisions-of-the-first-version.md").read_text(),
    ):
        for section, key in re.findall(
            r"`(model|task|eval|rollout|engine|algorithm|optimizer|batch|run|track)\.([a-z_]+)", text
        ):
            assert f"{section}.{key}" in known_keys() or key == "py", f"{section}.{key}"
    for verb in re.findall(r"^gspo (\w+)", README, re.MULTILINE):
        assert verb in VERBS
    for link in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / link).exists(), link
