"""CONFIG.toml and flags -> Config. Flags come from the config's own dataclasses, so there is one source of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, make_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

from gspo.config import Config, known_keys
from gspo.errors import ConfigError

T = TypeVar("T")
Switch = Annotated[bool, tyro.conf.FlagCreatePairsOff]
"""A verb's own flag: there or not, without a ``--no_`` twin."""


@dataclass(frozen=True)
class NoOptions:
    """For a verb that has only the config's flags."""


def parse(verb: str, arguments: Sequence[str], kind: type[T], description: str) -> tuple[Config, T]:
    """(the config, the verb's own options). Prints help or an unknown flag and exits (0 or 2).

    Raises ConfigError for values that cannot work, worded as for the same value in the file.
    """
    config, flags = load(verb, arguments)
    sections = [section.name for section in fields(config)]
    # A twin of Config without its checks: tyro would word their errors its own way.
    twin = make_dataclass(
        "Flags",
        [
            ("options", Annotated[kind, tyro.conf.arg(name="")], field(default=kind())),
            *((name, type(getattr(config, name)), field(default=getattr(config, name))) for name in sections),
        ],
        frozen=True,
    )
    given: Any = tyro.cli(
        twin,
        args=_plain_switches(flags),
        prog=f"gspo {verb} CONFIG.toml",
        description=description,
        use_underscores=True,
    )
    values = {name: asdict(getattr(given, name)) for name in sections}
    return Config.from_dict(values, where="command line"), given.options


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


def _plain_switches(arguments: Sequence[str]) -> list[str]:
    """``--task.chat false`` and ``--task.chat=false``, as in the file, for tyro's ``--task.no_chat``."""
    settings = asdict(Config())
    paths = [key.split(".") for key in known_keys()]
    switches = {f"__{section}.{key}" for section, key in paths if isinstance(settings[section][key], bool)}
    plain: list[str] = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if equals and name.replace("-", "_") in switches:
            plain.append(name)
            argument = value
        if argument in ("true", "false") and plain and plain[-1].replace("-", "_") in switches:
            plain[-1] = plain[-1] if argument == "true" else plain[-1].replace(".", ".no_", 1)
        else:
            plain.append(argument)
    return plain
