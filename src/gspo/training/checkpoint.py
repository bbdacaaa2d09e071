"""Checkpoints: a plain Hugging Face folder plus everything a run needs to go on as if it had never stopped.

    model.safetensors, config.json, tokenizer ...   float32 weights, for ``model.path`` and ``AutoModelForCausalLM``
    optimizer.safetensors                           Adam's moments by parameter name
    state.json                                      counters, data cursor, random states
    iteration.json                                  only in the middle of one: its rollouts and what its updates found
    run.toml                                        the run's config
    manifest.json                                   sizes and checksums of all the others, written last

A folder is written under another name, flushed to disk and renamed: under its own name it is whole.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from gspo.errors import CheckpointError, first_line
from gspo.metrics import Mean, Means
from gspo.policy.load import Policy, sha256
from gspo.rollout.collect import Collected
from gspo.training.iteration import Iteration
from gspo.training.optimizer import MasterOptimizer
from gspo.training.trainer import OldScore, RowResult
from gspo.types import Group, Prompt, Rollout, Routing

T = TypeVar("T")

FORMAT = 1
OWN_FILES = ("optimizer.safetensors", "state.json", "iteration.json", "run.toml", "manifest.json")
"""Files of a checkpoint that are not part of the Hugging Face folder."""
SLACK = 1 << 20
"""Bytes set aside for the files beside the weights when free space is checked."""


class Place(NamedTuple):
    """Where in a run: after ``iterations`` whole ones and ``updates`` of the next, -1 meaning before its rollouts."""

    iterations: int
    updates: int = -1

    @property
    def name(self) -> str:
        return str(self.iterations) if self.updates < 0 else f"{self.iterations}+{self.updates}"

    @classmethod
    def parse(cls, name: str) -> Place | None:
        found = re.fullmatch(r"(\d+)(?:\+(\d+))?", name)
        return None if found is None else cls(int(found[1]), -1 if found[2] is None else int(found[2]))


@dataclass
class RunState:
    """The small things a run continues from.

    ``cursor``: the prompt source's, before the next draw. ``not_finite``: updates left out in a row for a gradient that
    was not finite. ``noise_floor`` and ``old_source``: as the first iteration measured, and decided for 'auto'.
    """

    iterations: int
    updates: int
    cursor: dict[str, Any]
    data_fingerprint: str
    engine_noise: float = 0.0
    not_finite: int = 0
    old_source: str | None = None
    noise_floor: float | None = None
    random: dict[str, Any] = field(default_factory=dict)
    format: int = FORMAT


def save_checkpoint(
    checkpoints: Path,
    place: Place,
    policy: Policy,
    optimizer: MasterOptimizer,
    state: RunState,
    config_toml: str,
    under_way: Iteration | None,
) -> Path:
    """Write ``checkpoints/PLACE``; raises CheckpointError when the disk does not take it, with the rest untouched."""

    def write(partial: Path) -> None:
        write_model(policy, optimizer, partial)
        save_file(optimizer.moments(), partial / "optimizer.safetensors")
        (partial / "state.json").write_text(json.dumps(asdict(state)), encoding="utf-8")
        (partial / "run.toml").write_text(config_toml, encoding="utf-8")
        if under_way is not None:
            (partial / "iteration.json").write_text(
                json.dumps(asdict(under_way), default=_array_to_json), encoding="utf-8"
            )

    return write_whole(checkpoints / place.name, write, bytes_needed(optimizer))


def bytes_needed(optimizer: MasterOptimizer) -> int:
    """What a checkpoint takes on the disk: weights and two moments in float32."""
    return 3 * sum(master.numel() * 4 for master in optimizer.master) + SLACK


def write_model(policy: Policy, optimizer: MasterOptimizer | None, folder: Path) -> None:
    """Weights, config and tokenizer; with an optimizer its float32 weights instead of the model's rounded ones."""
    state = policy.model.state_dict()
    if optimizer is not None:
        masters = {id(p): m for p, m in zip(optimizer.model_parameters, optimizer.master, strict=True)}
        names = dict(policy.model.named_parameters(remove_duplicate=False))
        state |= {name: masters[id(p)].detach() for name, p in names.items() if id(p) in masters}
    config = policy.model.config
    before = config.dtype
    try:
        with policy.attention_implementation("sdpa"):
            policy.model.save_pretrained(folder, state_dict=state)
            if optimizer is not None:  # save_pretrained has written the precision that the model computes in
                config.dtype = torch.float32
                config.save_pretrained(folder)
        policy.tokenizer.save_pretrained(folder)
    finally:
        config.dtype = before


def write_whole(folder: Path, write: Callable[[Path], None], needed: int) -> Path:
    """Let ``write`` fill a new folder that gets its name only when all of it is on the disk, with a manifest.

    Raises CheckpointError with the space that is missing, or with the system's reason; what was there stays.
    """
    partial = folder.with_name(folder.name + ".partial")
    advice = "Earlier checkpoints are untouched. Free some disk space or choose another run.directory."
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        free = shutil.disk_usage(partial).free
        if free < needed:
            raise CheckpointError(
                f"The checkpoint {folder} needs {needed / 1e6:,.0f} MB and the disk has {free / 1e6:,.0f} MB free. "
                + advice
            )
        write(partial)
        manifest = {path.name: _facts(path) for path in sorted(partial.iterdir())}
        (partial / "manifest.json").write_text(json.dumps(manifest, indent=2), encoding="utf-8")
        for path in [*partial.iterdir(), partial]:
            _flush(path)
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
        _flush(folder.parent)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"The checkpoint {folder} cannot be written: {error.strerror or error}. {advice}"
        ) from error
    except Exception as error:  # safetensors wraps the system's error in one of its own
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(f"The checkpoint {folder} cannot be written: {error}. {advice}") from error
    return folder


def _facts(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint, in a few words; None when it is whole."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        if not isinstance(manifest, dict):
            return "its manifest is not one"
        if not manifest:
            return "its manifest names no file"
        for name, facts in manifest.items():
            if not (folder / name).is_file():
                return f"{name} is missing"
            if _facts(folder / name) != facts:
                return f"{name} is damaged"
    except FileNotFoundError:
        return "it has no manifest"
    except (OSError, ValueError) as error:
        return f"it cannot be read ({error})"
    return None


def saved(checkpoints: Path) -> list[Place]:
    """Places there is a folder for, oldest first; unfinished ones have other names."""
    names = [path.name for path in checkpoints.iterdir()] if checkpoints.is_dir() else []
    return sorted(place for place in map(Place.parse, names) if place is not None)


def newest_whole(checkpoints: Path) -> tuple[Place | None, list[str]]:
    """(the newest checkpoint that is whole, a line for each newer one that is not)."""
    skipped: list[str] = []
    for place in reversed(saved(checkpoints)):
        wrong = damage(checkpoints / place.name)
        if wrong is None:
            return place, skipped
        skipped.append(f"checkpoint {place.name} left out: {wrong}")
    return None, skipped


def set_aside(checkpoints: Path, after: Place | None) -> None:
    """Rename checkpoints newer than ``after``, which are damaged, to NAME.damaged, and remove unfinished ones."""
    for place in saved(checkpoints):
        if after is None or place > after:
            target = checkpoints / f"{place.name}.damaged"
            shutil.rmtree(target, ignore_errors=True)
            with suppress(OSError):  # it is newer than what the run goes on from, so it is left out again next time
                (checkpoints / place.name).rename(target)
    for partial in checkpoints.glob("*.partial"):
        shutil.rmtree(partial, ignore_errors=True)


def prune(checkpoints: Path, keep: int, best: int | None) -> list[str]:
    """Delete all but the ``keep`` newest and the one of iteration ``best``; returns the names that should be gone and
    cannot be deleted."""
    old = [place.name for place in saved(checkpoints)[:-keep] if place.name != str(best)]
    for name in old:
        shutil.rmtree(checkpoints / name, ignore_errors=True)
    return [name for name in old if (checkpoints / name).exists()]


def read_state(folder: Path) -> tuple[RunState, Iteration | None]:
    """The small state of a checkpoint, and the iteration that was under way. Raises CheckpointError."""
    try:
        return _read_state(folder)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"The state of the checkpoint {folder} cannot be read ({type(error).__name__}: {first_line(error)}). "
            f"It was written by another version of gspo, or edited. Train from its weights: --model.path {folder}"
        ) from error


def _read_state(folder: Path) -> tuple[RunState, Iteration | None]:
    data = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    if data["format"] != FORMAT:
        raise CheckpointError(
            f"The checkpoint {folder} has format {data['format']}; this version of gspo reads format {FORMAT}. Go on "
            "with the version that wrote it, or train from its weights: --model.path " + str(folder)
        )
    under_way = folder / "iteration.json"
    if not under_way.exists():
        return RunState(**data), None
    return RunState(**data), _iteration(json.loads(under_way.read_text(encoding="utf-8")))


def _iteration(data: dict[str, Any]) -> Iteration:
    """From what ``asdict`` and JSON made of it."""
    groups = [
        Group(Prompt(**group["prompt"]), [_with_routing(Rollout, rollout) for rollout in group["rollouts"]])
        for group in data["collected"]["groups"]
    ]
    data["collected"] = Collected(**data["collected"] | {"groups": groups})
    data["means"] = Means({name: Mean(**value) for name, value in data["means"]["values"].items()})
    data["results"] = {int(row): RowResult(**result) for row, result in data["results"].items()}
    if data["old"] is not None:
        data["old"] = {int(row): _with_routing(OldScore, score) for row, score in data["old"].items()}
    return Iteration(**data)


def _with_routing(kind: Callable[..., T], data: dict[str, Any]) -> T:
    routing = data["routing"]
    if routing is not None:
        routing = Routing(**{name: _array_from_json(array) for name, array in routing.items()})
    return kind(**data | {"routing": routing})


def _array_to_json(array: Any) -> dict[str, Any]:
    """A numpy array; experts of long answers are too many for numbers in text."""
    data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return {"dtype": str(array.dtype), "shape": list(array.shape), "base64": data}


def _array_from_json(data: dict[str, Any]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(data["base64"]), dtype=data["dtype"]).reshape(data["shape"])


def load_moments(folder: Path, optimizer: MasterOptimizer) -> None:
    optimizer.load_moments(load_file(folder / "optimizer.safetensors"))
