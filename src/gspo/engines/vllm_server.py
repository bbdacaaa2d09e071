"""A vLLM server that gspo starts and stops: its process, its log, and what can be said when it dies."""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from gspo.engines import vllm_watch
from gspo.errors import EngineError

MODULE = ("-m", "vllm.entrypoints.openai.api_server")
START_SECONDS = 1800.0
GRACE_SECONDS = 8.0
"""From asking the server to end to ending it."""
KEPT_LINES = 2000
SHOWN_LINES = 12
DROPPED = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP")
"""Variables of our Python that the server's, which may be another, must not see."""


class ServerDied(EngineError):
    """The server process has ended."""


class VLLMServer:
    """One server process on this machine, at ``url``. ``start`` may be called again after it died.

    A small watching process stands between: it ends the server's whole process group when this process closes the
    pipe to it or is gone, however it went.
    """

    def __init__(self, python: str, arguments: Sequence[str]) -> None:
        self.command = [os.path.expanduser(python) or sys.executable, *MODULE, *arguments]
        self.url = ""
        self.lines: deque[str] = deque(maxlen=KEPT_LINES)
        self.first_error = ""  # what a death begins with; hundreds of lines may follow it
        self.process: subprocess.Popen[bytes] | None = None
        self.group = 0
        self.ended: int | None = None  # its exit code
        self.log: IO[str] | None = None
        self.lock = threading.Lock()

    def start(self, model: Path) -> None:
        """Start it with the weights in ``model``; raises EngineError when the command cannot be run."""
        port, self.first_error, self.ended = free_port(), "", None
        self.url = f"http://127.0.0.1:{port}"
        command = [*self.command, "--model", str(model), "--host", "127.0.0.1", "--port", str(port)]
        environment = {name: value for name, value in os.environ.items() if name not in DROPPED}
        environment |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        self._keep(f"$ {shlex.join(command)}")
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-I", vllm_watch.__file__, str(GRACE_SECONDS), *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # Ctrl-C is for gspo, which then decides
            )
        except OSError as error:
            raise EngineError(f"vLLM cannot be started: {error}.") from error
        assert self.process.stdout is not None
        first = self.process.stdout.readline().decode(errors="replace").strip()
        if not first.isdigit():
            self.process.communicate()
            self.process = None
            raise EngineError(
                f"engine.python: {command[0]} cannot be run. It must be the Python of an environment that has vLLM, "
                "such as .venv-vllm/bin/python (docs/vllm.md)."
            )
        self.group = int(first)
        self.reader = threading.Thread(target=self._read, args=(self.process.stdout,), daemon=True)
        self.reader.start()

    def wait_until_ready(self, healthy: Callable[[], bool], say: Callable[[str], None]) -> None:
        """Wait for ``healthy()``, with a line now and then; raises EngineError when it dies or takes too long."""
        started, pause = time.monotonic(), 10.0
        while not healthy():
            self.check()
            waited = time.monotonic() - started
            if waited > START_SECONDS:
                self.stop()
                raise EngineError(f"vLLM was not ready after {START_SECONDS:.0f} s. {self.end_of_log()}")
            if waited >= pause:
                pause = min(2 * pause, pause + 60)
                say(f"waiting for vLLM to be ready, {waited:.0f} s: {self.lines[-1][:120]}")
            time.sleep(0.25)

    def check(self) -> None:
        """Raises ServerDied, with the end of the log, when the process is gone."""
        if self.process is None:
            return
        if self.process.poll() is not None:
            self.reader.join(1)  # the last lines are on their way
            self.ended = self.process.returncode if self.ended is None else self.ended
        if self.ended is not None:
            raise ServerDied(f"The vLLM server has ended (exit code {self.ended}). {self.end_of_log()}")

    def end_of_log(self) -> str:
        shown = [*([self.first_error] if self.first_error else []), *list(self.lines)[-SHOWN_LINES:]]
        where = f" (all of it: {self.log.name})" if self.log else ""
        return f"The end of its log{where}:\n" + "\n".join(f"    {line[:300]}" for line in shown)

    def log_to(self, path: Path) -> None:
        """Write what it has said and will say to a file."""
        with self.lock, contextlib.suppress(OSError):
            self.log = path.open("a", encoding="utf-8")
            self.log.writelines(line + "\n" for line in self.lines)
            self.log.flush()

    def stop(self) -> None:
        """End it and all its children; nothing is left when this returns. May be called twice."""
        process, self.process = self.process, None
        if process is None:
            return
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(GRACE_SECONDS + 4)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        vllm_watch.end_group(self.group, 1.0)  # the watcher may have been killed before its time
        self.reader.join(2)

    def close(self) -> None:
        self.stop()
        if self.log is not None:
            self.log.close()

    def _read(self, stream: IO[bytes]) -> None:
        with stream:
            for data in stream:
                line = data.decode(errors="replace").rstrip()
                if line.startswith(vllm_watch.ENDED):
                    self.ended = int(line.removeprefix(vllm_watch.ENDED))
                elif line:
                    self._keep(line)

    def _keep(self, line: str) -> None:
        with self.lock:
            self.lines.append(line)
            if not self.first_error and "Error:" in line and "WARNING" not in line:
                self.first_error = line
            if self.log is not None and not self.log.closed:
                with contextlib.suppress(OSError):  # a full disk shows elsewhere
                    self.log.write(line + "\n")
                    self.log.flush()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
