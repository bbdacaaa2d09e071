"""Stands in for ``python -m vllm.entrypoints.openai.api_server``: its HTTP interface around the native engine.

Faults, from the environment: FAKE_DIE=N dies hard at the Nth request for answers (once, if FAKE_ONCE names a file that
it then makes); FAKE_CHILD=PATH starts a child that ignores SIGTERM and writes its process id there; FAKE_START_ERROR
ends at start; FAKE_SLOW=SECONDS for each request; FAKE_MODEL=none answers from a hash instead of a model, so that the
process is there at once.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any


class Fake:
    """The answers; without a model. ``faulty``: 'ignore', 'half' or 'cache', what it does with new weights."""

    def __init__(self, model: str, faulty: str = "") -> None:
        self.model, self.faulty = model, faulty
        self.version = "default"
        self.asked = 0
        self.paths: list[str] = []
        self.lock = threading.Lock()

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        with self.lock:
            self.paths.append(path.partition("?")[0])
            match path.partition("?")[0]:
                case "/version":
                    return {"version": "fake"}
                case "/weight_info":
                    return {"weight_version": self.version}
                case "/paths":
                    return self.paths
                case "/update_weight_version":
                    self.version = body["new_version"]
                case "/collective_rpc":
                    self.reload(body["kwargs"]["weights_path"])
                case "/reset_prefix_cache":
                    return {"success": True}
                case "/v1/completions":
                    return self.complete(body)
            return {}

    def reload(self, folder: str) -> None:
        self.model = folder

    def next_logprobs(self, prompt: list[int], tokens: list[int]) -> list[float]:
        return [-1.0] * len(tokens)

    def generate(self, body: dict[str, Any]) -> list[tuple[list[int], list[float], str]]:
        """(ids, log-probs, why it ended) of each answer; the same for the same prompt, seed and weights."""
        weights = hashlib.sha256((Path(self.model) / "model.safetensors").read_bytes()).hexdigest()
        answers = []
        for index in range(body["n"]):
            key = f"{weights} {body['prompt']} {body['seed'] + index}"
            answers.append((list(hashlib.sha256(key.encode()).digest()[: body["max_tokens"]]), "length"))
        return [(ids, [-1.0] * len(ids), reason) for ids, reason in answers]

    def complete(self, body: dict[str, Any]) -> Any:
        if "logprob_token_ids" in body:
            tokens = body["logprob_token_ids"]
            values = self.next_logprobs(body["prompt"], tokens)
            named = {f"token_id:{token}": value for token, value in zip(tokens, values, strict=True)}
            return {"choices": [{"logprobs": {"top_logprobs": [named]}}]}
        self.asked += 1
        if self.asked == int(os.environ.get("FAKE_DIE", "0")):
            once = os.environ.get("FAKE_ONCE")
            if once is None or not Path(once).exists():
                if once is not None:
                    Path(once).touch()
                print("Fatal: out of cheese Error", flush=True)
                os._exit(7)
        time.sleep(float(os.environ.get("FAKE_SLOW", "0")))
        return {
            "choices": [
                {"index": index, "token_ids": ids, "logprobs": {"token_logprobs": logprobs}, "finish_reason": reason}
                for index, (ids, logprobs, reason) in enumerate(self.generate(body))
            ]
        }


def with_model(model: str, faulty: str = "") -> Fake:
    """One that answers from the weights, by the native engine."""
    import torch
    from safetensors.torch import load_file

    from gspo.config import ModelConfig
    from gspo.engines.base import Request, Sampling
    from gspo.engines.native import NativeEngine
    from gspo.policy.load import load_policy

    torch.set_num_threads(1)
    policy = load_policy(ModelConfig(path=model))
    engine = NativeEngine(policy)
    remembered: dict[str, list[float]] = {}

    class Real(Fake):
        def reload(self, folder: str) -> None:
            found = load_file(Path(folder) / "model.safetensors")
            names = list(found)
            kept = {"ignore": [], "half": names[: len(names) // 2]}.get(self.faulty, names)
            with torch.no_grad():
                for name, parameter in policy.model.named_parameters():
                    if name in kept:
                        parameter.copy_(found[name])

        def next_logprobs(self, prompt: list[int], tokens: list[int]) -> list[float]:
            values = engine.next_logprobs(prompt, tokens)
            return remembered.setdefault(str(prompt), values) if self.faulty == "cache" else values

        def generate(self, body: dict[str, Any]) -> list[tuple[list[int], list[float], str]]:
            sampling = Sampling(body["max_tokens"], body["temperature"], frozenset(body["stop_token_ids"]))
            (row,) = engine.generate([Request(body["prompt"], body["n"], (body["seed"],))], sampling)
            return [(c.token_ids, c.logprobs, c.finish_reason) for c in row]

    return Real(model, faulty)


def serve(fake: Fake, port: int) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.do_POST()

        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length) or b"{}")
            data = json.dumps(fake.answer(self.path, body)).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


def stand_in(folder: Path) -> str:
    """A 'Python' whose module ``vllm.entrypoints.openai.api_server`` is this file."""
    source, path = Path(__file__).resolve().parents[3] / "src", folder / "python"
    path.write_text(f'#!/bin/sh\nshift 2\nPYTHONPATH={source} exec {sys.executable} {__file__} "$@"\n')
    path.chmod(0o755)
    return str(path)


def gone(pid: int) -> bool:
    """Ended, or a zombie that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def all_gone(pids: list[int], within: float) -> bool:
    end = time.monotonic() + within
    while not all(map(gone, pids)) and time.monotonic() < end:
        time.sleep(0.1)
    return all(map(gone, pids))


def main(arguments: list[str]) -> None:
    named = {name: value for name, value in pairwise(arguments) if name.startswith("--")}
    if "FAKE_START_ERROR" in os.environ:
        print("ValueError: no cheese", file=sys.stderr)
        sys.exit(3)
    if "FAKE_CHILD" in os.environ:
        code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
        child = subprocess.Popen([sys.executable, "-c", code])
        Path(os.environ["FAKE_CHILD"]).write_text(f"{os.getpid()} {child.pid}")
    print("fake vLLM", " ".join(arguments), flush=True)
    make = Fake if os.environ.get("FAKE_MODEL") == "none" else with_model
    serve(make(named["--model"]), int(named["--port"])).serve_forever()


if __name__ == "__main__":
    main(sys.argv[1:])
