"""math: math-verify used as it must be."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

pytest.importorskip("math_verify")

from gspo.tasks.graders import math as module
from gspo.tasks.graders.math import grade, math


@pytest.mark.parametrize(
    ("said", "gold", "score"),
    [
        ("69", "69", 1), ("10 + 59 = 69", "69", 1), ("The answer is 69.", "69", 1), ("68", "69", 0), ("", "69", 0),
        ("no idea", "69", 0), ("so \\boxed{69}", "69", 1), ("\\boxed{69} out of 100", "69", 1),
        ("$\\frac12$", "0.5", 1),
        ("The answer is $\\frac{1}{2}$", "1/2", 1), ("0.5", "\\frac{1}{2}", 1), ("1,234", "1234", 1),
        ("1234", "1,234", 1),
        ("$(x+1)^2$", "$x^2+2x+1$", 1), ("$x^2+2x+2$", "$(x+1)^2$", 0), ("\\boxed{2\\sqrt{3}}", "\\sqrt{12}", 1),
        ("$\\{1,2\\}$", "$\\{2,1\\}$", 1), ("-3", "-3", 1), ("3", "-3", 0), ("72 eggs", "6 * 12 = 72\n#### 72", 1),
        ("\\boxed{5}", "We get $x = 3 + 2$, so \\boxed{5}.", 1), ("3", "We get $x = 3 + 2$, so \\boxed{5}.", 0),
        ("<think>maybe 69", "69", 0), ("<think>68</think>69", "69", 1), ("<answer>69</answer> not 68", "69", 1),
        ("I say 1, 2, 3, 4, 5, 6, 7, 8, 9, 10", "5", 0), ("\\boxed{1} \\boxed{2} \\boxed{3}", "2", 0),
        ("\\boxed{1, 2, 3}", "2", 0), ("1 or 2 or 3", "2", 0),
    ],
)  # fmt: skip
def test_answers(said: str, gold: str, score: float) -> None:
    assert grade_part(said, gold) == score


def grade_part(said: str, gold: str) -> float | None:
    return math([[{"role": "assistant", "content": said}]], [gold])[0]


def test_gold_comes_first() -> None:
    """The library's comparison has a direction: an interval may answer a relation, not the other way round."""
    relation, interval = "$m \\ge \\sqrt{2}$", "$m \\in [\\sqrt{2}, \\infty)$"
    assert grade(interval, relation) == 1
    assert grade(relation, interval) == 0


@pytest.mark.parametrize("gold", ["", "   ", "see the solution", "Paris", "\\frac{", None, True])
def test_a_gold_value_that_cannot_be_read_is_unscored(gold: str | None) -> None:
    for said in ("", "5", str(gold), f"\\boxed{{{gold}}}"):
        assert math([said], [gold]) == [None]


def test_columns() -> None:
    assert math(["5", "5", "5"], [5, 5.0, 6]) == [1, 1, 0]
    assert math(["5", "6"], None, ["so \\boxed{5}", "so \\boxed{5}"]) == [1, 0]


def test_a_comparison_without_end_is_ended() -> None:
    """Exponents that no handler of a signal can interrupt; the next answer is graded as ever."""
    began = time.monotonic()
    assert grade("$9^{9^{9^{9}}} + 1$", "9", seconds=1.0) == 0
    assert grade("$10^{10^{10}} - 10^{10^{10}} + 5$", "5", seconds=1.0) in (0, 1)
    assert grade("9", "$9^{9^{9^{9^{9}}}}$ is not $9$ but $2$", seconds=1.0) is not None
    assert time.monotonic() - began < 20
    assert grade("9", "9") == 1


def test_other_threads_may_ask_and_the_callers_alarm_is_left_alone() -> None:
    kept: list[float | None] = []
    before = signal.getsignal(signal.SIGALRM)
    signal.setitimer(signal.ITIMER_REAL, 1000)
    try:
        threads = [threading.Thread(target=lambda n=n: kept.append(grade(str(n), str(n)))) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 900
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    assert kept == [1.0] * 4 and signal.getsignal(signal.SIGALRM) is before


def test_a_killed_process_is_replaced() -> None:
    assert grade("1", "1") == 1
    assert module._worker is not None
    os.kill(module._worker.pid, signal.SIGKILL)
    assert grade("1", "1") == 1


def test_nothing_is_left_when_the_asker_dies() -> None:
    """Killed while its process computes without end: the timer ends that too."""
    code = (
        "from gspo.tasks.graders import math as m\n"
        "m.grade('1', '1')\nprint(m._worker.pid, flush=True)\n"
        "m.grade('$9^{9^{9^{9}}} + 1$', '9', 0.5)\nm.grade('1', '1')"
        "\nimport time; time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as asker:
        assert asker.stdout is not None
        worker = int(asker.stdout.readline())
        asker.kill()
    end = time.monotonic() + 10
    while os.path.exists(f"/proc/{worker}") and time.monotonic() < end:
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{worker}")
