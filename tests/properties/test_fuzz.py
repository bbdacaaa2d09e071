"""2,000 broken configs, prompt files and reward returns: each ends in success or in a sentence, and none hangs.

Everything is drawn from seeded generators, so a failure comes back with its number.
"""

from __future__ import annotations

import json
import random
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gspo.chat import ChatFormat
from gspo.config import Config, known_keys
from gspo.errors import GspoError
from gspo.policy.tiny import build_tokenizer
from gspo.records import to_json
from gspo.rollout.collect import Collected
from gspo.tasks import RewardSuite, load_task
from gspo.training.iteration import advantages_of
from gspo.training.loop import train
from gspo.training.observe import rollout_metrics
from gspo.types import Group, Prompt, Rollout
from tests.properties.odd import ELEMENTS, KEYS, NUMBERS, ODD_JSON, OTHERS, RAISED, SCRAPS, TEXTS, WHOLE

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "tiny.toml"
ROUNDS = 10


class Hang(BaseException):
    """An input took longer than its limit."""


@contextmanager
def limit(seconds: float) -> Iterator[None]:
    def late(number: int, frame: Any) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def ends_well(what: object, action: Callable[[], object], seconds: float = 10.0) -> bool:
    """Did it succeed? If not it ended in a GspoError with a sentence; anything else fails the test."""
    try:
        with limit(seconds):
            action()
    except GspoError as error:
        text = str(error)
        assert re.search(r"[.?)]$", text) and text.strip() == text, (what, text)
        assert re.match(r"\S.{10,}", text) and " at 0x" not in text and "Traceback" not in text, (what, text)
        assert len(text) < 2000 and text.isprintable(), (what, text)
        return False
    except (Exception, Hang) as error:
        raise AssertionError(f"{what!r} ended in {type(error).__name__}: {error}") from error
    return True


# Configs

BASE = RECIPE.read_text().replace("num_prompts = 32", "num_prompts = 4")


def a_value(dice: random.Random, default: object) -> str:
    """Most often of the kind that is asked for."""
    if dice.random() < 0.3:
        return dice.choice(NUMBERS + TEXTS + OTHERS)
    if isinstance(default, bool):
        return dice.choice(["true", "false", '"yes"'])
    if isinstance(default, tuple):
        return dice.choice(OTHERS)
    return dice.choice(TEXTS if isinstance(default, str) else NUMBERS)


def a_config(dice: random.Random) -> str:
    """The smoke recipe with one to three keys set to something else, or a key or section of another name."""
    text, defaults = BASE, asdict(Config())
    for _ in range(dice.choice([1, 1, 1, 2, 3])):
        section, key = dice.choice(known_keys()).split(".")
        value = a_value(dice, defaults[section][key])
        if dice.random() < 0.1:
            section, key = dice.choice(
                [(section + "s", key), (section, key[1:]), (key, section), ("é", "ü"), ('""', "a")]
            )
        text = re.sub(rf"(?m)^{re.escape(key)} = .*$", "", text)
        if f"[{section}]\n" not in text:
            text += f"\n[{section}]\n"
        text = text.replace(f"[{section}]\n", f"[{section}]\n{key} = {value}\n")
    return text


TEARS: list[Callable[[str, int, random.Random], str]] = [
    lambda text, at, dice: text[:at],
    lambda text, at, dice: text[at:],
    lambda text, at, dice: text[:at] + dice.choice(SCRAPS) + text[at:],
    lambda text, at, dice: text[:at] + text[at + dice.randint(1, 9) :],
    lambda text, at, dice: text[:at] + text[at - dice.randint(1, 40) :],
    lambda text, at, dice: "\n".join(line for line in text.split("\n") for _ in range(dice.choice([0, 1, 1, 1, 2]))),
    lambda text, at, dice: text.replace("\n", "\r\n"),
    lambda text, at, dice: text + text,
    lambda text, at, dice: "",
]


def damaged(dice: random.Random, text: str) -> bytes:
    """Truncated, doubled, torn, with odd characters, in another encoding."""
    for _ in range(dice.choice([1, 1, 2])):
        text = dice.choice(TEARS)(text, dice.randrange(len(text) + 1), dice)
    data = text.encode(dice.choice(["utf-8"] * 12 + ["utf-16", "utf-8-sig", "utf-8-sig", "cp037"]))
    if dice.random() < 0.1:
        place = dice.randrange(len(data) + 1)
        data = data[:place] + dice.randbytes(3) + data[place:]
    return data


def use(file: Path) -> None:
    """All that a run does with a config before a model is loaded."""
    config = Config.load(file).resolved()
    assert Config.from_toml(config.to_toml()) == config
    task = load_task(config)
    for prompt in task.train.take(3):
        assert prompt.content
    task.train.load_state_dict(json.loads(json.dumps(task.train.state_dict())))


@pytest.mark.parametrize("part", range(ROUNDS))
def test_configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    good = 0
    for number in range(100 * part, 100 * (part + 1)):
        dice = random.Random(f"config/{number}")
        text = a_config(dice)
        data = text.encode() if number % 5 else damaged(dice, text)
        (tmp_path / "c.toml").write_bytes(data)
        good += ends_well((number, data[:2000]), partial(use, tmp_path / "c.toml"))
    assert 5 <= good <= 95, "all refused, or nothing was: these are no mutations"


# Prompt files


ROWS: list[Callable[[str, str, str], str]] = [
    lambda row, key, value: f'{{"prompt": "x", "{key}": {value}}}',
    lambda row, key, value: f'{{"prompt": "x", "answer": {value}}}',
    lambda row, key, value: f'{{"prompt": {value}}}',
    lambda row, key, value: f'{{"prompt": {value}, "answer": "x"}}',
    lambda row, key, value: f'{{"{key}": "x"}}',
    lambda row, key, value: value,
    lambda row, key, value: row + row,
]


def a_file(dice: random.Random) -> str:
    rows = [f'{{"prompt": "question {n}", "answer": "{n}"}}' for n in range(dice.choice([1, 2, 3, 12]))]
    for _ in range(dice.choice([0, 1, 1, 1, 2])):
        place = dice.randrange(len(rows))
        rows[place] = dice.choice(ROWS)(rows[place], dice.choice(KEYS), dice.choice(ODD_JSON))
    return "\n".join(rows) + dice.choice(["", "\n", "\n\n", "\r\n", "\n \n"])


def ask(file: Path, chat: ChatFormat, evaluate: bool) -> None:
    """All that a run does with prompts up to sampling, and their traces in the records."""
    values = {"task.prompts": str(file), "task.reward": "r.py:f", "eval.every": int(evaluate), "eval.num_prompts": 2}
    task = load_task(Config().with_values(values))
    prompts = [*task.train.take(4), *task.heldout]
    for prompt in prompts:
        ids = chat.encode(prompt)
        assert ids and all(isinstance(token, int) for token in ids)
        json.loads(to_json([prompt.prompt_id, prompt.content, prompt.columns]).encode())
    task.rewards.score(prompts, [""] * len(prompts), [[1]] * len(prompts))


@pytest.mark.parametrize("part", range(ROUNDS))
def test_prompt_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.py").write_text("def f(completions, **columns):\n    return [1.0] * len(completions)\n")
    chat, good = ChatFormat(build_tokenizer(), end_token_ids=frozenset({4})), 0
    for number in range(60 * part, 60 * (part + 1)):
        dice = random.Random(f"rows/{number}")
        text = a_file(dice)
        data = text.encode() if number % 5 else damaged(dice, text)
        (tmp_path / "p.jsonl").write_bytes(data)
        good += ends_well((number, data[:2000]), partial(ask, tmp_path / "p.jsonl", chat, bool(number % 2)))
    assert 5 <= good <= 55


# Reward returns


def a_return(dice: random.Random) -> Callable[[], Any]:
    """A function without arguments that returns or raises something odd."""
    kind = dice.random()
    if kind < 0.5:
        count = dice.choice([4, 4, 4, 4, 0, 1, 3, 5])
        made = [dice.choice(ELEMENTS) if dice.random() < 0.25 else ELEMENTS[0] for _ in range(count)]
        return lambda: dice.choice([list, tuple])(make() for make in made)
    if kind < 0.8:
        return dice.choice(WHOLE)
    error = dice.choice(RAISED)

    def fail() -> None:
        raise error()

    return fail


def learn_from(made: Callable[[], Any]) -> None:
    """Scores, advantages and metrics of a group of four."""

    def odd(completions: list[str]) -> Any:
        return made()

    prompt = Prompt("p", "q")
    scores = RewardSuite([odd, lambda completions: [0.0] * 4], [0.7, 0.3]).score([prompt] * 4, [""] * 4, [[1]] * 4)
    rollouts = [
        Rollout("p", n, [1], [2], [True], [-1.0], 1.0, 0, "stop", "", s.reward, dict(s.terms))
        for n, s in enumerate(scores)
    ]
    advantages = advantages_of([Group(prompt, rollouts)], Config())
    assert bool(advantages.isfinite().all())
    json.loads(to_json(rollout_metrics(Collected([Group(prompt, rollouts)], 0, 1.0, 1.0))))


@pytest.mark.parametrize("part", range(ROUNDS))
@pytest.mark.filterwarnings("ignore:coroutine:RuntimeWarning")
def test_reward_returns(part: int) -> None:
    good = 0
    for number in range(36 * part, 36 * (part + 1)):
        made = a_return(random.Random(f"reward/{number}"))
        good += ends_well(number, partial(learn_from, made))
    assert 0 < good < 36


# Whole runs

EXTREME: dict[str, list[Any]] = {
    "optimizer.learning_rate": [0.0, 1e30, 1e300],
    "optimizer.betas": [(0.0, 0.0), (0.999999999, 0.0)],
    "optimizer.max_grad_norm": [float("inf"), 1e-30, 1e300],
    "optimizer.weight_decay": [1e30],
    "optimizer.warmup": [1 << 62],
    "optimizer.schedule": ["linear", "cosine"],
    "algorithm.clip_low": [0.0, 1 - 1e-16],
    "algorithm.clip_high": [0.0, 1e300],
    "algorithm.kl_weight": [1e-300, 1e300],
    "algorithm.advantage": ["none", "batch_std"],
    "algorithm.correction": ["mask_sequence", "truncate_token"],
    "algorithm.old_logprobs": ["auto"],
    "algorithm.objective": ["gspo_token", "grpo"],
    "algorithm.updates_per_rollout": [1, 3],
    "rollout.temperature": [1e-4, 1e30],
    "rollout.stop": [("\x1b", "é\u2028"), tuple("abcdefghijklmnopqrstuvwxyz ")],
    "rollout.max_tokens": [1],
    "rollout.group_size": [2],
    "eval.temperature": [1e-4, 1e300],
    "eval.every": [0, 1 << 62],
    "engine.max_batch": [1, 1 << 62],
    "batch.vocab_chunk": [1, 1 << 62],
    "batch.max_tokens": [1 << 62],
    "task.system_prompt": ["\u202e\x1b[2J", "{{ 1 / 0 }}", "<|im_end|>"],
    "task.reward_weights": [(0.0, 0.0), (-1e29, 1e29)],
    "run.iterations": [0, 2],
    "run.seed": [(1 << 63) - 1],
    "run.checkpoint_every": [0, 1 << 62],
    "run.keep": [1 << 62],
    "run.name": ["é\u2028\x1b[2J", "[1] *?", "-", "a" * 255, "a" * 256],
}
SMALL = {
    "run.iterations": 1,
    "rollout.prompts_per_iteration": 4,
    "rollout.group_size": 4,
    "rollout.max_tokens": 6,
    "eval.num_prompts": 4,
}


def run(values: dict[str, Any]) -> None:
    config = Config.load(RECIPE).with_values(SMALL | values)
    result = train(Config.from_toml(config.to_toml()))
    assert result.iterations == config.run.iterations


@pytest.mark.parametrize("part", range(4))
def test_runs_with_extreme_settings(tmp_path: Path, part: int) -> None:
    for number in range(10 * part, 10 * (part + 1)):
        dice = random.Random(f"run/{number}")
        chosen = {key: dice.choice(EXTREME[key]) for key in dice.sample(list(EXTREME), dice.choice([1, 2, 4]))}

        ends_well(chosen, partial(run, chosen | {"run.directory": str(tmp_path)}), 60)
