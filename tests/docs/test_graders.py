"""The examples of docs/graders.md run; its tables name what there is."""

from __future__ import annotations

import re
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from gspo.config import Config
from gspo.tasks.functions import load_reward
from gspo.tasks.graders import GRADERS, NEEDS
from gspo.tasks.graders.sandbox import LEVELS, Limits

pytest.importorskip("math_verify")

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "graders.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```\n(?!\n?```)", PAGE, re.DOTALL)
ADD = "```python\ndef add(a, b):\n    return a + b\n```"


@pytest.mark.parametrize("number", range(len(PYTHON)))
def test_an_example_runs(number: int) -> None:
    exec(compile(PYTHON[number], f"example {number}", "exec"), {})


def test_the_settings_load() -> None:
    config = Config.from_toml(re.search(r"```toml\n(.*?)```", PAGE, re.DOTALL).group(1))  # type: ignore[union-attr]
    assert [load_reward(name).__name__ for name in config.task.reward] == ["math", "format"]


def test_the_rewards_of_the_examples_score() -> None:
    tests = [["assert add(1, 2) == 3", "assert add(1, 2) == 4"], None]
    names: dict[str, object] = {}
    exec(next(text for text in PYTHON if "def tests_passed" in text), names)
    assert names["tests_passed"]([ADD, ADD], tests=tests, prompts=[]) == [0.5, None]  # type: ignore[operator]
    exec(next(text for text in PYTHON if "def in_a_container" in text), names)
    names["CONTAINER"] = [sys.executable]  # there is no container here
    assert names["passes"]([ADD, ADD], tests=[tests[0][:1], tests[0]], prompts=[]) == [1.0, 0.0]  # type: ignore[operator, index]


def test_the_tables() -> None:
    first = PAGE[: PAGE.index("Else they give 0")]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in first.splitlines() if line.startswith("| `")
    ]
    assert {row[0].strip("`") for row in rows} == set(GRADERS)
    assert {row[0].strip("`") for row in rows if row[3]} == set(NEEDS)
    assert re.findall(r"^\| `(namespaces|user|plain)` \|", PAGE, re.MULTILINE) == list(LEVELS)


def test_the_limits_are_the_defaults() -> None:
    said = re.search(
        r"(\d+) s of wall-clock time, (\d+) s of processor time and (\d+) GiB of address space a process, "
        r"(\d+) processes\nand threads, (\d+) MiB of files, (\d+) MiB of output",
        PAGE,
    )
    assert said is not None
    seconds, cpu, memory, processes, files, output = map(int, said.groups())
    assert Limits(seconds, cpu, memory * 2**30, processes, files * 2**20, output * 2**20) == Limits()
    assert len(fields(Limits)) == 6
