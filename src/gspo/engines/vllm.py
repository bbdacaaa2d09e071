"""Answers from a vLLM server: token ids in, token ids and log-probabilities out, weights through files.

The server is one that runs already (``engine.url``), or one that is started and stopped here. Written against vLLM
0.32. What is used of it: /health, /version, /v1/completions with token ids, and of the interfaces that
VLLM_SERVER_DEV_MODE=1 opens /pause, /resume, /abort_requests, /collective_rpc (reload_weights), /reset_prefix_cache,
/update_weight_version and /weight_info.
"""

from __future__ import annotations

import contextlib
import http.client
import math
import secrets
import shutil
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from gspo.config import EngineConfig, as_path
from gspo.engines.base import Engine, Progress, Request, Sampling
from gspo.engines.vllm_client import Unusable, VLLMClient
from gspo.engines.vllm_server import ServerDied, VLLMServer
from gspo.errors import ConfigError, EngineError
from gspo.policy.load import Policy
from gspo.types import Completion

T = TypeVar("T")

TICK_SECONDS = 0.5
"""How often a wait looks whether the server lives and whether the run was asked to stop."""
MAX_RESTARTS = 5
THREADS = 128
"""Requests under way at one time; the server queues what it cannot run."""
FIXED = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "ignore_eos": True,  # the end tokens are ours, in stop_token_ids
    "add_special_tokens": False,
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
}
"""Given with every request, so that no default of the server or the model fills anything in."""


class VLLMEngine(Engine):
    """``policy``: whose weights it samples from. ``longest``: most tokens of a prompt and its answer together."""

    def __init__(
        self, policy: Policy, config: EngineConfig, *, longest: int, dtype: torch.dtype, trust: bool = False
    ) -> None:
        self.policy, self.config, self.dtype = policy, config, dtype
        self.label = secrets.token_hex(4)  # tells our weights from those of another run on the same server
        self.parent = _weights_folder(config.weights_directory)
        self.folder = self.parent / "0"
        self.restarts = 0
        self.server: VLLMServer | None = None
        check: Callable[[], None] = lambda: None  # noqa: E731
        if not config.url:
            self.server = VLLMServer(config.python, server_arguments(policy, config, longest, dtype, trust))
            check = self.server.check
        self._end = weakref.finalize(self, _clean_up, self.server, self.parent)  # at exit too
        self.client = VLLMClient(config.url, timeout=config.request_timeout, retries=config.retries, check=check)
        try:
            self._begin()
        except BaseException:  # whoever holds the exception, as a notebook does, must not hold a server with it
            self._end()
            raise

    def _begin(self) -> None:
        url = self.config.url
        if self.server is not None:
            self._write_weights(self.folder)
            self._start()
        elif not self.client.healthy():
            raise EngineError(
                f"engine.url: no vLLM server answers at {url}. Start it (docs/vllm.md), or leave engine.url empty to "
                "have gspo start one."
            )
        self.load_weights(0)
        where = f"at {self.client.url}" if url else "started by this run"
        version = self.client.ask("GET", "/version", None, _as_unusable(lambda answer: answer["version"]))
        self.facts = [f"engine: vLLM {version} {where}"]

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, progress: Progress | None = None
    ) -> list[list[Completion]]:
        """A request's answers come whole or are asked for again; a server that is restarted is asked for the rest."""
        found: dict[int, list[Completion]] = {}
        total = sum(request.num_samples for request in requests)

        def rest() -> None:
            self._check_version()
            missing = [number for number in range(len(requests)) if number not in found]
            calls = {number: partial(self._complete, requests[number], sampling) for number in missing}
            for number, answers in self._at_once(calls, lambda: tell(progress, found, total)):
                found[number] = answers
            self._check_version()

        self._through_deaths(rest)
        tell(progress, found, total)
        return [found[number] for number in range(len(requests))]

    def load_weights(self, version: int) -> None:
        """Write the policy's weights to a folder, have the server read it, and forget what it cached."""
        folder = self.parent / str(int(self.folder.name) + 1)
        self._write_weights(folder)
        old, self.folder, self.policy_version = self.folder, folder, version
        self._through_deaths(self._reload)
        shutil.rmtree(old, ignore_errors=True)

    def next_logprobs(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> list[float]:
        body = FIXED | {
            "prompt": list(prompt_ids),
            "max_tokens": 1,
            "temperature": 1.0,
            "logprobs": len(token_ids),
            "logprob_token_ids": list(token_ids),
        }

        def accept(answer: Any) -> list[float]:
            named = answer["choices"][0]["logprobs"]["top_logprobs"][0]
            return [named[f"token_id:{token}"] for token in token_ids]

        return self._through_deaths(lambda: self.client.post("/v1/completions", body, _as_unusable(accept)))

    def log_to(self, folder: Path) -> None:
        if self.server is not None:
            self.server.log_to(folder / "vllm.log")

    def close(self) -> None:
        self.client.give_up()
        self._end()

    # --- weights ---------------------------------------------------------------------------------------------------

    def _write_weights(self, folder: Path) -> None:
        """A plain Hugging Face folder, complete when it has its name: a dead server is restarted from it."""
        partial = folder.with_name(folder.name + ".partial")
        try:
            save_model(self.policy, self.dtype, partial, untie=not torch.cuda.is_available())
            partial.rename(folder)
        except OSError as error:
            raise EngineError(
                f"New weights for vLLM cannot be written to {self.parent}: {error.strerror or error}. Set "
                "engine.weights_directory to a folder with space."
            ) from error

    def _reload(self) -> None:
        self.client.post("/pause?mode=abort")
        try:
            path = str(self.folder.absolute())
            self.client.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": path}})
            self.client.post("/reset_prefix_cache", None, _reset_or_unusable)
            self.client.post("/update_weight_version", {"new_version": self._version()})
        finally:
            self.client.post("/resume")

    def _version(self) -> str:
        return f"gspo-{self.label}-{self.folder.name}"

    def _check_version(self) -> None:
        """The server must still have what this run gave it: it may have been restarted, or serve another run too."""
        found = self.client.ask("GET", "/weight_info", None, _as_unusable(lambda answer: answer["weight_version"]))
        if found != self._version():
            raise EngineError(
                f"The vLLM server at {self.client.url} has weights of version {found!r}, not {self._version()!r} which "
                "this run gave it. It was restarted, or another run updates it. Give each run a server of its own."
            )

    # --- the server's life -----------------------------------------------------------------------------------------

    def _start(self) -> None:
        assert self.server is not None
        self.server.start(self.folder)
        self.client.url = self.server.url
        self.server.wait_until_ready(self.client.healthy, say)

    def _through_deaths(self, work: Callable[[], T]) -> T:
        """``work()``; when the server dies and ``engine.on_death`` is 'restart', again on a new one."""
        while True:
            try:
                return self._or_dead(work)
            except ServerDied as died:
                if self.config.on_death != "restart" or self.restarts >= MAX_RESTARTS:
                    raise
                self.restarts += 1
                say(f"{str(died).splitlines()[0]} Starting it again ({self.restarts} of at most {MAX_RESTARTS}).")
                assert self.server is not None
                self.server.stop()
                self._start()
                self.client.post("/update_weight_version", {"new_version": self._version()})

    def _or_dead(self, work: Callable[[], T]) -> T:
        """An error of a server of ours that does not even say that it is well is its death."""
        try:
            return work()
        except ServerDied:
            raise
        except EngineError as error:
            if self.server is None or self.client.healthy():
                raise
            self.server.stop()
            raise ServerDied(f"{error} {self.server.end_of_log()}") from error

    # --- answers ---------------------------------------------------------------------------------------------------

    def _at_once(self, calls: Mapping[int, Callable[[], T]], tick: Callable[[], None]) -> Iterator[tuple[int, T]]:
        """Yields (number, result) as they are there. ``tick`` may raise: what is under way is then given up."""
        pool = ThreadPoolExecutor(min(len(calls), THREADS) or 1, thread_name_prefix="vllm")
        running: dict[Future[T], int] = {pool.submit(call): number for number, call in calls.items()}
        try:
            while running:
                done, _ = wait(running, timeout=TICK_SECONDS, return_when=FIRST_COMPLETED)
                for future in done:
                    yield running.pop(future), future.result()
                self.client.check()
                tick()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            if running:
                self._abort()

    def _abort(self) -> None:
        """Answers that nobody waits for any more only cost time."""
        with contextlib.suppress(OSError, http.client.HTTPException, Unusable):
            self.client.once("POST", "/abort_requests", {}, 5.0)

    def _complete(self, request: Request, sampling: Sampling) -> list[Completion]:
        count = request.num_samples if sampling.temperature > 0 else 1  # greedy answers are all the same
        body = FIXED | {
            "prompt": list(request.prompt_ids),
            "n": count,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "seed": request_seed(request),
            "stop_token_ids": sorted(sampling.end_token_ids),
            "stop": list(sampling.stop),
            "skip_special_tokens": sampling.skip_special_tokens,
            "logprobs": 0,
        }

        def accept(answer: Any) -> list[Completion]:
            choices = sorted(answer["choices"], key=lambda choice: choice["index"])
            if len(choices) != count:
                raise Unusable(f"{len(choices)} answers came for {count} asked for")
            found = [to_completion(choice, sampling, self.policy_version) for choice in choices]
            return found if count == request.num_samples else found * request.num_samples

        return self.client.post("/v1/completions", body, _as_unusable(accept))


def _weights_folder(parent: str) -> Path:
    """A new one, in ``engine.weights_directory`` or where temporary files go."""
    try:
        return Path(tempfile.mkdtemp(prefix="gspo-weights-", dir=as_path(parent) if parent else None))
    except OSError as error:
        where = parent or tempfile.gettempdir()
        raise ConfigError(
            f"engine.weights_directory: no folder can be made in {where}: {error.strerror}. Give one that exists and "
            "can be written."
        ) from None


def save_model(policy: Policy, dtype: torch.dtype, folder: Path, *, untie: bool) -> None:
    """A plain Hugging Face folder in ``dtype``.

    ``untie``: write a head of its own for a model that shares it with the embedding. On the CPU, vLLM 0.32 packs the
    head's weights once and does not do it again when the embedding is loaded anew: a tied head would stay as it was.
    """
    config = policy.model.config
    cast: dict[int, torch.Tensor] = {}  # by address: what is tied stays one tensor
    state = {
        name: cast.setdefault(tensor.data_ptr(), tensor.detach().to(dtype, copy=True))
        for name, tensor in policy.model.state_dict().items()
    }
    tied = config.tie_word_embeddings
    try:
        if untie and tied:
            config.tie_word_embeddings = False
            head = next(name for name, module in policy.model.named_modules() if module is policy.head)
            state[f"{head}.weight"] = state[f"{head}.weight"].clone()
        with policy.attention_implementation("sdpa"):
            policy.model.save_pretrained(folder, state_dict=state)
    finally:
        config.tie_word_embeddings = tied
    policy.tokenizer.save_pretrained(folder)


def server_arguments(policy: Policy, config: EngineConfig, longest: int, dtype: torch.dtype, trust: bool) -> list[str]:
    """The server's settings; ``engine.arguments`` come last and win."""
    longest = min(max(longest, 512), policy.context_length)
    arguments = [
        "--dtype", str(dtype).removeprefix("torch."),
        "--max-model-len", str(longest),
        "--max-num-seqs", str(config.max_batch),
        "--logprobs-mode", "processed_logprobs",  # at the sampling temperature
        "--generation-config", "vllm",  # the model's own sampling settings fill nothing in
        "--disable-uvicorn-access-log",
    ]  # fmt: skip
    cache = cache_bytes(policy, config.max_batch, longest, dtype.itemsize)
    if cache is not None:
        arguments += ["--kv-cache-memory-bytes", str(cache)]
    if not torch.cuda.is_available():
        # on the CPU, vLLM 0.32 dies when a prompt is prefilled in two pieces and its request has a seed
        arguments += ["--no-enable-chunked-prefill"]
    return [*arguments, *(["--trust-remote-code"] if trust else []), *config.arguments]


def cache_bytes(policy: Policy, sequences: int, longest: int, itemsize: int) -> int | None:
    """Keys and values of ``sequences`` of the longest length, in whole blocks of 128 tokens; at least 64 MiB.

    None for models whose attention is not told by heads and widths: the server then decides for itself.
    """
    model = policy.model.config.get_text_config()
    heads = getattr(model, "num_key_value_heads", None) or getattr(model, "num_attention_heads", None)
    width = getattr(model, "head_dim", None) or (model.hidden_size // model.num_attention_heads if heads else None)
    if not heads or not width or hasattr(model, "kv_lora_rank") or (hasattr(model, "layer_types") and _mixed(model)):
        return None
    tokens = sequences * (math.ceil(longest / 128) + 1) * 128
    return max(2 * model.num_hidden_layers * heads * width * itemsize * tokens, 1 << 26)


def _mixed(model: Any) -> bool:
    return len(set(model.layer_types or ())) > 1


def request_seed(request: Request) -> int:
    """48 bits from the request's seed; vLLM adds an answer's index to it."""
    return int(np.random.SeedSequence(list(request.seed)).generate_state(1, np.uint64)[0] >> 16)


def to_completion(choice: Any, sampling: Sampling, version: int) -> Completion:
    """One answer, cut where the native engine would have ended it. Raises Unusable."""
    ids, logprobs, reason = choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["finish_reason"]
    if reason not in ("stop", "length"):
        raise Unusable(f"an answer ended with {reason!r}")
    if not ids or len(ids) != len(logprobs):
        raise Unusable(f"an answer has {len(ids)} tokens and {len(logprobs)} log-probabilities")
    if any(value is None or not -9000 < value <= 1e-3 for value in logprobs):
        raise Unusable("an answer has tokens without a log-probability")
    end = next((n for n in range(1, len(ids) + 1) if sampling.finish_reason(ids[:n]) == "stop"), len(ids))
    if end < len(ids):
        reason = "stop"
    return Completion(ids[:end], [min(value, 0.0) for value in logprobs[:end]], reason, version)


def tell(progress: Progress | None, found: dict[int, list[Completion]], total: int) -> None:
    if progress is not None:
        progress(sum(map(len, found.values())), total)


def say(text: str) -> None:
    """A line for the user while nothing else can be shown."""
    print(f"gspo: {text}", file=sys.stderr, flush=True)


def _as_unusable(accept: Callable[[Any], T]) -> Callable[[Any], T]:
    def checked(answer: Any) -> T:
        try:
            return accept(answer)
        except (KeyError, IndexError, TypeError) as error:
            raise Unusable(f"the answer has not the form of vLLM's ({type(error).__name__}: {error})") from None

    return checked


def _reset_or_unusable(answer: Any) -> None:
    if isinstance(answer, dict) and answer.get("success") is False:
        raise Unusable("the prefix cache was not reset")


def _clean_up(server: VLLMServer | None, folder: Path) -> None:
    if server is not None:
        server.close()
    shutil.rmtree(folder, ignore_errors=True)
