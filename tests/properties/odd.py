"""Values that nobody would write on purpose: for configs (TOML), for prompt files (JSON), and from reward functions."""

from __future__ import annotations

import decimal
import fractions
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

NUMBERS = [
    "0", "1", "-1", "2", "7", "64", "100000", "1_000", "-0.0", "0.5", "0.999", "1e-6", "1e308", "1e400", "1e-400",
    "nan", "-nan", "inf", "-inf", "9223372036854775807", "9223372036854775808", "-9223372036854775809",
    "0x" + "f" * 5000, "1" * 5000, "0b1", "00", "1.", ".5", "1e-6 # and a comment", '"1e-6"', '"8"',
]  # fmt: skip
TEXTS = [
    '""', '" "', '"no"', '"None"', '"\\u0000"', '"a\\u0000.jsonl"', '"\\u202e"', '"\\u001b[2J"', "'''a\nb'''",
    '"' + "a" * 10000 + '"', '"../../x"', '"~nobody-of-this-name/x.jsonl"', '"~nobody-of-this-name/x.py:f"',
    '"/dev/null"', '"."', '".."', '"/"', '"x.jsonl"', '"x.parquet"', '"builtin:"', '"builtin:vowels"',
    '"builtin:addition"', '"reasoning-gym:"', '"hf:"', '"hf:::"', '"hf:./nowhere"', '"a:b"', '"..a:b"', '":"',
    '"a.py:f"', '"json:dumps"', '"json:decoder"', '"auto"', '"float32"', '"plain"', '"gspo"', '"grpo"', '"none"',
    '"linear"', '"engine"', '"trainer"',
]  # fmt: skip
OTHERS = [
    "true", "false", "[]", "[[]]", "[{}]", '[""]', '["a", "b", "c"]', '["json:dumps"]', '[1, "a"]', "[1, 2]",
    "[0.5, 0.5]", "[nan]", "[inf, 1.0]", "[true]", "{}", "{a = 1}", "{a = {b = {c = [1]}}}", "[" * 3000 + "]" * 3000,
    "1979-05-27", "07:32:00", "1979-05-27T07:32:00Z", '"unclosed', "[1, 2", "", "=", "learning_rate",
]  # fmt: skip
SCRAPS = ["\x00", "\ufeff", "\r", "\x85", "é", "[", "]", "[[", '"', "'''", "=", ".", "#", "\\", "\t", "9", "-", "model"]
"""Put into the text of a file."""

ODD_JSON = [
    "null", "true", "0", "-1", "1.5", "1e400", "-1e400", "NaN", "Infinity", "9" * 400, "9" * 5000, '""', '" "',
    '"\\u0000"', '"\\ud800"', '"\\udc00\\ud800"', '"\\ud83d\\ude00"', '"\\u2028"', '"<|im_end|>"', '"{{ 7 * 7 }}"',
    '"' + "a" * 5000 + '"', "[]", "[[]]", "{}", '{"role": "user"}', '[{"role": "user"}]', '[{"content": "x"}]',
    '[{"role": 1, "content": "x"}]', '[{"role": "user", "content": null}]', '[{"role": "user", "content": 7}]',
    '[{"role": "user", "content": ["x"]}]', '[{"role": "user", "content": [{"type": "image"}]}]',
    '[{"role": "user", "content": "x"}, null]', '[{"role": "user", "content": "x"}]',
    '[{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]',
    '[{"role": "assistant", "content": null, "tool_calls": []}]', '[{"role": "\\ud800", "content": "x"}]',
    '[{"role": "user", "content": "x", "role": "system"}]', '{"a": {"b": [1, {"c": "\\ud800"}]}}', "'x'", "undefined",
    "", "[" * 2000 + "]" * 2000, "[" * 200000 + "]" * 200000, '{"a":' * 500 + "1" + "}" * 500,
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
    lambda: decimal.Decimal("sNaN"), lambda: fractions.Fraction(1, 3), lambda: np.float32(0.5),
    lambda: np.float16("nan"), lambda: np.int64(1), lambda: np.bool_(True), lambda: np.array(1.0),
    lambda: np.array([1.0]), lambda: np.array([1.0, 2.0]), lambda: np.datetime64("2020-01-01"), lambda: np.str_("x"),
    lambda: torch.tensor(0.5), lambda: torch.tensor([0.5]), lambda: torch.ones(2), lambda: torch.tensor(1j),
    lambda: torch.tensor(1.0, requires_grad=True), object, NoFloat, NoRepr, lambda: OddFloat(1), NoValues, lambda: int,
    lambda: len, lambda: (n for n in [1.0]), lambda: "\ud800", lambda: "a\nb",
]  # fmt: skip
"""One score of four."""
WHOLE: list[Callable[[], Any]] = [
    lambda: (1.0 for _ in range(4)), lambda: map(float, range(4)), lambda: range(4), lambda: {0.0, 1.0, 2.0, 3.0},
    lambda: dict.fromkeys(range(4), 1.0), lambda: "good", lambda: b"good", lambda: None, lambda: 1.0,
    lambda: np.ones(4), lambda: np.ones((4, 1)), lambda: np.ones((1, 4)), lambda: np.array(1.0),
    lambda: np.array([1, None, "x", {}], object), lambda: np.array([np.nan, 1, 0, np.inf]),
    lambda: torch.ones(4, requires_grad=True), lambda: torch.ones(4, 1), lambda: torch.ones(4, dtype=torch.complex64),
    lambda: torch.ones(4).to_sparse(), lambda: torch.ones(4, device="meta"),
    lambda: torch.tensor([True, False, True, False]), lambda: torch.ones(4, dtype=torch.bfloat16), object, NoRepr,
    NoValues, lambda: later([1.0] * 4), lambda: later(None), lambda: later(later([1.0] * 4)), stream, lambda: len,
    lambda: ([1.0] * 4, {}),
]  # fmt: skip
"""What is returned for four answers."""
RAISED: list[Callable[[], BaseException]] = [
    ValueError, lambda: KeyError(object()), lambda: Silent(), lambda: SystemExit(0), lambda: SystemExit("bye"),
    RecursionError, MemoryError, StopIteration, AssertionError, lambda: OSError(28, "No space left on device"),
    lambda: ValueError("first\nsecond."), lambda: ValueError("\ud800\x1b[2J"),
    lambda: ExceptionGroup("g", [ValueError()]),
]  # fmt: skip
