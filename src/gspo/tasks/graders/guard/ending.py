"""Kills and removes all that a candidate left."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

LINUX = sys.platform == "linux"
WORLD_WRITABLE = ("/tmp", "/var/tmp", "/dev/shm")

Job = dict[str, Any]


def sweep(job: Job) -> None:
    """Kill and reap all that the candidate started."""
    if job["level"] == "namespaces":
        kill_all()  # all of the PID namespace but its first process, which is the caller
    elif job["user"] != os.geteuid():
        as_user(job["user"], kill_all)
    else:
        kill_descendants()
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def kill_all() -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)


def as_user(user: int, act: Callable[[], None]) -> None:
    """In a child with that user id, since kill(-1) reaches all that its caller may signal."""
    child = os.fork()
    if child == 0:
        os.setuid(user)
        act()
        os._exit(0)
    os.waitpid(child, 0)


def kill_descendants() -> None:
    """Stop them all before the first is killed: what is stopped starts no new ones."""
    while running := descendants():
        stopped: set[int] = set()
        while new := descendants() - stopped:
            for pid in new:
                send(pid, signal.SIGSTOP)
            stopped |= new
        for pid in running | stopped:
            send(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def descendants() -> set[int]:
    """Processes below this one, without those that ended."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc") if LINUX else ():
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as file:
                state, parent = file.read().rpartition(")")[2].split()[:2]
                if state != "Z":
                    parents[int(name)] = int(parent)
    found, grown = {os.getpid()}, True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in found} - found
        found, grown = found | more, bool(more)
    return found - {os.getpid()}


def threads_of(user: int) -> int:
    total = 0
    for name in os.listdir("/proc") if LINUX else ():
        if name.isdigit():
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{name}").st_uid == user:
                    total += len(os.listdir(f"/proc/{name}/task"))
    return total


def remove_leftovers(job: Job) -> None:
    """The working folder, and what a user of its own left in folders where everybody may write."""
    if job["user"] == os.geteuid():
        return
    import shutil  # slow to import, and needed here only

    shutil.rmtree(job["folder"], ignore_errors=True)
    for place in WORLD_WRITABLE:
        for entry in os.scandir(place) if os.path.isdir(place) else ():
            with contextlib.suppress(OSError):
                if entry.stat(follow_symlinks=False).st_uid == job["user"]:
                    shutil.rmtree(entry) if entry.is_dir(follow_symlinks=False) else os.unlink(entry)


def send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
