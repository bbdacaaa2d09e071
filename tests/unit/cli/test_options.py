"""Flags are the config's keys, their help its docstrings, their errors the config's own."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from gspo.cli.main import main
from gspo.cli.options import NoOptions, parse
from gspo.config import Config, known_keys
from gspo.errors import ConfigError

WORDS_AND_VALUE: dict[str, tuple[str, object]] = {
    "model.dtype": ("float32", "float32"),
    "model.attention": ("plain", "plain"),
    "task.reward": ("a:f b:g", ("a:f", "b:g")),
    "task.on_reward_error": ("unscored", "unscored"),
    "task.reward_weights": ("0.5 2", (0.5, 2.0)),
    "eval.samples": ("2", 2),
    "rollout.top_p": ("1.0", 1.0),
    "rollout.top_k": ("0", 0),
    "rollout.stop": ("a b", ("a", "b")),
    "engine.kind": ("vllm", "vllm"),
    "engine.url": ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
    "engine.python": ("python3", "python3"),
    "engine.arguments": ("a b", ("a", "b")),
    "engine.on_death": ("restart", "restart"),
    "engine.dtype": ("float32", "float32"),
    "algorithm.objective": ("grpo", "grpo"),
    "algorithm.clip_low": ("0.125", 0.125),
    "algorithm.clip_high": ("0.125", 0.125),
    "algorithm.advantage": ("none", "none"),
    "algorithm.old_logprobs": ("auto", "auto"),
    "algorithm.correction": ("mask_token", "mask_token"),
    "algorithm.correction_cap": ("7", 7.0),
    "algorithm.routing_replay": ("old", "old"),
    "optimizer.schedule": ("cosine", "cosine"),
    "optimizer.betas": ("0.5 0.75", (0.5, 0.75)),
    "batch.max_tokens": ("8192", 8192),
    "track.kinds": ("a b", ("a", "b")),
}
"""What a key is given where its type alone does not say: a choice, a list, a number with few good values."""


def another(key: str, default: object) -> tuple[str, object]:
    """(words for the command line, what they mean): a value that is not the default."""
    if key in WORDS_AND_VALUE:
        return WORDS_AND_VALUE[key]
    if isinstance(default, bool):
        return str(not default).lower(), not default
    return {str: ("text", "text"), int: ("7", 7), float: ("0.25", 0.25)}[type(default)]


def config_file(folder: Path, text: str = "") -> str:
    path = folder / "my_run.toml"
    path.write_text(text)
    return str(path)


def made(folder: Path, *flags: str, text: str = "") -> Config:
    return parse("train", [config_file(folder, text), *flags], NoOptions, "")[0]


@pytest.mark.parametrize("key", known_keys())
def test_every_key_has_a_flag_that_sets_it(tmp_path: Path, key: str) -> None:
    section, name = key.split(".")
    default = asdict(Config())[section][name]
    words, value = another(key, default)
    if key not in ("rollout.top_p", "rollout.top_k", "engine.kind"):  # these have one good value
        assert value != default
    more = ["--eval.temperature", "1.0"] if key == "eval.samples" else []
    more += ["--engine.kind", "vllm"] if key in ("engine.url", "engine.python", "engine.arguments") else []
    if key == "track.kinds":  # the flag arrives, and is refused: there is no tracker yet
        with pytest.raises(ConfigError, match="no tracker is available"):
            made(tmp_path, f"--{key}", *words.split())
        return
    assert asdict(made(tmp_path, f"--{key}", *words.split(), *more))[section][name] == value


def test_every_flag_has_help_and_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    rows = [line.strip(" │") for line in capsys.readouterr().out.splitlines()]
    for key in known_keys():
        place = next(number for number, row in enumerate(rows) if row.startswith(f"--{key}"))
        entry = rows[place + 1 :]
        end = next((n for n, row in enumerate(entry) if row.startswith(("--", "╰"))), len(entry))
        text = " ".join(entry[:end])
        assert len(text.split("(default:")[0].split()) >= 2, key
        assert "(default:" in text, key


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    text = "[optimizer]\nlearning_rate = 1e-5\n[rollout]\ngroup_size = 4\n"
    config = made(tmp_path, "--optimizer.learning_rate", "3e-5", text=text)
    assert config.optimizer.learning_rate == 3e-5
    assert config.rollout.group_size == 4


@pytest.mark.parametrize("flag", ["--optimizer.learning_rate", "--optimizer.learning-rate"])
def test_hyphens_and_underscores(tmp_path: Path, flag: str) -> None:
    assert made(tmp_path, flag, "3e-5").optimizer.learning_rate == 3e-5
    assert made(tmp_path, f"{flag}=3e-5").optimizer.learning_rate == 3e-5


@pytest.mark.parametrize("flags", [["--task.chat", "false"], ["--task.chat=false"], ["--task.no_chat"]])
def test_switches_read_like_the_file(tmp_path: Path, flags: list[str]) -> None:
    assert made(tmp_path, *flags).task.chat is False
    assert made(tmp_path, "--task.chat", "true", text="[task]\nchat = false\n").task.chat is True


def test_the_run_is_named_after_the_file_unless_it_has_a_name(tmp_path: Path) -> None:
    assert made(tmp_path).run.name == "my_run"
    assert made(tmp_path, text='[run]\nname = "other"\n').run.name == "other"
    assert made(tmp_path, "--run.name", "third").run.name == "third"


def test_a_wrong_value_reads_as_in_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as in_file:
        made(tmp_path, text="[rollout]\ngroup_size = 1\n")
    with pytest.raises(ConfigError) as on_line:
        made(tmp_path, "--rollout.group_size", "1")
    assert str(on_line.value) == str(in_file.value).replace(str(tmp_path / "my_run.toml"), "command line")


def test_a_dry_run_prints_a_config_that_runs_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = config_file(tmp_path, '[task]\nprompts = "builtin:vowels"\n')
    flags = ["--algorithm.objective", "grpo", "--run.iterations", "3"]
    assert main(["train", file, *flags, "--dry-run"]) == 0
    printed = Config.from_toml(capsys.readouterr().out)
    assert printed == made(tmp_path, *flags, text='[task]\nprompts = "builtin:vowels"\n').resolved()
    assert (printed.algorithm.clip_low, printed.run.iterations, printed.run.name) == (0.2, 3, "my_run")
    assert not (tmp_path / "runs").exists()


def test_sample_takes_prompts_in_both_forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def sample(config: Config, prompts: list[str], *, num_samples: int, temperature: float) -> list[list[str]]:
        asked.append([*prompts, config.model.path, str(num_samples), str(temperature)])
        return [["x\x1b[2J"] for _ in prompts]

    monkeypatch.setattr("gspo.evaluation.run.sample", sample)
    flags = ["--prompt", "a", "b c", "--model.path", "m", "--prompt", "d", "--num_samples", "2", "--temperature", "0"]
    assert main(["sample", config_file(tmp_path), *flags]) == 0
    assert asked == [["a", "b c", "d", "m", "2", "0.0"]]


def test_sample_keeps_escape_codes_from_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("gspo.evaluation.run.sample", lambda config, prompts, **_: [["a\x1b[2J [b]\nc"]])
    assert main(["sample", config_file(tmp_path), "--prompt", "q"]) == 0
    assert capsys.readouterr().out == "q\n  a·[2J [b]\n  c\n"
