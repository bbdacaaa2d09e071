"""The process that ``math`` asks; a script. A line ``[gold, text, seconds]`` is answered with true or false.

It never sets a handler for its timers, so the kernel ends it when one runs out, also inside a computation in C.
"""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import signal
import sys
from functools import lru_cache
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

MEMORY_BYTES = 4 * 2**30
REAL_TIME = 10
"""Wall-clock seconds a second of processor time, for a machine that is busy."""

_ANCHORS = ("\\boxed", "$", "\\(", "\\[", "\\begin")
_COMMANDS = re.compile(r"\\(?:text|mathrm|mbox|operatorname)\s*\{[^{}]*\}|\\[A-Za-z]+")
_WORD = re.compile(r"[A-Za-z]{3,}")
_NAMES = {"sin", "cos", "tan", "cot", "sec", "csc", "log", "exp", "sqrt", "arcsin", "arccos", "arctan", "min", "max"}


@lru_cache(256)
def gold_of(text: str) -> list[Any]:
    """The gold value as expressions; empty when none can be read. A bare one is LaTeX, unless it has words."""
    words = {word for word in _WORD.findall(_COMMANDS.sub(" ", text)) if word not in _NAMES}
    bare = not words and not any(anchor in text for anchor in _ANCHORS)
    for form in [f"${text}$", text] if bare else [text]:
        found = [value for value in extract(form) if not isinstance(value, str)]
        if found:
            return found
    return []


def extract(text: str) -> list[Any]:
    configs = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    return list(parse(text, configs, parsing_timeout=None))


def answer(gold: str, text: str | None) -> bool:
    expected = gold_of(gold)
    if text is None or not expected:
        return bool(expected)
    return bool(verify(expected, extract(text), timeout_seconds=None))


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # whatever the library prints is no answer
    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    print("ready", file=out, flush=True)
    for line in sys.stdin:
        gold, text, seconds = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        signal.setitimer(signal.ITIMER_REAL, REAL_TIME * seconds)
        try:
            found = answer(gold, text)
        except Exception:  # whatever a parser makes of what a model wrote
            found = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(found), file=out, flush=True)


if __name__ == "__main__":
    main()
