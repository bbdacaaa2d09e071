"""Names -> reward functions: ready-made ones by a short name, a user's own from a module or a file."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gspo.config import as_path
from gspo.errors import ConfigError, first_line
from gspo.tasks import graders

RewardFunction = Callable[..., Any]

READY: Mapping[str, str] = {
    "overlong": "gspo.tasks.shaping:overlong",
    "length": "gspo.tasks.shaping:length",
}
"""Length rewards that come with gspo: short name -> 'module:function', imported when one is asked for."""

PYTHON = "python:"
"""What stands in a config for something that was given from Python and has no name: ``python:WHAT``."""


def load_reward(name: str) -> RewardFunction:
    """Import a ready-made reward, 'module:function' or 'file.py:function'.

    Modules are also looked for in the current directory. Raises ConfigError saying what was looked for and where.
    """
    if name in graders.GRADERS:
        return graders.find(name)
    spec = READY.get(name, name)
    module_name, colon, attribute = spec.rpartition(":")
    if not colon or not module_name or not attribute:
        ready = [*graders.GRADERS, *READY]
        near = difflib.get_close_matches(name, ready, 1)
        raise ConfigError(
            f"task.reward: {name!r} must be 'module:function', 'file.py:function', or a ready-made one: "
            f"{', '.join(ready)}." + (f" Did you mean {near[0]!r}?" if near else "")
        )
    if spec.startswith(PYTHON):
        raise ConfigError(
            f"task.reward: {attribute} was given to GSPOTrainer from Python and cannot be imported. Give it to "
            "GSPOTrainer again, or write it to a file and name it 'file.py:function'."
        )
    module = _import_file(as_path(module_name)) if module_name.endswith(".py") else _import_module(module_name)
    function = getattr(module, attribute, None)
    if function is None:
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ConfigError(
            f"task.reward: {module_name} has no {attribute!r}; it has: {', '.join(names) or 'no function'}."
        )
    if not callable(function):
        raise ConfigError(f"task.reward: {spec!r} is a {type(function).__name__}, not a function.")
    return function


def function_name(function: RewardFunction) -> str:
    """What a reward function is called in metrics and errors."""
    return str(getattr(function, "__name__", type(function).__name__))


def importable_as(function: RewardFunction) -> str | None:
    """'module:function' that another process can import; None for lambdas, closures, objects, and what a notebook or
    the script itself defines."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if not inspect.isfunction(function) or module in (None, "__main__") or not name.isidentifier():
        return None
    return f"{module}:{name}" if getattr(sys.modules.get(str(module)), name, None) is function else None


def _import_file(path: Path) -> Any:
    if not path.is_file():
        raise ConfigError(f"task.reward: the file {path.absolute()} does not exist.")
    name = f"gspo_reward_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the user's module runs here
        raise ConfigError(
            f"task.reward: {path} cannot be imported: {type(error).__name__}: {first_line(error)}."
        ) from error
    return module


def _import_module(name: str) -> Any:
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"task.reward: there is no module {error.name!r} (looked for {name!r} in {here} and the environment)."
        ) from error
    except (Exception, SystemExit) as error:  # the user's module runs here
        raise ConfigError(
            f"task.reward: {name} cannot be imported: {type(error).__name__}: {first_line(error)}."
        ) from error
    finally:
        sys.path.remove(here)
