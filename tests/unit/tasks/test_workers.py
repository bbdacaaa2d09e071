"""Reward functions in processes of their own: what misbehaves costs a call, and leaves no process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gspo.config import Config
from gspo.errors import ConfigError, RewardError
from gspo.tasks import RewardSuite, load_task
from gspo.tasks.functions import importable_as
from gspo.tasks.rewards import Limits, split
from gspo.types import Prompt

FUNCTIONS = '''
import asyncio, os, random, re, signal, subprocess, sys, time
import numpy

def pids(*processes):
    with open(os.environ["GSPO_TEST_PIDS"], "a") as file:
        file.write("".join(f"{pid}\\n" for pid in (os.getpid(), os.getppid(), *processes)))

def family():
    """A child, one in a session of its own, and one whose parent is gone."""
    children = [subprocess.Popen(["sleep", "600"]), subprocess.Popen(["sleep", "600"], start_new_session=True)]
    orphan = subprocess.run("setsid sleep 600 > /dev/null & echo $!", shell=True, stdout=subprocess.PIPE, text=True)
    pids(*(child.pid for child in children), int(orphan.stdout))

def good(completions, **_): return [float(text == "good") for text in completions]
def hang(completions, **_):
    if "bad" in completions:
        pids()
        while True:
            pass
    return good(completions)
def hang_in_c(completions, **_):
    family()
    re.match(r"(a+)+$", "a" * 60 + "b")
def raises(completions, **_):
    if "bad" in completions:
        raise ValueError("cannot read " + "x" * 100_000)
    return good(completions)
def together(completions, **_):
    if len(completions) > 1:
        raise ValueError("one at a time")
    return good(completions)
def leaves(completions, **_):
    if "bad" in completions:
        family()
        os._exit(3)
    return good(completions)
def crashes(completions, **_): os.kill(os.getpid(), signal.SIGSEGV)
def exits(completions, **_): sys.exit("enough")
def says(completions, **_):
    print("to stdout", "x" * 1_000_000)
    os.write(2, b"to stderr\\n")
    subprocess.run(["echo", "from a child"])
    return good(completions)
def closes(completions, **_):
    os.close(1); sys.stdout.close()
    return good(completions)
def huge(completions, **_): return ["x" * 10_000_000] * len(completions)
def arrays(completions, **_): return numpy.ones(len(completions), dtype=numpy.float32)
def draws(completions, **_): return [random.random() + numpy.random.rand() for _ in completions]
def order(completions, **_): return [float(hash("x") % 1000)] * len(completions)
def slow(completions, **_):
    time.sleep(1.3)
    return good(completions)
lock = None
async def later(completions, **_):
    """A client that was made in the first call still works in the second."""
    global lock
    if lock is None:
        lock = asyncio.Event()
        asyncio.get_running_loop().call_later(0.05, lock.set)
    await asyncio.wait_for(lock.wait(), 5)
    return [1.0] * len(completions)
async def never(completions, **_): await asyncio.sleep(600)
def has_torch(completions, **_): return [float("torch" in sys.modules)] * len(completions)
def mean(completions, **_): return [float(len(completions))] * len(completions)
def limit(completions, max_tokens): return [float(max_tokens)] * len(completions)
def keys(completions, **columns): return [float("max_tokens" in columns)] * len(completions)
def who(completions, **_): pids(); return good(completions)
'''


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GSPO_TEST_PIDS", str(tmp_path / "pids"))
    path = tmp_path / "functions.py"
    path.write_text(FUNCTIONS)
    return path


Make = Callable[..., RewardSuite]


@pytest.fixture
def make(file: Path) -> Iterator[Make]:
    """Suites of functions in that file, closed afterwards; what they log and say is kept in ``heard``."""
    made: list[RewardSuite] = []

    def suite(*names: str, **limits: Any) -> RewardSuite:
        limits = {"timeout": 20.0, "workers": 1} | limits
        made.append(RewardSuite([f"{file}:{name}" for name in names], [1.0] * len(names), Limits(**limits)))
        made[-1].heard = []  # type: ignore[attr-defined]
        made[-1].log = made[-1].say = made[-1].heard.append  # type: ignore[attr-defined]
        return made[-1]

    yield suite
    for one in made:
        one.close()


def score(suite: RewardSuite, *texts: str, group: int = 2) -> list[float | None]:
    """Texts in groups of two, each group with a prompt of its own."""
    return [found.reward for found in scores(suite, *texts, group=group)]


def scores(suite: RewardSuite, *texts: str, group: int = 2) -> list[Any]:
    prompts = [Prompt(f"p{number}", f"question {number}", {"answer": "x"}) for number in range(len(texts) // group)]
    rows = [prompt for prompt in prompts for _ in range(group)]
    return suite.score(rows, list(texts), [[1]] * len(texts))


def all_gone(folder: Path, seconds: float = 5.0) -> bool:
    """No process of those that wrote their id is running. One that is dead and not yet collected counts as gone."""
    deadline = time.monotonic() + seconds
    ids = [int(line) for line in (folder / "pids").read_text().split()]
    while any(map(running, ids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return bool(ids)


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_function_that_hangs_ends_in_a_sentence(make: Make, tmp_path: Path) -> None:
    suite = make("hang", timeout=0.5)
    start = time.monotonic()
    with pytest.raises(RewardError) as error:
        score(suite, "good", "good", "good", "bad")
    assert str(error.value) == (
        "The reward function hang took longer than 0.5 s (task.reward_timeout) while scoring 4 answers, the first to "
        "prompt p0. Mend it, or set task.on_reward_error = 'unscored' to go on without such answers."
    )
    assert time.monotonic() - start < 5 and all_gone(tmp_path)
    assert score(suite, "good", "other") == [1.0, 0.0]  # a later call works


def test_only_the_group_that_hangs_is_unscored(make: Make, tmp_path: Path) -> None:
    suite = make("good", "hang", timeout=0.5, on_error="unscored")
    found = scores(suite, "good", "other", "good", "bad", "good", "good")
    assert [one.reward for one in found] == [2.0, 0.0, None, None, 2.0, 2.0]
    assert found[2].terms == {"good": 1.0, "hang": None} and found[2].error == "hang took longer than 0.5 s"
    assert found[0].error is None and all_gone(tmp_path)
    (said,) = suite.heard  # type: ignore[attr-defined]
    assert "while scoring 2 answers, the first to prompt p1. 2 of 6 answers are unscored." in said


def test_a_hang_in_c_code_with_children_in_other_sessions(make: Make, tmp_path: Path) -> None:
    """A regular expression that backtracks for ever holds the interpreter: no signal handler or thread gets a turn."""
    with pytest.raises(RewardError, match=r"hang_in_c took longer than 1 s"):
        score(make("hang_in_c", timeout=1.0), "a", "b")
    assert len((tmp_path / "pids").read_text().split()) == 5 and all_gone(tmp_path)


def test_an_exception_names_the_prompt_and_keeps_its_traceback(make: Make) -> None:
    with pytest.raises(RewardError) as error:
        score(make("raises"), "good", "good", "other", "bad")
    text = str(error.value)
    assert text.startswith("The reward function raises raised ValueError: cannot read xxx") and len(text) < 700
    assert "while scoring an answer to prompt p1." in text
    assert "in raises" in str(error.value.__cause__) and "functions.py" in str(error.value.__cause__)


def test_only_the_answer_that_raises_is_unscored_and_the_traceback_is_logged_once(make: Make) -> None:
    suite = make("raises", "good", on_error="unscored")
    for _ in range(2):
        found = scores(suite, "good", "good", "other", "bad")
        assert [one.reward for one in found] == [2.0, 2.0, 0.0, None]
        assert found[3].error.startswith("raises raised ValueError")
    heard = suite.heard  # type: ignore[attr-defined]
    assert len(heard) == 3 and sum("Traceback" in text for text in heard) == 1
    assert "an answer to prompt p1. 1 of 4 answers are unscored" in heard[0] and "1 of 4" in heard[2]


def test_what_fails_only_together(make: Make) -> None:
    assert score(make("together", on_error="unscored"), "good", "other") == [1.0, 0.0]
    with pytest.raises(RewardError, match=r"one at a time while scoring 2 answers, the first to prompt p0"):
        score(make("together"), "good", "other")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("leaves", "leaves ended its process with exit code 3"),
        ("crashes", "crashes was ended by SIGSEGV"),
        ("exits", "exits raised SystemExit: enough"),
    ],
)
def test_a_process_that_ends(make: Make, tmp_path: Path, name: str, expected: str) -> None:
    with pytest.raises(RewardError, match=expected):
        score(make(name), "bad", "good")
    if name == "leaves":
        assert all_gone(tmp_path)
        assert score(make(name, on_error="unscored"), "bad", "good", "good", "good") == [None, None, 1.0, 1.0]


def test_what_a_function_prints_is_logged_in_part_and_disturbs_nothing(make: Make) -> None:
    suite = make("says")
    assert score(suite, "good", "other") == [1.0, 0.0]
    (text,) = suite.heard  # type: ignore[attr-defined]
    assert text.startswith("printed by the reward function says:\nto stdout xxx") and len(text) < 21_000
    assert text.rstrip().endswith("characters more")
    assert score(make("closes"), "good", "other") == [1.0, 0.0]


def test_returns_are_judged_there_and_cross_as_numbers(make: Make) -> None:
    assert score(make("arrays"), "a", "b") == [1.0, 1.0]
    with pytest.raises(RewardError, match=r"gave 'x{50,70} ... for an answer to prompt p0; a score is a finite number"):
        score(make("huge"), "a", "b")


def test_async_functions_share_a_loop(make: Make, tmp_path: Path) -> None:
    suite = make("later")
    assert score(suite, "a", "b") == score(suite, "a", "b") == [1.0, 1.0]
    with pytest.raises(RewardError, match=r"never took longer"):
        score(make("never", timeout=0.5), "a", "b")


def test_draws_depend_on_what_is_scored_and_not_on_when(make: Make) -> None:
    texts = ("a", "b", "c", "d")
    first, other = make("draws", "order", seed=1), make("draws", "order", seed=1)
    score(other, "x", "y")
    assert score(first, *texts) == score(other, *texts) == score(first, *texts)
    assert score(first, *texts) != score(make("draws", "order", seed=2), *texts)
    assert score(first, *texts) != score(first, *texts[::-1])[::-1]


def test_parallel_workers_get_whole_groups(make: Make, tmp_path: Path) -> None:
    suite = make("mean", "good", workers=3)
    sizes = [found.terms["mean"] for found in scores(suite, *["good"] * 8)]
    assert sizes == [2.0, 2.0, 2.0, 2.0, 4.0, 4.0, 4.0, 4.0]
    assert split([[0, 1], [2]], 5) == [[0, 1], [2]] and split([], 2) == [[]]
    assert score(suite) == []
    several = make("who", workers=2)
    score(several, *["good"] * 4)
    assert len(set((tmp_path / "pids").read_text().split())) == 4
    several.close()
    assert all_gone(tmp_path)
    assert score(several, *["good"] * 4) == [1.0] * 4  # closed is not the end


def test_parallel_workers_run_at_the_same_time(make: Make) -> None:
    suite = make("slow", workers=2)
    score(suite, "a", "b")  # both processes need not be started now
    suite.workers[1].start()
    seen: list[tuple[int, int]] = []
    prompts = [Prompt("a", "a"), Prompt("b", "b")]
    start = time.monotonic()
    suite.score(prompts, ["good", "x"], [[1], [1]], lambda done, total: seen.append((done, total)))
    assert time.monotonic() - start < 2.4
    assert seen[0] == (0, 2) and len(seen) >= 2  # the start, and a heartbeat


def test_one_of_several_workers_that_fails_ends_the_others(make: Make, tmp_path: Path) -> None:
    suite = make("raises", "hang", workers=2)
    start = time.monotonic()
    with pytest.raises(RewardError, match=r"raises raised"):
        score(suite, "bad", "bad", "other", "bad")
    assert time.monotonic() - start < 10


def test_a_light_process_and_the_runs_facts(make: Make) -> None:
    assert score(make("has_torch"), "a", "b") == [0.0, 0.0]
    settings = {"max_tokens": 64}
    assert score(make("limit", settings=settings), "a", "b") == [64.0, 64.0]
    assert score(make("keys", settings=settings), "a", "b") == [0.0, 0.0]  # **kwargs are columns, as in TRL


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import sys; sys.exit(1)", "cannot be imported: SystemExit"),
        ("import os; print('no licence'); os._exit(4)", "ended its process with exit code 4. It printed: no licence"),
        ("1 / 0", "cannot be imported: ZeroDivisionError"),
        ("x = 1", "has no 'f'"),
    ],
)
def test_a_module_that_cannot_be_imported(tmp_path: Path, source: str, expected: str) -> None:
    (tmp_path / "m.py").write_text(source)
    with pytest.raises(ConfigError) as error:
        RewardSuite([f"{tmp_path}/m.py:f"], [1.0], Limits(workers=1))
    assert expected in str(error.value)


def test_columns_that_cannot_be_sent(make: Make) -> None:
    with pytest.raises(RewardError, match=r"columns cannot be sent"):
        make("good").score([Prompt("1", "q", {"answer": lambda: 1})], ["a"], [[1]])


TRAINER = """
import sys
from gspo.tasks.rewards import Limits, RewardSuite
from gspo.types import Prompt
suite = RewardSuite([sys.argv[1]], [1.0], Limits(timeout=600, workers=1))
print("ready", flush=True)
suite.score([Prompt("1", "q")], ["bad"], [[1]])
"""


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_no_process_outlives_the_trainer(file: Path, tmp_path: Path, end: signal.Signals) -> None:
    """Whatever ends it, in the middle of a call that never returns."""
    command = [sys.executable, "-c", TRAINER, f"{file}:hang_in_c"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as trainer:
        deadline = time.monotonic() + 30
        while not (tmp_path / "pids").exists() or len((tmp_path / "pids").read_text().split()) < 5:
            assert time.monotonic() < deadline and trainer.poll() is None
            time.sleep(0.05)
        trainer.send_signal(end)
        trainer.wait(15)
    assert all_gone(tmp_path)


def test_no_process_outlives_a_trainer_that_forgets_to_close(file: Path, tmp_path: Path) -> None:
    code = TRAINER.replace("import sys", "import sys, os")
    done = subprocess.run(
        [sys.executable, "-c", code, f"{file}:who"], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr == "" and all_gone(tmp_path)


def test_the_settings_of_a_config_arrive(file: Path, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    config = Config().with_values(
        {
            "task.prompts": str(tmp_path / "p.jsonl"),
            "task.reward": (f"{file}:hang", f"{file}:limit"),
            "task.reward_timeout": 0.5,
            "task.reward_workers": 2,
            "task.on_reward_error": "unscored",
            "rollout.max_tokens": 33,
        }
    )
    suite = load_task(config).rewards
    suite.log = suite.say = lambda text: None
    found = scores(suite, "bad", "bad", "good", "good")
    assert [one.terms for one in found] == [{"hang": None, "limit": 33.0}] * 2 + [{"hang": 1.0, "limit": 33.0}] * 2
    assert len(suite.workers) == 2
    suite.close()
    for key, value in (("reward_timeout", -1), ("reward_timeout", float("inf")), ("reward_workers", 0)):
        with pytest.raises(ConfigError, match=f"task.{key} must be"):
            Config().with_values({f"task.{key}": value})


def module_level(completions: list[str], **_: Any) -> list[float]:
    return [float(os.getpid())] * len(completions)


def test_what_can_be_imported_runs_elsewhere_and_the_rest_here(tmp_path: Path) -> None:
    seen: list[int] = []

    def closure(completions: list[str], **_: Any) -> list[float]:
        seen.append(len(completions))
        return [float(os.getpid())] * len(completions)

    rows = [{"prompt": str(number)} for number in range(30)]
    task = load_task(Config(), rows=rows, functions=[module_level, closure, "length"])
    (note,) = task.notes
    assert note.startswith("rewards: closure cannot be imported by another process and runs in this one")
    (found,) = task.rewards.score(task.train.take(1), ["a"], [[1, 2]])
    assert found.terms["module_level"] != os.getpid() and found.terms["closure"] == os.getpid()
    assert seen == [1] and found.terms["length"] == -2 / Config().rollout.max_tokens
    assert importable_as(lambda: 1) is None and importable_as(module_level) == f"{__name__}:module_level"
    task.rewards.close()


@pytest.mark.parametrize("kind", ["plain", "async", "catches"])
def test_a_limit_in_this_process(kind: str) -> None:
    import asyncio

    def plain(completions: list[str]) -> list[float]:
        while True:
            pass

    def catches(completions: list[str]) -> list[float]:
        while True:
            try:
                time.sleep(0.01)
            except Exception:
                continue

    async def later(completions: list[str]) -> list[float]:
        await asyncio.sleep(60)
        return [1.0]

    function = {"plain": plain, "async": later, "catches": catches}[kind]
    suite = RewardSuite([function], [1.0], Limits(timeout=0.3))
    with pytest.raises(RewardError, match=r"took longer than 0.3 s"):
        score(suite, "a", group=1)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
