"""Talking to a vLLM server over HTTP: bounded tries with back-off, a deadline for each, errors as sentences."""

from __future__ import annotations

import http.client
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from gspo.errors import EngineError

FIRST_PAUSE = 0.5
LONGEST_PAUSE = 20.0
TRANSIENT = (408, 429, 500, 502, 503, 504)
"""HTTP states after which the same request may succeed."""


class Unusable(Exception):
    """An answer came and cannot be used; asking again may help."""


class VLLMClient:
    """``check`` is called before each try and raises when the server is known to be dead."""

    def __init__(self, url: str, *, timeout: float, retries: int, check: Callable[[], None] = lambda: None) -> None:
        self.url, self.timeout, self.retries, self.check = url.rstrip("/"), timeout, retries, check
        self.given_up = threading.Event()
        # without proxies: the server is on this machine or in its network
        self.opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def healthy(self) -> bool:
        """Does it answer that it is well, now?"""
        try:
            self.once("GET", "/health", None, 5.0)
        except (OSError, http.client.HTTPException, Unusable, UnicodeError):  # a name of a host that none can have
            return False
        return True

    def get(self, path: str) -> Any:
        return self.ask("GET", path, None)

    def post(self, path: str, body: Any = None, accept: Callable[[Any], Any] = lambda answer: answer) -> Any:
        """``accept(answer)`` is returned; it raises Unusable to have the request made again."""
        return self.ask("POST", path, body, accept)

    def ask(self, method: str, path: str, body: Any, accept: Callable[[Any], Any] = lambda answer: answer) -> Any:
        """The parsed answer. Raises EngineError after the last try, or at once when trying again cannot help."""
        pause, reason = FIRST_PAUSE, ""
        for tried in range(self.retries + 1):
            if tried and self.given_up.wait(pause):
                break
            pause = min(2 * pause, LONGEST_PAUSE) if tried else pause
            self.check()
            try:
                return accept(self.once(method, path, body, self.timeout))
            except TimeoutError:
                reason = f"no answer within engine.request_timeout = {self.timeout:g} s"
            except urllib.error.HTTPError as error:
                reason = f"HTTP {error.code}: {_detail(error)}"
                if error.code not in TRANSIENT:
                    raise EngineError(f"vLLM at {self.url} refuses {method} {path}: {reason}{_hint(error)}") from None
            except (OSError, http.client.HTTPException, Unusable) as error:
                cause = getattr(error, "reason", error)
                if isinstance(cause, TimeoutError):
                    reason = f"no answer within engine.request_timeout = {self.timeout:g} s"
                else:
                    reason = str(cause) or type(cause).__name__
        self.check()
        raise EngineError(
            f"vLLM at {self.url} does not do {method} {path}: {reason} (tried {self.retries + 1} times). See the "
            "server's log; engine.retries and engine.request_timeout bound the wait."
        )

    def give_up(self) -> None:
        """Let tries that wait for their next turn end now."""
        self.given_up.set()

    def once(self, method: str, path: str, body: Any, timeout: float) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data=data, method=method, headers={"Content-Type": "application/json"}
        )
        with self.opener.open(request, timeout=timeout) as response:
            text = response.read()
        try:
            return json.loads(text) if text.strip() else None
        except json.JSONDecodeError:
            raise Unusable("the answer is not JSON") from None


def _detail(error: urllib.error.HTTPError) -> str:
    try:
        text = error.read().decode(errors="replace")
        found = json.loads(text)
    except (OSError, ValueError, http.client.HTTPException):
        return error.reason
    inner = found.get("error", found) if isinstance(found, dict) else found
    return str(inner.get("message", inner.get("detail", inner)) if isinstance(inner, dict) else inner)[:500].rstrip(".")


def _hint(error: urllib.error.HTTPError) -> str:
    if error.code == 404:
        return ". Start the server with VLLM_SERVER_DEV_MODE=1 in its environment (docs/vllm.md)."
    return "."
