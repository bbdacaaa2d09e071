"""The vLLM engine against stand-ins: requests, retries, deadlines, death, restart, and that nothing is left running."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from gspo.config import Config, EngineConfig
from gspo.engines.base import Request, Sampling
from gspo.engines.native import NativeEngine
from gspo.engines.vllm import VLLMEngine, cache_bytes, request_seed, to_completion
from gspo.engines.vllm_client import Unusable, VLLMClient
from gspo.errors import ConfigError, EngineError, WeightSyncError
from gspo.policy.load import Policy
from gspo.sync.publish import Publisher
from tests.unit.engines.fake_vllm import all_gone, gone, serve, stand_in, with_model

PROMPTS = [[3, 14, 15], [9], [2, 6, 5, 3, 5, 8, 9, 7, 9]]
END, NO_END = frozenset(range(20)), frozenset({10_000})


@pytest.fixture
def python(tmp_path: Path) -> str:
    return stand_in(tmp_path)


@pytest.fixture
def make(tiny_policy: Policy, python: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., VLLMEngine]]:
    """An engine that starts the stand-in, without a model: a process that is there at once."""
    made = []
    monkeypatch.setenv("FAKE_MODEL", "none")

    def engine(**values: Any) -> VLLMEngine:
        config = EngineConfig(**{"kind": "vllm", "python": python, "request_timeout": 20.0} | values)
        made.append(VLLMEngine(tiny_policy, config, longest=64, dtype=torch.float32))
        return made[-1]

    yield engine
    for one in made:
        one.close()


@pytest.fixture
def attach(tiny_policy: Policy, tmp_path: Path) -> Iterator[Callable[..., VLLMEngine]]:
    """An engine at the address of a server in this process, that has a model."""
    started: list[Any] = []
    tiny_policy.model.save_pretrained(tmp_path / "model")
    tiny_policy.tokenizer.save_pretrained(tmp_path / "model")

    def engine(faulty: str = "") -> VLLMEngine:
        server = serve(with_model(str(tmp_path / "model"), faulty), 0)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        config = EngineConfig(kind="vllm", url=f"http://127.0.0.1:{server.server_port}", request_timeout=20.0)
        started.extend([server, VLLMEngine(tiny_policy, config, longest=64, dtype=torch.float32)])
        return started[-1]  # type: ignore[no-any-return]

    yield engine
    for server, one in zip(started[::2], started[1::2], strict=True):
        one.close()
        server.shutdown()
        server.server_close()


def requests(num_samples: int = 4) -> list[Request]:
    return [Request(ids, num_samples, (0, place)) for place, ids in enumerate(PROMPTS)]


def test_answers_and_scores_are_those_of_the_weights(attach: Callable[..., VLLMEngine], tiny_policy: Policy) -> None:
    engine, native = attach(), NativeEngine(tiny_policy)
    told: list[tuple[int, int]] = []
    rows = engine.generate(requests(), Sampling(12, 0.7, END), lambda done, total: told.append((done, total)))
    expected = native.generate(
        [Request(r.prompt_ids, r.num_samples, (request_seed(r),)) for r in requests()], Sampling(12, 0.7, END)
    )
    assert [[c.token_ids for c in row] for row in rows] == [[c.token_ids for c in row] for row in expected]
    assert [c.logprobs for row in rows for c in row] == [pytest.approx(c.logprobs) for row in expected for c in row]
    assert told[-1] == (12, 12)
    assert engine.next_logprobs([4, 5, 6], [7, 8]) == pytest.approx(native.next_logprobs([4, 5, 6], [7, 8]), abs=1e-5)


def test_new_weights_arrive_paused_and_with_the_cache_forgotten(
    attach: Callable[..., VLLMEngine], tiny_policy: Policy
) -> None:
    engine = attach()
    before = engine.next_logprobs([4, 5, 6], [7, 8])
    tiny_policy.model.get_input_embeddings().weight.data.mul_(1.5)
    engine.load_weights(3)
    after = engine.next_logprobs([4, 5, 6], [7, 8])
    assert after != pytest.approx(before, abs=1e-3)
    assert after == pytest.approx(NativeEngine(tiny_policy).next_logprobs([4, 5, 6], [7, 8]), abs=1e-5)
    paths = engine.client.get("/paths")
    steps = ["/pause", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version", "/resume"]
    assert [path for path in paths if path in steps] == 2 * steps, "once at start, once now, in this order"
    assert engine.generate(requests(1), Sampling(4, 1.0, END))[0][0].policy_version == 3
    assert len(list(engine.parent.iterdir())) == 1, "older weights are deleted"
    engine.close()
    assert not engine.parent.exists()


@pytest.mark.parametrize("faulty", ["", "ignore", "half", "cache"])
def test_the_probe_sees_through_http(attach: Callable[..., VLLMEngine], tiny_policy: Policy, faulty: str) -> None:
    publisher = Publisher(tiny_policy, attach(faulty))
    for parameter in tiny_policy.model.parameters():
        generator = torch.Generator().manual_seed(parameter.numel())
        parameter.data += 0.02 * torch.randn(parameter.shape, generator=generator)
    if faulty:
        with pytest.raises(WeightSyncError, match="does not have the weights of version 1"):
            publisher.publish(1)
    else:
        assert publisher.publish(1) < 1e-4 and publisher.decided == 1


def test_weights_that_another_run_gave_are_not_sampled_from(attach: Callable[..., VLLMEngine]) -> None:
    engine = attach()
    engine.client.post("/update_weight_version", {"new_version": "somebody else's"})
    with pytest.raises(EngineError, match=r"not 'gspo-.* which this run gave it. It was restarted, or another run"):
        engine.generate(requests(), Sampling(4, 1.0, END))


def test_a_server_that_cannot_start_says_why(make: Callable[..., VLLMEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngineError, match=r"(?s)engine.python: .*no-such cannot be run"):
        make(python="/no-such")
    monkeypatch.setenv("FAKE_START_ERROR", "1")
    with pytest.raises(EngineError, match=r"(?s)ended \(exit code 3\).*ValueError: no cheese"):
        make()


def test_a_dead_server_is_told_within_seconds_with_the_end_of_its_log(
    make: Callable[..., VLLMEngine], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FAKE_DIE", "2")
    engine = make(request_timeout=600.0)
    engine.log_to(tmp_path)
    start = time.monotonic()
    with pytest.raises(EngineError, match=r"(?s)ended \(exit code 7\).*vllm.log.*out of cheese"):
        engine.generate(requests(), Sampling(4, 1.0, END))
    assert time.monotonic() - start < 5
    assert "out of cheese" in (tmp_path / "vllm.log").read_text()


def test_a_restarted_server_gives_the_missing_answers_from_the_present_weights(
    make: Callable[..., VLLMEngine], tiny_policy: Policy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FAKE_DIE", "2")
    monkeypatch.setenv("FAKE_ONCE", str(tmp_path / "died"))
    engine = make(on_death="restart")
    tiny_policy.model.get_input_embeddings().weight.data.mul_(1.5)
    engine.load_weights(5)
    rows = engine.generate(requests(), Sampling(12, 1.0, NO_END))
    assert (tmp_path / "died").exists() and engine.restarts == 1
    assert rows == engine.generate(requests(), Sampling(12, 1.0, NO_END)), "another server, the same answers"
    assert {c.policy_version for row in rows for c in row} == {5}


def test_a_server_that_dies_every_time_is_given_up(
    make: Callable[..., VLLMEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gspo.engines.vllm.MAX_RESTARTS", 1)
    monkeypatch.setenv("FAKE_DIE", "1")
    engine = make(on_death="restart")
    with pytest.raises(EngineError, match="exit code 7"):
        engine.generate(requests(), Sampling(4, 1.0, END))
    assert engine.restarts == 1


def test_close_ends_children_that_do_not_listen(
    make: Callable[..., VLLMEngine], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("gspo.engines.vllm_server.GRACE_SECONDS", 1.0)
    monkeypatch.setenv("FAKE_CHILD", str(tmp_path / "pids"))
    engine = make()
    pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2 and not any(map(gone, pids))
    engine.close()
    assert all_gone(pids, 0.5)


@pytest.mark.parametrize("way", ["kill gspo", "kill the watcher"])
def test_nothing_outlives_gspo(python: str, tmp_path: Path, way: str) -> None:
    script = f"""
import os, time, torch
from gspo.config import EngineConfig, ModelConfig
from gspo.engines.vllm import VLLMEngine
from gspo.policy.load import load_policy
engine = VLLMEngine(load_policy(ModelConfig(path="builtin:tiny")), EngineConfig(kind="vllm", python={python!r}),
                    longest=64, dtype=torch.float32)
print(engine.server.process.pid, flush=True)
if {way!r} == "kill the watcher":
    os.kill(engine.server.process.pid, 9)
    engine.server.process.wait(5)
    try:
        engine.next_logprobs([1, 2], [3])
    except Exception as error:
        print(type(error).__name__, flush=True)
    raise SystemExit
time.sleep(100)
"""
    environment = os.environ | {"FAKE_CHILD": str(tmp_path / "pids"), "OMP_NUM_THREADS": "1", "FAKE_MODEL": "none"}
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    watcher = int(process.stdout.readline())
    pids = [watcher, *(int(word) for word in (tmp_path / "pids").read_text().split())]
    if way == "kill gspo":
        process.kill()
    else:
        assert process.stdout.readline().strip() == "ServerDied"
    process.wait(30)
    process.stdout.close()
    assert all_gone(pids, 12), [pid for pid in pids if not gone(pid)]


# --- the client alone ---------------------------------------------------------------------------------------------


@pytest.fixture
def scripted() -> Iterator[Callable[[list[Any]], str]]:
    """A server that does these things in turn, then 200s: a number is an HTTP state, 'hang' waits, 'cut' closes."""
    servers = []

    def start(things: list[Any]) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                thing = things.pop(0) if things else {"fine": True}
                if thing == "hang":
                    time.sleep(1.5)
                elif thing != "cut":
                    state = thing if isinstance(thing, int) else 200
                    data = (
                        b"not json"
                        if thing == "junk"
                        else json.dumps(
                            {"error": {"message": "no cheese"}} if isinstance(thing, int) else thing
                        ).encode()
                    )
                    self.send_response(state)
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gspo.engines.vllm_client.FIRST_PAUSE", 0.01)


@pytest.mark.parametrize("trouble", [503, 429, "cut", "junk", "hang"])
def test_what_passes_is_tried_again(scripted: Callable[[list[Any]], str], quick: None, trouble: Any) -> None:
    client = VLLMClient(scripted([trouble, trouble]), timeout=0.5, retries=2)
    assert client.post("/x", {}) == {"fine": True}


@pytest.mark.parametrize(
    ("trouble", "said"),
    [(500, "HTTP 500: no cheese"), ("hang", "no answer within engine.request_timeout"), ("cut", "tried 3 times")],
)
def test_tries_are_bounded(scripted: Callable[[list[Any]], str], quick: None, trouble: Any, said: str) -> None:
    client = VLLMClient(scripted([trouble] * 9), timeout=0.3, retries=2)
    start = time.monotonic()
    with pytest.raises(EngineError, match=said):
        client.post("/x", {})
    assert time.monotonic() - start < 3


def test_what_is_wrong_for_good_is_not_tried_again(scripted: Callable[[list[Any]], str]) -> None:
    things: list[Any] = [400, {"fine": True}]
    with pytest.raises(EngineError, match="refuses POST /x: HTTP 400: no cheese"):
        VLLMClient(scripted(things), timeout=5, retries=5).post("/x", {})
    assert things == [{"fine": True}]
    with pytest.raises(EngineError, match="VLLM_SERVER_DEV_MODE=1"):
        VLLMClient(scripted([404]), timeout=5, retries=5).post("/pause")


def test_an_address_without_a_server(tiny_policy: Policy) -> None:
    with pytest.raises(EngineError, match=r"engine.url: no vLLM server answers at http://127.0.0.1:9"):
        VLLMEngine(tiny_policy, EngineConfig(kind="vllm", url="http://127.0.0.1:9"), longest=64, dtype=torch.float32)


# --- answers ------------------------------------------------------------------------------------------------------


def choice(ids: list[int], logprobs: list[Any], reason: str = "length") -> dict[str, Any]:
    return {"index": 0, "token_ids": ids, "logprobs": {"token_logprobs": logprobs}, "finish_reason": reason}


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (choice([5, 6], [-1.0]), "2 tokens and 1 log-prob"),
        (choice([5, 6], [-1.0, None]), "without a log-probability"),
        (choice([5, 6], [-1.0, -9999.0]), "without a log-probability"),
        (choice([5, 6], [-1.0, float("nan")]), "without a log-probability"),
        (choice([5, 6], [-1.0, 0.7]), "without a log-probability"),
        (choice([], [], "stop"), "0 tokens"),
        (choice([5, 6], [-1.0, -1.0], "abort"), "ended with 'abort'"),
    ],
)
def test_an_answer_that_cannot_be_trained_on_is_asked_for_again(answer: Any, said: str) -> None:
    with pytest.raises(Unusable, match=said):
        to_completion(answer, Sampling(4, 1.0, END), 0)


def test_answers_end_where_the_native_engine_ends_them() -> None:
    """A stop string is noticed by vLLM some tokens late, when it holds text back."""

    def stops(ids: list[int]) -> bool:
        return list(ids[-2:]) == [41, 42]

    sampling = Sampling(8, 1.0, END, stops, ("x",))
    late = to_completion(choice([40, 41, 42, 43], [-1.0, -2.0, -3.0, -4.0], "stop"), sampling, 9)
    assert (late.token_ids, late.logprobs, late.finish_reason) == ([40, 41, 42], [-1.0, -2.0, -3.0], "stop")
    cut = to_completion(choice([40, 41], [-1.0, -2.0]), sampling, 9)
    assert (cut.token_ids, cut.finish_reason, cut.policy_version) == ([40, 41], "length", 9)
    ended = to_completion(choice([40, 3], [-1.0, -2.0], "stop"), sampling, 9)
    assert (ended.token_ids, ended.finish_reason) == ([40, 3], "stop")


def test_seeds_differ_and_repeat() -> None:
    seeds = {request_seed(Request([1], 1, (0, iteration, place))) for iteration in range(50) for place in range(20)}
    assert len(seeds) == 1000 and max(seeds) < 1 << 48
    assert request_seed(Request([1], 1, (3, 1, 4))) == request_seed(Request([2], 5, (3, 1, 4)))


def test_cache_size_is_what_the_answers_need(tiny_policy: Policy) -> None:
    """2 layers, 2 heads of 16, keys and values, float32: 512 bytes a token."""
    assert cache_bytes(tiny_policy, 512, 600, 4) == 512 * 512 * 6 * 128
    assert cache_bytes(tiny_policy, 1, 10, 2) == 1 << 26


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"engine.url": "http://x"}, "engine.url is a setting of vLLM, and engine.kind is 'native'"),
        ({"engine.kind": "vllm", "engine.url": "x:1"}, "must begin with http"),
        ({"engine.kind": "vllm", "engine.url": "http://x", "engine.python": "p"}, "one or the other"),
        ({"engine.kind": "vllm", "engine.url": "http://x", "engine.on_death": "restart"}, "that gspo starts"),
        ({"engine.kind": "vllm", "engine.max_batch": 4}, "engine.max_batch = 4 is below"),
        ({"engine.kind": "vllm", "engine.request_timeout": 0}, "request_timeout must be above 0"),
        ({"engine.kind": "vllm", "algorithm.routing_replay": "rollout"}, "not taken over"),
    ],
)
def test_settings_that_do_not_go_together(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Config().with_values(values)


def test_an_engine_that_cannot_begin_leaves_no_server_with_whoever_holds_the_error(
    make: Callable[..., VLLMEngine], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FAKE_CHILD", str(tmp_path / "pids"))
    monkeypatch.setattr(VLLMEngine, "load_weights", lambda self, version: 1 / 0)
    with pytest.raises(ZeroDivisionError) as held:
        make(weights_directory=str(tmp_path))
    assert held.value.__traceback__ is not None
    assert all_gone([int(word) for word in (tmp_path / "pids").read_text().split()], 1)
    assert not list(tmp_path.glob("gspo-weights-*"))
