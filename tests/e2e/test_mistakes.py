"""A user's own mistake gets one sentence and a code, never a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo.cli.main import main

BASE = """
[model]
path = "builtin:tiny"
dtype = "float32"
[task]
prompts = "builtin:vowels"
[rollout]
max_tokens = 4
[eval]
num_prompts = 4
[run]
iterations = 1
"""
GOOD_ROW = '{"prompt": "vowels?", "answer": "a"}'


def write(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def attempt(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    try:
        code = main(list(arguments))
    except SystemExit as stop:  # the flag parser exits on its own
        code = int(stop.code or 0)
    captured = capsys.readouterr()
    assert "Traceback" not in captured.out + captured.err
    assert "bug in gspo" not in captured.err
    return code, " ".join((captured.err or captured.out).split())


DATA = {
    "missing file": (None, "does not exist"),
    "empty file": ("", "is empty"),
    "broken line": (f"{GOOD_ROW}\n{GOOD_ROW}\n{{'prompt': 1}}\n", "line 3: not valid JSON"),
    "no prompt": (f'{GOOD_ROW}\n{{"question": "x"}}\n', "line 2: the row has no 'prompt'; its keys are ['question']"),
    "not an object": ("[1, 2]\n", "line 1: expected a JSON object"),
    "prompt of a wrong type": ('{"prompt": 7}\n', "line 1: 'prompt' must be text or a list of messages"),
    "empty messages": ('{"prompt": []}\n', "line 1: 'prompt' must be text"),
    "a reserved column": ('{"prompt": "x", "completions": 1}\n', "'completions' is reserved"),
}


@pytest.mark.parametrize("case", DATA)
def test_prompt_files(tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    content, expected = DATA[case]
    prompts = tmp_path / "prompts.jsonl"
    if content is not None:
        prompts.write_text(content)
    config = write(tmp_path, "c.toml", BASE)
    code, said = attempt(capsys, "train", config, "--task.prompts", str(prompts), "--run.directory", str(tmp_path))
    assert code == 2
    assert expected in said


SETTINGS = {
    "unknown key": (
        "[optimizer]\nlearning_rte = 1e-5",
        "no key 'optimizer.learning_rte'. Did you mean 'optimizer.learning_rate'",
    ),
    "key in another section": ("[optimizer]\ngroup_size = 4", "Did you mean 'rollout.group_size'"),
    "unknown section": ("[optimiser]\nlearning_rate = 1e-5", "Did you mean 'optimizer'"),
    "hyphen": ("[optimizer]\nlearning-rate = 1e-5", "Did you mean 'optimizer.learning_rate'"),
    "repeated key": ("[optimizer]\nlearning_rate = 1\nlearning_rate = 2", "not valid TOML"),
    "not TOML": ("[optimizer\n", "not valid TOML"),
    "wrong type": ('[rollout]\ngroup_size = "many"', "rollout.group_size"),
    "group of one": ("[rollout]\ngroup_size = 1", "at least 2, found 1"),
    "top_p": ("[rollout]\ntop_p = 0.9", "the importance ratio of an unchanged policy is not 1"),
    "top_k": ("[rollout]\ntop_k = 50", "rollout.top_k = 50 is refused"),
    "temperature 0": ("[rollout]\ntemperature = 0.0", "must be above 0 for training"),
    "more updates than prompts": (
        "[rollout]\nprompts_per_iteration = 2",
        "updates_per_rollout = 4 needs at least as many",
    ),
    "negative clip": ("[algorithm]\nclip_low = -1.0", "algorithm.clip_low must be at least 0"),
    "unknown objective": ('[algorithm]\nobjective = "ppo"', "'gspo', 'gspo_token' or 'grpo'"),
    "missing model": ('[model]\npath = "./no/such/model"', "there is no folder './no/such/model'"),
    "missing gguf": ('[model]\npath = "no.gguf"', "the file no.gguf does not exist"),
    "unknown builtin": ('[task]\nprompts = "builtin:additoin"', "there is: addition"),
    "unknown source": ('[task]\nprompts = "prompts.csv"', "is not a source of prompts"),
    "reward file": ('[task]\nreward = "no.py:f"', "no.py does not exist"),
    "reward module": ('[task]\nreward = "no_such_module:f"', "there is no module 'no_such_module'"),
    "reward form": ('[task]\nreward = "correct"', "must be 'module:function', 'file.py:function', or a ready-made one"),
    "reward name": ('[task]\nreward = "json:correct"', "json has no 'correct'"),
    "weights": ('[task]\nreward = ["json:dumps"]\nreward_weights = [1.0, 2.0]', "has 2 values for 1 reward functions"),
    "context": ("[rollout]\nmax_tokens = 2000\n[batch]\nmax_tokens = 9000", "more than the model's context of 2048"),
    "weights without rewards": ("[task]\nreward_weights = [2.0]", "needs task.reward"),
    "reward timeout": ("[task]\nreward_timeout = 1e12", "must be at most 1,000,000 seconds, or 0 for no limit"),
    "request timeout": ("[engine]\nrequest_timeout = 1e12", "must be above 0 and at most 1,000,000 seconds"),
    "address without a host": ('[engine]\nkind = "vllm"\nurl = "http://"', "and name a host"),
    "address with a bracket": ('[engine]\nkind = "vllm"\nurl = "http://[::1"', "and name a host"),
    "address with a word as port": ('[engine]\nkind = "vllm"\nurl = "http://h:abc"', "and name a host"),
    "weights directory": (
        '[engine]\nkind = "vllm"\nweights_directory = "/no/such"',
        "no folder can be made in /no/such",
    ),
    "tracker": ('[track]\nkinds = "wandb"', "no tracker is available"),
    "pass size": ("[batch]\nmax_tokens = 100", "batch.max_tokens = 100 cannot hold one row"),
    "prompts too long": ("[task]\nmax_prompt_tokens = 3", "are longer than task.max_prompt_tokens = 3"),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    setting, expected = SETTINGS[case]
    config = write(tmp_path, "c.toml", _merge(BASE, setting))
    code, said = attempt(capsys, "train", config, "--run.directory", str(tmp_path / "runs"))
    assert code == 2, said
    assert expected in said


def _merge(base: str, setting: str) -> str:
    """The base without the sections that the setting writes anew."""
    kept = [part for part in base.split("[")[1:] if f"[{part.split(']')[0]}]" not in setting]
    return "".join(f"[{part}" for part in kept) + setting


def test_no_config(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert attempt(capsys, "train") == (
        2,
        "gspo: gspo train needs a config file first: gspo train CONFIG.toml [--section.key VALUE ...].",
    )
    code, said = attempt(capsys, "train", str(tmp_path / "no.toml"))
    assert code == 2 and "does not exist" in said


def test_an_empty_config_is_the_default_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", write(tmp_path, "c.toml", ""), "--dry-run"]) == 0
    assert 'objective = "gspo"' in capsys.readouterr().out


def test_misspelt_flags_name_the_nearest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = attempt(capsys, "train", write(tmp_path, "c.toml", BASE), "--optimizer.learning_rte", "1e-5")
    assert code == 2 and "--optimizer.learning_rate" in said
    code, said = attempt(capsys, "trian", "c.toml")
    assert code == 2 and "Did you mean 'train'" in said


def test_a_model_without_chat_template(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from gspo.policy.tiny import build

    model, tokenizer = build()
    tokenizer.chat_template = None
    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    config = write(tmp_path, "c.toml", BASE.replace("builtin:tiny", str(tmp_path / "base")))
    code, said = attempt(capsys, "train", config, "--run.directory", str(tmp_path / "runs"))
    assert code == 2 and "no chat template" in said and "task.chat = false" in said
    assert main(["train", config, "--task.no_chat", "--run.directory", str(tmp_path / "runs")]) == 0


def test_a_run_that_could_not_learn_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every answer scores the same: no update is made, and no speed of updates is shown."""
    prompts = write(tmp_path, "prompts.jsonl", "\n".join(GOOD_ROW.replace("?", f" {n}?") for n in range(30)))
    reward = write(tmp_path, "same.py", "def same(completions, **kwargs):\n    return [1.0] * len(completions)\n")
    config = write(tmp_path, "c.toml", BASE)
    flags = ["--task.prompts", prompts, "--task.reward", f"{reward}:same", "--run.directory", str(tmp_path / "runs")]
    assert main(["train", config, *flags]) == 0
    said = capsys.readouterr().out
    assert "nothing was learned: in all 1 iterations" in said and "rollout tok/s" in said and "update tok/s" not in said
    assert "K parameters" in said
    run = str(tmp_path / "runs" / "c")
    assert main(["train", "--resume", run]) == 0
    assert "all 1 iterations are done already" in capsys.readouterr().out
    code, said = attempt(capsys, "eval", config, *flags, "--model.path", run)
    assert code == 2 and "is a run, not a model. Give one of its checkpoints" in said


def test_a_run_directory_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    config = write(tmp_path, "c.toml", BASE)
    for folder in (blocker, blocker / "below", Path("/proc/nowhere")):
        code, said = attempt(capsys, "train", config, "--run.directory", str(folder))
        assert code == 2 and "run.directory" in said


REWARDS = {
    "raises": ("def f(completions, **_):\n    return [1 / 0]", "reward function f raised ZeroDivisionError"),
    "too few": ("def f(completions, **_):\n    return [1.0]", "returned 1 scores for"),
    "a scalar": ("def f(completions, **_):\n    return 1.0", "must return a list of"),
    "text": ("def f(completions, **_):\n    return ['good'] * len(completions)", "gave 'good'"),
    "infinite": ("def f(completions, **_):\n    return [float('inf')] * len(completions)", "gave inf for an answer"),
    "a column that is not there": (
        "def f(completions, gold, **_):\n    return []",
        "needs 'gold', which no prompt has",
    ),
}


@pytest.mark.parametrize("case", REWARDS)
def test_reward_functions(tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    source, expected = REWARDS[case]
    file = write(tmp_path, "r.py", source)
    config = write(tmp_path, "c.toml", BASE)
    code, said = attempt(
        capsys, "train", config, "--task.reward", f"{file}:f", "--run.directory", str(tmp_path / "runs")
    )
    assert code == 1 and expected in said


def test_an_address_that_no_host_can_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write(tmp_path, "c.toml", BASE + f'[engine]\nkind = "vllm"\nurl = "http://{"a" * 300}"\n')
    code, said = attempt(capsys, "train", config)
    assert code == 1 and "no vLLM server answers" in said


def test_other_verbs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write(tmp_path, "c.toml", BASE)
    code, said = attempt(capsys, "sample", config, "--prompt", "x", "--temperature", "1e-30")
    assert code == 2 and "0 (greedy) or at least 0.0001" in said
    code, said = attempt(capsys, "coldstart", config, "--out", "~nobody-of-that-name/x")
    assert code == 2 and "home folder" in said
