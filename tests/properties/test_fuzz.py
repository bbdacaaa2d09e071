"""2,000 broken configs, prompt files and reward returns: each ends in success or in a sentence, and none hangs.

Everything is drawn from seeded generators, so a failure comes back with its number.
"""

from __future__ import annotations

import decimal
import fractions
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

import numpy as np
import pytest
import torch

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

NUMBERS = [
    "0", "1", "-1", "2", "7", "64", "100000", "1_000", "-0.0", "0.5", "0.999", "1e-6", "1e308", "1e400", "1e-400", "nan",
    "-nan", "inf", "-inf", "9223372036854775807", "9223372036854775808", "-9223372036854775809", "0x" + "f" * 5000,
    "1" * 5000, "0b1", "00", "1.", ".5", "1e-6 # and a comment", '"1e-6"', '"8"',
]  # fmt: skip
TEXTS = [
    '""', '" "', '"no"', '"None"', '"\\u0000"', '"a\\u0000.jsonl"', '"\\u202e"', '"\\u001b[2J"', "'''a\nb'''",
    '"' + "a" * 10000 + '"', '"../../x"', '"~nobody-of-this-name/x.jsonl"', '"~nobody-of-this-name/x.py:f"', '"/dev/null"',
    '"."', '".."', '"/"', '"x.jsonl"', '"x.parquet"', '"builtin:"', '"builtin:vowels"', '"builtin:addition"',
    '"reasoning-gym:"', '"hf:"', '"hf:::"', '"hf:./nowhere"', '"a:b"', '"..a:b"', '":"', '"a.py:f"', '"json:dumps"',
    '"json:decoder"', '"auto"', '"float32"', '"plain"', '"gspo"', '"grpo"', '"none"', '"linear"', '"engine"', '"trainer"',
]  # fmt: skip
OTHERS = [
    "true", "false", "[]", "[[]]", "[{}]", '[""]', '["a", "b", "c"]', '["json:dumps"]', '[1, "a"]', "[1, 2]", "[0.5, 0.5]",
    "[nan]", "[inf, 1.0]", "[true]", "{}", "{a = 1}", "{a = {b = {c = [1]}}}", "[" * 3000 + "]" * 3000, "1979-05-27",
    "07:32:00", "1979-05-27T07:32:00Z", '"unclosed', "[1, 2", "", "=", "learning_rate",
]  # fmt: skip
SCRAPS = ["\x00", "\ufeff", "\r", "\x85", "é", "[", "]", "[[", '"', "'''", "=", ".", "#", "\\", "\t", "9", "-", "model"]
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
    lambda text, at, dice: re.sub(r"(.*\n)", r"\1\1", text, count=dice.randint(1, 3)),
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

ODD_JSON = [
    "null", "true", "0", "-1", "1.5", "1e400", "-1e400", "NaN", "Infinity", "9" * 400, "9" * 5000, '""', '" "', '"\\u0000"',
    '"\\ud800"', '"\\udc00\\ud800"', '"\\ud83d\\ude00"', '"\\u2028"', '"<|im_end|>"', '"{{ 7 * 7 }}"', '"' + "a" * 5000 + '"',
    "[]", "[[]]", "{}", '{"role": "user"}', '[{"role": "user"}]', '[{"content": "x"}]', '[{"role": 1, "content": "x"}]',
    '[{"role": "user", "content": null}]', '[{"role": "user", "content": 7}]', '[{"role": "user", "content": ["x"]}]',
    '[{"role": "user", "content": [{"type": "image"}]}]', '[{"role": "user", "content": "x"}, null]',
    '[{"role": "user", "content": "x"}]', '[{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]',
    '[{"role": "assistant", "content": null, "tool_calls": []}]', '[{"role": "\\ud800", "content": "x"}]',
    '[{"role": "user", "content": "x", "role": "system"}]', '{"a": {"b": [1, {"c": "\\ud800"}]}}', "'x'", "undefined", "",
    "[" * 2000 + "]" * 2000, "[" * 200000 + "]" * 200000, '{"a":' * 500 + "1" + "}" * 500,
]  # fmt: skip
KEYS = [
    "prompt",
    "prompt",
    "prompt",
    "answer",
    "id",
    "prompt_id",
    "completions",
    "\\ud800",
    "",
    "pröm\\u0000pt",
    "self",
]


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


class NoFloat:
    def __float__(self) -> float:
        raise ValueError("no")


class NoRepr:
    def __repr__(self) -> str:
        raise ValueError("no")


class OddFloat(float):
    def __float__(self) -> float:
        raise ValueError("no")


class Silent(Exception):
    def __str__(self) -> str:
        raise ValueError("no")


class NoValues:
    def tolist(self) -> list[float]:
        raise RuntimeError("no")

    item = tolist


async def later(value: Any) -> Any:
    return value


async def stream() -> Any:
    yield 1.0


ELEMENTS: list[Callable[[], Any]] = [
    lambda: 1.0, lambda: 0, lambda: True, lambda: None, lambda: float("nan"), lambda: float("inf"), lambda: -0.0,
    lambda: 1e308, lambda: 10**400, lambda: -(10**30), lambda: "1", lambda: "", lambda: b"1", lambda: [1.0], lambda: [],
    lambda: (), lambda: {}, lambda: {"reward": 1.0}, lambda: {1.0}, lambda: 1j, lambda: decimal.Decimal("0.5"),
    lambda: decimal.Decimal("sNaN"), lambda: fractions.Fraction(1, 3), lambda: np.float32(0.5), lambda: np.float16("nan"),
    lambda: np.int64(1), lambda: np.bool_(True), lambda: np.array(1.0), lambda: np.array([1.0]), lambda: np.array([1.0, 2.0]),
    lambda: np.datetime64("2020-01-01"), lambda: np.str_("x"), lambda: torch.tensor(0.5), lambda: torch.tensor([0.5]),
    lambda: torch.ones(2), lambda: torch.tensor(1j), lambda: torch.tensor(1.0, requires_grad=True), object, NoFloat, NoRepr,
    lambda: OddFloat(1), NoValues, lambda: int, lambda: len, lambda: (n for n in [1.0]), lambda: "\ud800", lambda: "a\nb",
]  # fmt: skip
WHOLE: list[Callable[[], Any]] = [
    lambda: (1.0 for _ in range(4)), lambda: map(float, range(4)), lambda: range(4), lambda: {0.0, 1.0, 2.0, 3.0},
    lambda: dict.fromkeys(range(4), 1.0), lambda: "good", lambda: b"good", lambda: None, lambda: 1.0, lambda: np.ones(4),
    lambda: np.ones((4, 1)), lambda: np.ones((1, 4)), lambda: np.array(1.0), lambda: np.array([1, None, "x", {}], object),
    lambda: np.array([np.nan, 1, 0, np.inf]), lambda: torch.ones(4, requires_grad=True), lambda: torch.ones(4, 1),
    lambda: torch.ones(4, dtype=torch.complex64), lambda: torch.ones(4).to_sparse(), lambda: torch.ones(4, device="meta"),
    lambda: torch.tensor([True, False, True, False]), lambda: torch.ones(4, dtype=torch.bfloat16), object, NoRepr, NoValues,
    lambda: later([1.0] * 4), lambda: later(None), lambda: later(later([1.0] * 4)), stream, lambda: len, lambda: ([1.0] * 4, {}),
]  # fmt: skip
RAISED: list[Callable[[], BaseException]] = [
    ValueError, lambda: KeyError(object()), lambda: Silent(), lambda: SystemExit(0), lambda: SystemExit("bye"),
    RecursionError, MemoryError, StopIteration, AssertionError, lambda: OSError(28, "No space left on device"),
    lambda: ValueError("first\nsecond."), lambda: ValueError("\ud800\x1b[2J"), lambda: ExceptionGroup("g", [ValueError()]),
]  # fmt: skip


def a_return(dice: random.Random) -> Callable[[], Any]:
    """A function without arguments that returns or raises something odd."""
    kind = dice.random()
    if kind < 0.5:
        count = dice.choice([4, 4, 4, 4, 0, 1, 3, 5])
        made = [dice.choice(ELEMENTS) if dice.random() < 0.4 else ELEMENTS[0] for _ in range(count)]
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
    "optimizer.max_grad_norm": [float("inf"), 1e-300, 1e300],
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
