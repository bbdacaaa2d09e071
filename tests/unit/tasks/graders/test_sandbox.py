"""The sandbox: a hundred programs that misbehave end within their limits and leave no process and no file."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from gspo.errors import RewardError
from gspo.tasks.graders import sandbox
from gspo.tasks.graders.code import outcomes_of
from gspo.tasks.graders.sandbox import Limits, Run, best_level, run
from tests.unit.tasks.graders.misbehaving import PROGRAMS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox's full form is for Linux")

SMALL = Limits(seconds=0.7, cpu_seconds=1, memory_bytes=2**28, processes=16, file_bytes=2**20, output_bytes=2**16)
PLACES = (
    "/",
    "/tmp",
    "/var/tmp",
    "/dev/shm",
    "/root",
    "/home",
    "/etc",
    "/usr/lib",
    os.getcwd(),
    str(Path.home()),
)


def processes(*words: str) -> list[str]:
    """Command lines of processes whose command line or environment has one of the words."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            line = (place / "cmdline").read_bytes()
            if any(word.encode() in line + (place / "environ").read_bytes() for word in words):
                found.append(line.decode(errors="replace"))
        except OSError:
            continue
    return found


def files(needle: str) -> list[str]:
    return [
        f"{place}/{name}" for place in PLACES if os.path.isdir(place) for name in os.listdir(place) if needle in name
    ]


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch) -> str:
    """A mark that all processes of this test's sandboxes have in their environment."""
    mark = secrets.token_hex(8)
    monkeypatch.setattr(sandbox.secrets, "token_hex", lambda count: mark)
    return mark


needs_namespaces = pytest.mark.skipif("best_level() != 'namespaces'", reason="no namespaces on this machine")


def test_there_are_a_hundred() -> None:
    assert len(PROGRAMS) >= 100


@needs_namespaces
def test_a_hundred_programs_that_misbehave(token: str) -> None:
    needle = f"needle-{token}"
    library = Path(json.__file__).read_text()

    def grade(name: str) -> tuple[str, Any, float]:
        began = time.monotonic()
        (outcome,) = outcomes_of([PROGRAMS[name].replace("NEEDLE", needle)], [[{"output": "right"}]], SMALL)
        return name, outcome, time.monotonic() - began

    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(grade, PROGRAMS))
    assert [name for name, outcome, _ in found if outcome is None or outcome.passed or not outcome.reason] == []
    assert [(name, seconds) for name, _, seconds in found if seconds > SMALL.seconds + 5] == []
    assert processes(token) == []
    assert files(needle) == []
    assert Path(json.__file__).read_text() == library
    assert [ended.stdout for ended in run("print(input())", ["still works"])] == ["still works\n"]


@needs_namespaces
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("loop", "time"), ("sleep", "time"), ("ignores signals and loops", "time"), ("daemon", "wrong"),
        ("output for ever", "output"), ("100 MB of output", "output"), ("grows its output", "wrong"),
        ("list without end", "wrong"), ("segmentation fault", "wrong"), ("hogs", "memory"),
        ("stops its parent", "wrong"), ("kills the first process", "time"),
    ],
)  # fmt: skip
def test_the_reason_is_told(name: str, reason: str) -> None:
    """A limit that is not the one under test is wide, so that a busy machine cannot reach it first."""
    limits = Limits(seconds=3, cpu_seconds=1, memory_bytes=2**28)
    if reason != "time":
        limits = Limits(seconds=60, cpu_seconds=60, memory_bytes=2**28)
    began = time.monotonic()
    (outcome,) = outcomes_of([PROGRAMS[name]], [[{"output": "right"}]], limits)
    assert outcome is not None and (outcome.passed, outcome.reason) == (0, reason)
    assert time.monotonic() - began < limits.seconds * 1.5 + 1


@needs_namespaces
def test_a_fork_bomb_takes_few_processes_and_others_can_fork(token: str) -> None:
    """RLIMIT_NPROC counts a user's processes and spares root: the candidate must be a user of its own."""
    bomb = threading.Thread(
        target=lambda: list(run(PROGRAMS["fork bomb that sleeps"], [""], Limits(seconds=2, processes=20)))
    )
    bomb.start()
    most = 0
    while bomb.is_alive():
        most = max(most, len(processes(token)))
        subprocess.run(["true"], check=True)
        time.sleep(0.02)
    assert 15 <= most <= 20 + 2  # the guard and the keeper
    assert processes(token) == []


SEEN = """
import json, os, socket, sys

def works(act, *arguments):
    try:
        act(*arguments)
    except OSError:
        return False
    return True

print(json.dumps({
    "environ": sorted(os.environ),
    "here": os.listdir("."),
    "pids": [name for name in os.listdir("/proc") if name.isdigit()],
    "network": os.stat("/proc/self/ns/net").st_ino,
    "connects": works(socket.create_connection, ("127.0.0.1", PORT), 1),
    "sees the tests": os.path.isdir(TESTS),
    "user": os.getuid(),
    "given": sys.stdin.read(),
    "open": os.listdir("/proc/self/fd"),
    "writes": works(open, "/tmp/../program.py", "a"),
}))
"""


@needs_namespaces
def test_what_a_program_sees() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        source = SEEN.replace("PORT", str(port)).replace("TESTS", repr(str(Path(__file__).parent)))
        os.environ["GSPO_SECRET"] = "secret"
        try:
            (ended,) = run(source, ["given"])
        finally:
            del os.environ["GSPO_SECRET"]
    seen = json.loads(ended.stdout)
    assert seen["given"] == "given" and seen["here"] == [] and not seen["sees the tests"] and not seen["writes"]
    assert not seen["connects"] and seen["network"] != os.stat("/proc/self/ns/net").st_ino
    assert "GSPO_SECRET" not in seen["environ"] and len(seen["pids"]) == 2 and len(seen["open"]) == 4
    assert seen["user"] != 0


@needs_namespaces
def test_each_input_has_a_folder_of_its_own_and_nothing_lives_on() -> None:
    source = (
        "import os, time\nprint(input(), os.listdir('.'), len([p for p in os.listdir('/proc') if p.isdigit()]))\n"
        "open('kept', 'w').write('x' * 10000)\nif os.fork() == 0: time.sleep(100)"
    )
    assert [ended.stdout for ended in run(source, ["a", "b", "c"])] == ["a [] 2\n", "b [] 2\n", "c [] 2\n"]


@needs_namespaces
def test_whoever_stops_iterating_ends_it(token: str) -> None:
    runs = run("import time\nif input() == 'b': time.sleep(100)\nprint('ran')", ["a", "b", "b"])
    assert next(runs).stdout == "ran\n"
    began = time.monotonic()
    runs.close()  # type: ignore[attr-defined]
    assert time.monotonic() - began < 3 and processes(token) == []


@needs_namespaces
def test_nothing_is_left_when_gspo_is_killed() -> None:
    source = "import os, time\nos.fork()\nos.fork()\ntime.sleep(100)"
    code = f"from gspo.tasks.graders.sandbox import run\nlist(run({source!r}, ['']))"
    with subprocess.Popen([sys.executable, "-c", code]) as gspo:
        end = time.monotonic() + 30
        while len(mine := descendants(gspo.pid)) < 2 + 4 and time.monotonic() < end:  # guard, keeper, and the program
            time.sleep(0.05)
        assert len(mine) == 6
        gspo.kill()
    end = time.monotonic() + 5
    while any(os.path.exists(f"/proc/{pid}") for pid in mine) and time.monotonic() < end:
        time.sleep(0.05)
    assert not [pid for pid in mine if os.path.exists(f"/proc/{pid}")]


def descendants(pid: int) -> list[int]:
    import psutil

    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


# The weaker levels, for machines where namespaces are not allowed


@pytest.fixture
def common_python(monkeypatch: pytest.MonkeyPatch) -> str:
    """A Python that every user can run."""
    for python in (sys.executable, "/usr/bin/python3"):
        old_enough = "import sys; sys.exit(sys.version_info < (3, 11))"
        try:
            who = {"user": 65534, "group": 65534, "extra_groups": []} if os.geteuid() == 0 else {}
            if subprocess.run([python, "-c", old_enough], cwd="/", env={}, **who).returncode == 0:  # type: ignore[call-overload]
                monkeypatch.setattr(sandbox.sys, "executable", python)
                return python
        except OSError:
            continue
    pytest.skip("no Python that other users can run")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_level_user(common_python: str, token: str) -> None:
    needle = f"needle-{token}"
    names = [
        "loop", "ignores signals and sleeps", "blocks signals", "kills its parent", "kills its parent's group",
        "stops its parent",
        "fork bomb", "fork bomb of sessions", "fork bomb that ends its parents", "daemon", "busy daemon",
        "daemon without an environment", "reaper", "list without end", "100 MB of output", "writes elsewhere",
        "makes folders elsewhere", "files that cannot be removed", "huge file", "segmentation fault",
    ]  # fmt: skip
    with ThreadPoolExecutor(6) as pool:
        found = list(
            pool.map(lambda name: list(run(PROGRAMS[name].replace("NEEDLE", needle), [""], SMALL, "user")), names)
        )
    assert [len(ended) for ended in found] == [1] * len(names)
    assert found[0][0].reason == "time" and found[names.index("100 MB of output")][0].reason in ("output", "time")
    assert processes(token, needle) == [] and files(needle) == []
    assert not [name for name in os.listdir(tempfile.gettempdir()) if token in name]
    assert list(run("print(input())", ["a", "b"], level="user")) == [Run("a\n", "", 0, ""), Run("b\n", "", 0, "")]


PLAIN = """
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("sandbox", "graders/sandbox.py")
sandbox = sys.modules["sandbox"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sandbox)
programs, level = json.load(sys.stdin)
limits = sandbox.Limits(0.7, 1, 2**28, 16, 2**20, 2**16)
print(json.dumps([[vars(ended) for ended in sandbox.run(source, ["a"], limits, level)] for source in programs]))
"""


@pytest.mark.parametrize("level", ["plain", "namespaces"])
def test_a_user_who_is_not_root(common_python: str, level: str) -> None:
    """What a user gets who may not make namespaces, and what one gets who may."""
    needle = f"needle-{secrets.token_hex(8)}"
    names = ["loop", "ignores signals in a child", "fork bomb of sessions", "daemon", "reaper", "100 MB of output"]
    names += ["files that cannot be removed", "hogs", "stops its group", "kills its parent", "interrupts its parent"]
    sources = ["print(input())"] + [PROGRAMS[name].replace("NEEDLE", needle) for name in names]
    with common_copy() as folder:
        who = {"user": 65534, "group": 65534, "extra_groups": []} if os.geteuid() == 0 else {}
        ran = subprocess.run(
            [common_python, "-B", "-c", PLAIN], input=json.dumps([sources, level]), cwd=folder, capture_output=True,
            text=True, env={"PYTHONPATH": str(folder), "TMPDIR": "/tmp", "MARK": needle}, **who,
        )  # type: ignore[call-overload]  # fmt: skip
    if level == "namespaces" and "cannot be made here" in ran.stderr:
        pytest.skip("users may not make namespaces here")
    assert ran.returncode == 0, ran.stderr
    found = [runs[0] for runs in json.loads(ran.stdout)]
    assert found[0] == {"stdout": "a\n", "stderr": "", "exit_code": 0, "reason": ""}
    assert found[1]["reason"] == "time" and found[6]["reason"] in ("output", "time")
    assert processes(needle) == []
    time.sleep(0.1)
    assert not [line for line in processes("GSPO_SANDBOX=gspo-") if folder.name in line]


class common_copy:
    """The sandbox and what it imports, where every user can read it."""

    def __enter__(self) -> Path:
        self.folder = Path(tempfile.mkdtemp(prefix="gspo-test-"))
        source = Path(sandbox.__file__).parent
        (self.folder / "gspo").mkdir()
        shutil.copy(source.parents[1] / "errors.py", self.folder / "gspo")
        shutil.copytree(source, self.folder / "graders")
        for place in [self.folder, *self.folder.rglob("*")]:
            place.chmod(0o755)
        return self.folder

    def __exit__(self, *error: object) -> None:
        shutil.rmtree(self.folder)


def test_no_sandbox_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "run", refuse)
    with pytest.raises(RewardError, match=r"No candidate program can be run on this machine.*chmod o\+x"):
        best_level.__wrapped__()


def refuse(*arguments: Any, **options: Any) -> Iterator[Run]:
    raise RewardError("unshare: Operation not permitted")


def test_the_weaker_level_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def only_weak(source: str, inputs: list[str], level: str) -> list[Run]:
        if level == "namespaces":
            raise RewardError("no")
        return [Run("ran\n", "", 0, "")]

    monkeypatch.setattr(sandbox, "run", only_weak)
    assert best_level.__wrapped__() == ("user" if os.geteuid() == 0 else "plain")
    assert "with the network" in caplog.text


def test_results_that_come_together_are_told_apart() -> None:
    """The guard may be quicker than whoever reads its results."""
    from gspo.tasks.graders.sandbox import run

    ended = []
    for result in run("print(input())", ["1", "2", "3", "4"]):
        time.sleep(0.3)  # the next ones are ready meanwhile
        ended.append(result.stdout)
    assert ended == ["1\n", "2\n", "3\n", "4\n"]
