"""The process between gspo and a candidate program; a script that ``sandbox.py`` starts. Standard library only.

    gspo -> guard -> keeper -> candidate and whatever it starts

The guard watches its standard input: when that ends, gspo wants no more or is dead, and all below is killed. The keeper
runs the candidate once for each input, kills all that is left of it, and writes a line of JSON. In the level
``namespaces`` the keeper is the first process of a PID namespace, so the kernel kills all in it when it ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import select
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gspo.tasks.graders.guard import ending, isolation
else:  # a script: the package above it must not be imported here
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import ending
    import isolation

LINUX = sys.platform == "linux"
SUBREAPER, NO_NEW_PRIVILEGES, PARENT_DEATH_SIGNAL = 36, 38, 1
COUNTS_PER_NAMESPACE = (5, 14)
"""Linux from which RLIMIT_NPROC counts within a user namespace."""
ERROR_TAIL = 2000
MEMORY_CHECK_SECONDS = 0.05

Job = dict[str, Any]


def main() -> None:
    job = read_job()
    job["user"], job["group"] = candidate_user()
    job["base"] = 0 if os.geteuid() == 0 else ending.threads_of(os.geteuid())
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # if memory ends, this goes before the training run
    option(SUBREAPER, 1)
    if job["level"] == "namespaces":
        isolation.unshare(os.geteuid(), os.getegid())
        version = re.match(r"(\d+)\.(\d+)", os.uname().release)
        if version and (int(version[1]), int(version[2])) >= COUNTS_PER_NAMESPACE:
            job["base"] = 0
    keeper = os.fork()
    if keeper == 0:
        keep(job)
    guard(keeper)
    if job["level"] != "namespaces":
        ending.sweep(job)
        ending.remove_leftovers(job)


def read_job() -> Job:
    """One line with a count, then that many bytes of JSON; standard input stays open behind it."""
    count = b""
    while not count.endswith(b"\n"):
        count += os.read(0, 1) or b"\n"
    data = b""
    while len(data) < int(count):
        more = os.read(0, int(count) - len(data))
        if not more:
            os._exit(0)  # nobody is there any more
        data += more
    job: Job = json.loads(data)
    return job


def candidate_user() -> tuple[int, int]:
    """As root a user of its own that nobody else is, so that limits and kill(-1) reach the candidate only."""
    if os.geteuid() != 0:
        return os.geteuid(), os.getegid()
    start, count = 0, 2**32
    if LINUX:
        with open("/proc/self/uid_map") as file:
            start, _, count = (int(part) for part in file.read().splitlines()[-1].split())
    fresh = 2_000_000_000 + os.getpid() if count > 4e9 else start + count // 2 + os.getpid() % (count // 2 - 1)
    return fresh, fresh


def guard(keeper: int) -> None:
    """Return when the keeper is gone; kill it when standard input ends."""
    watched = [0] + ([os.pidfd_open(keeper)] if hasattr(os, "pidfd_open") else [])
    while True:
        ready, _, _ = select.select(watched, [], [], 0.05)
        if os.waitpid(keeper, os.WNOHANG)[0]:
            return
        if 0 in ready and not os.read(0, 4096):
            with contextlib.suppress(ProcessLookupError):
                os.kill(keeper, signal.SIGKILL)
            os.waitpid(keeper, 0)
            return


def keep(job: Job) -> None:
    """The keeper: never returns."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        option(PARENT_DEATH_SIGNAL, signal.SIGKILL)
        option(SUBREAPER, 1)
        program = job["source"].encode("utf-8", "replace")
        if job["level"] == "namespaces":
            path = isolation.build_root(job["prefixes"], program)
        else:
            path = os.path.join(job["folder"], "program.py")
            with open(path, "wb") as file:
                file.write(program)
            os.chmod(path, 0o644)
            os.chmod(job["folder"], 0o711)
        for number, text in enumerate(job["inputs"]):
            say(run_once(job, path, text, number))
    except BaseException as error:
        with contextlib.suppress(OSError):  # nobody may be reading any more
            say({"error": f"{type(error).__name__}: {error}"})
    finally:
        os._exit(0)


def run_once(job: Job, path: str, text: str, number: int) -> dict[str, Any]:
    folder = make_folder(job, number)
    given, out, err = scratch(), scratch(), scratch()
    os.write(given, text.encode("utf-8", "replace"))
    os.lseek(given, 0, os.SEEK_SET)
    failed_read, failed_write = os.pipe()
    child = os.fork()
    if child == 0:
        become_candidate(job, path, folder, (given, out, err), failed_write)
    os.close(failed_write)
    failed = os.read(failed_read, 1000)
    status, reason = wait(child, job["limits"], out, err, job["level"] == "namespaces")
    ending.sweep(job)
    result = {
        "stdout": head(out, job["limits"]["output_bytes"]),
        "stderr": tail(err),
        "exit_code": None if status is None else os.waitstatus_to_exitcode(status),
        "reason": reason,
    }
    for descriptor in (given, out, err, failed_read):
        os.close(descriptor)
    return {"error": failed.decode()} if failed else result


def become_candidate(job: Job, path: str, folder: str, streams: tuple[int, int, int], failed: int) -> None:
    """Limits, then another user if there is one, then the program. Never returns."""
    try:
        os.setsid()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        os.chdir(folder)
        os.umask(0o077)
        set_limits(job["limits"], job["base"])
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(job["group"])
            os.setuid(job["user"])
        option(NO_NEW_PRIVILEGES, 1)
        option(PARENT_DEATH_SIGNAL, signal.SIGKILL)
        for number in (signal.SIGPIPE, signal.SIGINT, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        environment = {
            "PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8",
            "PYTHONHASHSEED": "0", "PYTHONUTF8": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
            "GSPO_SANDBOX": job["token"],
        }  # fmt: skip
        os.execve(job["interpreter"], [job["interpreter"], "-s", "-P", "-B", path], environment)
    except BaseException as error:
        os.write(failed, f"{type(error).__name__}: {error}".encode()[:900])
    finally:
        os._exit(126)


def set_limits(limits: Job, base: int) -> None:
    """``base``: threads that the user has already, since RLIMIT_NPROC counts them all."""
    seconds = limits["cpu_seconds"]
    values = {
        resource.RLIMIT_CPU: (seconds, seconds + 1),
        resource.RLIMIT_AS: (limits["memory_bytes"],) * 2,
        resource.RLIMIT_FSIZE: (limits["file_bytes"],) * 2,
        resource.RLIMIT_NPROC: (base + limits["processes"],) * 2,
        resource.RLIMIT_NOFILE: (256, 256),
        resource.RLIMIT_CORE: (0, 0),
    }
    for kind, value in values.items():
        most = resource.getrlimit(kind)[1]
        if most != resource.RLIM_INFINITY and os.geteuid() != 0:
            value = (min(value[0], most), min(value[1], most))
        resource.setrlimit(kind, value)


def wait(child: int, limits: Job, out: int, err: int, alone: bool) -> tuple[int | None, str]:
    """(status, reason) when the candidate ended or must end: reason is '', 'time', 'memory' or 'output'."""
    end = time.monotonic() + limits["seconds"]
    pause, check = 0.0005, 0.0
    while True:
        with contextlib.suppress(ChildProcessError):
            while (found := os.wait4(-1, os.WNOHANG))[0]:
                if found[0] == child:
                    used = found[2].ru_utime + found[2].ru_stime
                    return found[1], ended_by(found[1], used, limits, out, err)
        now = time.monotonic()
        if now > end:
            return None, "time"
        if too_much(out, err, limits):
            return None, "output"
        if alone and now > check:
            check = now + MEMORY_CHECK_SECONDS
            if resident_bytes() > limits["memory_bytes"]:
                return None, "memory"
        time.sleep(pause)
        pause = min(2 * pause, 0.01)


def ended_by(status: int, cpu_seconds: float, limits: Job, out: int, err: int) -> str:
    if too_much(out, err, limits):
        return "output"
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGXCPU or (code == -signal.SIGKILL and cpu_seconds >= limits["cpu_seconds"]):
        return "time"  # the second signal comes to those that ignore the first
    return "output" if code == -signal.SIGXFSZ else ""


def too_much(out: int, err: int, limits: Job) -> bool:
    return os.fstat(out).st_size + os.fstat(err).st_size > limits["output_bytes"]


def resident_bytes() -> int:
    """Memory of all processes of the PID namespace but the keeper; shared pages count once."""
    total = 0
    for name in os.listdir("/proc"):
        if name.isdigit() and name != "1":
            with contextlib.suppress(OSError), open(f"/proc/{name}/smaps_rollup") as file:
                total += sum(int(line.split()[1]) for line in file if line.startswith("Pss:"))
    return 1024 * total


def make_folder(job: Job, number: int) -> str:
    if job["level"] == "namespaces":
        return isolation.fresh_folder(job["user"], job["group"], job["limits"]["file_bytes"])
    path = os.path.join(job["folder"], str(number))
    os.mkdir(path, 0o700)
    os.chown(path, job["user"], job["group"])
    return path


def scratch() -> int:
    """A file without a name."""
    if LINUX:
        return os.memfd_create("sandbox")
    import tempfile

    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def head(descriptor: int, count: int) -> str:
    os.lseek(descriptor, 0, os.SEEK_SET)
    return os.read(descriptor, count).decode("utf-8", "replace")


def tail(descriptor: int) -> str:
    os.lseek(descriptor, max(0, os.fstat(descriptor).st_size - ERROR_TAIL), os.SEEK_SET)
    return os.read(descriptor, ERROR_TAIL).decode("utf-8", "replace")


def say(result: dict[str, Any]) -> None:
    data = json.dumps(result).encode() + b"\n"
    while data:
        data = data[os.write(1, data) :]


def option(number: int, value: int) -> None:
    if LINUX:
        isolation.set_process_option(number, value)


if __name__ == "__main__":
    try:
        main()
    except BaseException as error:
        say({"error": f"{type(error).__name__}: {error}"})
