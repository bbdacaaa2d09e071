"""code: programs and their tests."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import pytest

from gspo.errors import RewardError
from gspo.tasks.graders.code import code, outcomes_of, program_of, read_tests
from gspo.tasks.graders.sandbox import Limits, Run

ADD = "def add(a, b):\n    return a + b\n"
ASSERTS = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]
DOUBLE = [{"input": "3\n", "output": "6\n"}, {"input": "-1", "output": "-2"}]


def fenced(program: str, language: str = "python") -> str:
    return f"Here it is:\n```{language}\n{program}\n```\nThat is all."


@pytest.mark.parametrize(
    ("said", "program"),
    [
        (fenced("x = 1"), "x = 1\n"),
        (fenced("x = 1", "py"), "x = 1\n"),
        (fenced("x = 1", "Python3"), "x = 1\n"),
        (fenced("x = 1", ""), "x = 1\n"),
        (fenced("x = 1") + "\n" + fenced("x = 2"), "x = 2\n"),
        (fenced("x = 1") + "\n```bash\nls\n```", "x = 1\n"),
        ("x = 1", "x = 1"),
        ("```python\nx = 1", "x = 1"),
        ("<think>\n```python\nx = 1\n```\n</think>\nx = 2", "\nx = 2"),
        ("<think>\n```python\nx = 1\n```", ""),
    ],
)
def test_the_program_of_an_answer(said: str, program: str) -> None:
    assert program_of(said) == program


def test_tests_of_a_row() -> None:
    assert read_tests(["assert x"]) == read_tests("assert x") == read_tests('["assert x"]') == ("assert x",)
    assert read_tests([{"input": "1", "output": "2"}]) == read_tests('{"input": "1", "output": "2"}') == (("1", "2"),)
    assert read_tests([{"input": None, "output": ""}]) == (("", ""),)
    for wrong in (None, [], "", {}, 5, [5], [{"input": "1"}], ["assert x", ""], "[]"):
        assert read_tests(wrong) is None


def test_statements() -> None:
    said = [fenced(ADD), fenced("def add(a, b):\n    return 3"), fenced("def plus(): pass"), "I cannot", ""]
    assert code(said, [ASSERTS] * 5) == [1, 0, 0, 0, 0]
    assert [found and found.passed for found in outcomes_of(said, [ASSERTS] * 5)] == [2, 1, 0, 0, 0]


def test_what_ends_a_program_early_is_no_pass() -> None:
    for end in (
        "import os; os._exit(0)",
        "import sys; sys.exit(0)",
        "raise SystemExit",
        "print('passed')",
        "import os; os.close(1)",
    ):
        assert code([fenced(f"def add(a, b):\n    {end}")], [ASSERTS]) == [0]
    assert code([fenced("import sys; sys.exit(0)")], [ASSERTS]) == [0]
    assert code([fenced(ADD + "import atexit, time\natexit.register(time.sleep, 1000)")], [ASSERTS]) == [1]


def test_programs_are_run_as_modules_are() -> None:
    program = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "import sys\nprint('no newline', end='')\n"
        "@dataclass\nclass P:\n    x: int\n" + ADD + "if __name__ == '__main__':\n    add(input(), 1)\n"
    )
    assert code([fenced(program)], [[*ASSERTS, "assert P(1) == P(1)", "import math\nassert math.pi > 3"]]) == [1]


def test_input_and_output() -> None:
    said = [
        "print(2 * int(input()))",
        "print(6)",
        "print(2 * int(input()), end='  \\n\\n')",
        "print(2 * int(input())); exit(1)",
    ]
    assert code([fenced(text) for text in said], [DOUBLE] * 4) == [1, 0, 1, 0]
    assert code([fenced("print(sum(map(int, open(0))))")], [[{"input": "1\n2\n3", "output": "6"}]]) == [1]
    mixed = [*DOUBLE, "assert callable(print)"]
    assert code([fenced("import sys\nfor line in sys.stdin: print(2 * int(line))")], [mixed]) == [1]


def test_rows_without_tests_are_unscored() -> None:
    assert code([fenced(ADD)] * 3, [None, ASSERTS, "[]"]) == [None, 1, None]
    with pytest.raises(RewardError, match="code needs a column 'tests'"):
        code([ADD], None)  # type: ignore[arg-type]


class Recorder:
    """A sandbox of the user's own."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, list[str], Limits]] = []
        self.ran = 0

    def __call__(self, source: str, inputs: Sequence[str], limits: Limits) -> Iterator[Run]:
        self.asked.append((source, list(inputs), limits))
        for text in inputs:
            self.ran += 1
            yield Run(str(2 * int(text)) if text != "7" else "?", "", 0, "")


def test_another_sandbox() -> None:
    recorder, limits = Recorder(), Limits(seconds=3)
    tests = json.dumps([{"input": str(n), "output": str(2 * n)} for n in (1, 7, 8)])
    (found,) = outcomes_of(["the program"], [tests], limits, recorder)
    assert found is not None and (found.passed, found.total, found.reason) == (1, 3, "wrong")
    assert recorder.asked == [("the program", ["1", "7", "8"], limits)] and recorder.ran == 2
    (found,) = outcomes_of(["the program"], [tests], limits, recorder, partial=True)
    assert found is not None and (found.passed, found.total, found.reason) == (2, 3, "wrong")
    outcomes_of(["the program"] * 5, [tests] * 5, limits, recorder)
    assert len(recorder.asked) == 3  # equal programs run once
