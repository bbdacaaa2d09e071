"""Rewards that come with gspo, reached by a short name: ``task.reward = "math"``. docs/graders.md has their rules."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

from gspo.errors import ConfigError

GRADERS = {
    "math": "math",
    "exact": "text",
    "text": "text",
    "number": "text",
    "choice": "choice",
    "format": "format",
    "json": "json",
    "code": "code",
}
"""Name of a grader -> the module of this package that has the function of that name."""

NEEDS = {"math": ("math_verify", "math-verify"), "json": ("jsonschema", "jsonschema")}
"""Graders that need an optional library: (its module, its name on the package index)."""


def find(name: str) -> Callable[..., Any]:
    """The grader of that name. Raises ConfigError when the library that it needs is missing."""
    if name in NEEDS:
        module, package = NEEDS[name]
        if importlib.util.find_spec(module) is None:
            raise ConfigError(
                f"task.reward: the grader {name!r} needs the library {package!r}, which is not installed. "
                "Run: pip install 'gspo[graders]'"
            )
    grader: Callable[..., Any] = getattr(importlib.import_module(f"gspo.tasks.graders.{GRADERS[name]}"), name)
    return grader
