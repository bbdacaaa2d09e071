"""Runs a server so that nothing of it is left over: ``python vllm_watch.py GRACE COMMAND ...``. Standard library only.

The command gets a session of its own; its process id is the first line of the output. When it ends, when standard input
is closed, or when the process that started this one is gone (killed, too), every process of the session's group ends.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time

ENDED = "gspo: the server ended with exit code "


def main(grace: float, command: list[str]) -> int:
    owner = os.getppid()
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # the owner decides, by closing the pipe
    with contextlib.suppress(OSError):
        os.write(1, f"{child.pid}\n".encode())
    while child.poll() is None and os.getppid() == owner:
        if select.select([0], [], [], 0.5)[0] and not os.read(0, 1):
            break
    ended = child.poll()
    if ended is not None:  # said now: what it leaves behind may take its time to end
        with contextlib.suppress(OSError):
            os.write(1, f"\n{ENDED}{as_shell(ended)}\n".encode())
    end_group(child.pid, grace, child)
    code = child.poll()
    return 1 if code is None else as_shell(code)


def as_shell(code: int) -> int:
    """128 + the signal's number for a process that a signal ended."""
    return code if code >= 0 else 128 - code


def end_group(group: int, grace: float, child: subprocess.Popen[bytes] | None = None) -> None:
    """Ask all processes of a group to end (SIGTERM), and end those that have not after ``grace`` seconds (SIGKILL)."""
    for number, seconds in ((signal.SIGTERM, grace), (signal.SIGKILL, 2.0)):
        deadline = time.monotonic() + seconds
        try:
            os.killpg(group, number)
            while time.monotonic() < deadline:
                if child is not None:
                    child.poll()  # a child that nobody waits for stays in the group as a zombie
                os.killpg(group, 0)
                time.sleep(0.05)
        except (ProcessLookupError, PermissionError):
            return


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
