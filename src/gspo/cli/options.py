"""CONFIG.toml and flags -> Config. Flags come from the config's own dataclasses, so there is one source of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import tyro

from gspo.config import Config
from gspo.errors import ConfigError

T = TypeVar("T")


def parse(verb: str, kind: type[T], default: T, arguments: Sequence[str], description: str) -> T:
    """Flags of a dataclass; prints help or what is wrong and exits (0 or 2)."""
    return tyro.cli(
        kind,
        default=default,
        args=list(arguments),
        prog=f"gspo {verb} CONFIG.toml",
        description=description,
        use_underscores=True,
    )


def load(verb: str, arguments: Sequence[str]) -> tuple[Config, list[str]]:
    """(the file's config with the run named after it, the other arguments). Without a file: help, or ConfigError."""
    if not arguments or arguments[0].startswith("-"):
        if any(argument in ("-h", "--help") for argument in arguments):
            return Config(), list(arguments)
        raise ConfigError(f"gspo {verb} needs a config file first: gspo {verb} CONFIG.toml [--section.key VALUE ...].")
    config = Config.load(arguments[0])
    if not config.run.name:
        config = replace(config, run=replace(config.run, name=Path(arguments[0]).stem))
    return config, list(arguments[1:])
