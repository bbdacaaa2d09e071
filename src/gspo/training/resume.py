"""Finding the checkpoint that a run goes on from, and refusing one that belongs to other data or another config."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gspo.config import Config, as_path, known_keys
from gspo.errors import CheckpointError
from gspo.records import RunDirectory
from gspo.training.checkpoint import Place, newest_whole, saved

MAY_CHANGE = (
    "eval.",
    "engine.",
    "track.",
    "task.reward_timeout",
    "task.reward_workers",
    "task.on_reward_error",
    "coldstart.",
    "run.name",
    "run.directory",
    "run.iterations",
    "run.checkpoint_every",
    "run.keep",
)
"""Keys that a resumed run may have other values of: they change how long and how it is watched, not what is learned."""


@dataclass(frozen=True)
class ResumePoint:
    """The run and the checkpoint to go on from; ``notes`` are lines for the user."""

    directory: RunDirectory
    place: Place
    notes: list[str]

    @property
    def folder(self) -> Path:
        return self.directory.checkpoints / self.place.name


def find_resume_point(config: Config, resume: str) -> ResumePoint | None:
    """``resume``: a run's folder or its name, or 'auto' for the newest run of this name that has a checkpoint.

    None: 'auto' found no such run. Raises CheckpointError when there is none to go on from, or when a setting that
    decides what is learned differs from the run's.
    """
    if resume == "auto":
        folder = _newest_run(as_path(config.run.directory), config.run.name or "run")
        if folder is None:
            return None
    else:
        folder = run_folder(config, resume)
    directory = RunDirectory(folder)
    place, notes = newest_whole(directory.checkpoints)
    if place is None:
        found = "; ".join(notes) or "it has none"
        raise CheckpointError(f"--resume {resume}: {folder} has no checkpoint to go on from: {found}.")
    point = ResumePoint(directory, place, notes)
    stored = Config.load(point.folder / "run.toml")
    changed = differences(stored, config)
    refused = [line for key, line in changed.items() if not key.startswith(MAY_CHANGE)]
    if refused:
        raise CheckpointError(
            f"--resume {resume}: the config is not that of {folder}: {'; '.join(refused)}. Go on with the run's own "
            f"settings (gspo train --resume {folder}), or start a new run from its weights (--model.path "
            f"{point.folder})."
        )
    notes += [f"changed on resuming: {line}" for key, line in changed.items() if not key.startswith("run.name")]
    return point


def run_folder(config: Config, name: str) -> Path:
    """A run given by its folder, or by its name under run.directory. Raises CheckpointError."""
    if not name.strip():
        raise CheckpointError("The name of the run is empty; give its folder or its name.")
    candidates = [as_path(name), as_path(config.run.directory) / name]
    for folder in candidates:
        with suppress(OSError):  # a name too long for one
            if (folder / "config.toml").is_file():
                return folder
    places = " or ".join(str(folder) for folder in candidates)
    raise CheckpointError(f"{name!r}: there is no run (a folder with a config.toml) at {places}.")


def differences(stored: Config, present: Config) -> dict[str, str]:
    """By key, a line for each setting that differs."""
    before, now = asdict(stored.resolved()), asdict(present.resolved())
    found = {}
    for dotted in known_keys():
        section, key = dotted.split(".")
        if before[section][key] != now[section][key]:
            found[dotted] = f"{dotted} was {before[section][key]!r} and is {now[section][key]!r}"
    return found


def _newest_run(parent: Path, name: str) -> Path | None:
    """Runs are named NAME, NAME-2, NAME-3, ...; the newest that was saved at least once.

    A run whose own name is NAME-2 is none of them.
    """
    numbered = {}
    for folder in parent.iterdir() if parent.is_dir() else []:
        found = re.fullmatch(re.escape(name) + r"(?:-(\d+))?", folder.name)
        if found and (folder / "config.toml").is_file() and saved(folder / "checkpoints"):
            if folder.name != name and Config.load(folder / "config.toml").run.name == folder.name:
                continue
            numbered[int(found[1] or 1)] = folder
    return numbered[max(numbered)] if numbered else None


def random_states() -> dict[str, Any]:
    """JSON-able states of the global generators that user code may draw from; gspo's own draws need none."""
    kind, keys, position, has_gauss, cached = np.random.get_state()
    version, internal, gauss = random.getstate()
    states: dict[str, Any] = {
        "python": [version, list(internal), gauss],
        "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, cached],
        "torch": torch.get_rng_state().tolist(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state().tolist()
    return states


def restore_random_states(states: Mapping[str, Any]) -> None:
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(torch.tensor(states["torch"], dtype=torch.uint8))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.tensor(states["cuda"], dtype=torch.uint8))
