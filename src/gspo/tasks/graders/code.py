"""``code``: runs the program that the answer holds against the row's tests, in a sandbox."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from gspo.tasks.graders.answers import golds, text_of
from gspo.tasks.graders.sandbox import Limits, Run, Runner, best_level, run

_FENCED = re.compile(
    r"^[ \t]*```(?:python3?|py)?[ \t]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE | re.IGNORECASE
)

MOST_AT_A_TIME = 8
"""Programs that run side by side, at most one a processor."""

# Runs a program, then tests in its name space. What it reports is marked with a word that the program is not told.
_HARNESS = """
import json, os, sys, traceback, types

def main():
    job = json.loads(sys.stdin.read())
    out = os.dup(1)
    module = sys.modules["program"] = types.ModuleType("program")

    def attempt(text, name):
        try:
            exec(compile(text, name, "exec"), module.__dict__)
            return True
        except BaseException:
            traceback.print_exc()
            return False

    try:
        if attempt(job["program"], "program.py"):
            for number, test in enumerate(job["tests"]):
                if attempt(test, f"test {number}"):
                    sys.stdout.flush()
                    os.write(out, f"\\n{job['mark']} {number}\\n".encode())
    finally:
        os._exit(0)

main()
"""


@dataclass(frozen=True)
class Outcome:
    """How a program did. ``reason`` says why not all tests passed: time, memory, output, killed, or wrong."""

    passed: int
    total: int
    reason: str = ""


def code(completions: Sequence[Any], tests: Sequence[Any]) -> list[float | None]:
    """1 when the program passes all tests of its row, else 0. A row without tests is unscored.

    Tests: a list (or JSON text with one) of statements such as "assert add(1, 2) == 3", or of
    ``{"input": ..., "output": ...}``, what the program reads from standard input and must print.
    """
    outcomes = outcomes_of(completions, golds("code", len(completions), ("tests", tests)))
    return [None if found is None else float(found.passed == found.total) for found in outcomes]


def outcomes_of(
    completions: Sequence[Any],
    tests: Sequence[Any],
    limits: Limits | None = None,
    runner: Runner = run,
    partial: bool = False,
) -> list[Outcome | None]:
    """One outcome a completion; None where the tests cannot be read. For rewards of your own: other limits, another
    sandbox, partial credit (``partial`` goes on after the first failed input)."""
    jobs = [
        (program_of(text_of(completion)), read_tests(value))
        for completion, value in zip(completions, tests, strict=True)
    ]
    wanted = {job: None for job in jobs if job[1] is not None}
    if runner is run:
        best_level()  # tried once, before the threads
    workers = max(1, min(MOST_AT_A_TIME, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1))
    with ThreadPoolExecutor(workers) as pool:
        found = pool.map(lambda job: run_tests(job[0], job[1] or (), limits, runner, partial), wanted)
        outcomes = dict(zip(wanted, found, strict=True))
    return [outcomes.get(job) for job in jobs]


Test = str | tuple[str, str]
"""Statements, or (standard input, expected output)."""


def run_tests(
    program: str, tests: Sequence[Test], limits: Limits | None = None, runner: Runner = run, partial: bool = False
) -> Outcome:
    """Statements run one after the other in one process; each input runs the program anew. Without ``partial`` the
    first input that fails is the last that runs."""
    limits = limits or Limits()
    if not program.strip():
        return Outcome(0, len(tests), "wrong")
    statements = [test for test in tests if isinstance(test, str)]
    pairs = [test for test in tests if not isinstance(test, str)]
    passed, reason = 0, ""
    if statements:
        passed, reason = _statements(program, statements, limits, runner)
    if pairs and (partial or not reason):
        more, why = _pairs(program, pairs, limits, runner, partial)
        passed, reason = passed + more, reason or why
    return Outcome(passed, len(tests), reason)


def program_of(text: str) -> str:
    """The last fenced block of Python (or of no language) after the thinking; without one the whole text."""
    text = text.rpartition("</think>")[2] if "</think>" in text else text
    if "<think>" in text:
        return ""
    fenced = _FENCED.findall(text)
    return fenced[-1] if fenced else text


def read_tests(value: Any) -> tuple[Test, ...] | None:
    """The tests of a row; None when there are none or they have another form."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            loaded = json.loads(value)
            value = loaded if isinstance(loaded, (list, dict)) else value
    if isinstance(value, str):
        value = [value]
    if isinstance(value, dict):
        value = [value]
    tests = [_test(item) for item in value] if isinstance(value, (list, tuple)) else []
    return tuple(test for test in tests if test) if tests and all(tests) else None


def _test(item: Any) -> Test | None:
    if isinstance(item, str):
        return item if item.strip() else None
    if isinstance(item, dict) and isinstance(item.get("output"), str):
        return (str(item.get("input") or ""), item["output"])
    return None


def _statements(program: str, tests: Sequence[str], limits: Limits, runner: Runner) -> tuple[int, str]:
    mark = secrets.token_hex(16)
    job = json.dumps({"program": program, "tests": tests, "mark": mark})
    with _running(runner, _HARNESS, [job], limits) as runs:
        ended = next(runs)
    lines = set(ended.stdout.splitlines())
    passed = sum(f"{mark} {number}" in lines for number in range(len(tests)))
    return passed, ended.reason or ("" if passed == len(tests) else "wrong")


def _pairs(
    program: str, tests: Sequence[tuple[str, str]], limits: Limits, runner: Runner, partial: bool
) -> tuple[int, str]:
    passed, reason = 0, ""
    with _running(runner, program, [given for given, _ in tests], limits) as runs:
        for ended, (_, expected) in zip(runs, tests, strict=True):
            right = _printed(ended, expected)
            passed += right
            reason = reason or ("" if right else ended.reason or "wrong")
            if reason and not partial:
                break
    return passed, reason


@contextlib.contextmanager
def _running(runner: Runner, source: str, inputs: Sequence[str], limits: Limits) -> Iterator[Iterator[Run]]:
    """What a runner yields; what it has not run yet is not run."""
    runs = iter(runner(source, inputs, limits))
    try:
        yield runs
    finally:
        if hasattr(runs, "close"):
            runs.close()


def _printed(ended: Run, expected: str) -> bool:
    """Equal line by line, apart from blanks at the ends of lines and empty lines at the end; and no failure."""
    return ended.exit_code == 0 and not ended.reason and _lines(ended.stdout) == _lines(expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]
