"""A checkpoint's weights, config and tokenizer as a plain Hugging Face folder of their own."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from gspo.errors import CheckpointError, ConfigError, first_line
from gspo.records import RunDirectory
from gspo.training.checkpoint import OWN_FILES, damage, newest_whole, saved


def export(run: Path, out: Path, checkpoint: str = "newest", dtype: str = "float32") -> str:
    """Copy a run's checkpoint ('newest', 'best' or its name) to ``out``; returns the checkpoint's name.

    Raises CheckpointError when there is no such whole checkpoint, or the disk does not take it; ConfigError when
    ``out`` exists.
    """
    refuse_existing(out)
    name = _choose(RunDirectory(run), checkpoint)
    source = run / "checkpoints" / name
    wrong = damage(source)
    if wrong:
        raise CheckpointError(f"The checkpoint {source} cannot be exported: {wrong}.")

    def fill(partial: Path) -> None:
        for path in source.iterdir():
            if path.name not in OWN_FILES:
                shutil.copyfile(path, partial / path.name)
        if dtype != "float32":
            _cast(partial, dtype)

    new_folder(out, fill)
    return name


def refuse_existing(out: Path) -> None:
    if os.path.lexists(out):  # a link to nothing too
        raise ConfigError(f"{out} exists already; choose a folder that does not, so that nothing is overwritten.")


def new_folder(out: Path, fill: Callable[[Path], None]) -> None:
    """Let ``fill`` write a folder that gets its name when it is whole. Raises ConfigError when ``out`` exists,
    CheckpointError when the disk does not take it."""
    refuse_existing(out)
    partial = out.with_name(out.name + ".partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        fill(partial)
        partial.rename(out)
    except Exception as error:  # the system's, or safetensors' own around it
        shutil.rmtree(partial, ignore_errors=True)
        reason = getattr(error, "strerror", None) or first_line(error)
        raise CheckpointError(f"{out} cannot be written: {reason}.") from error


def _choose(run: RunDirectory, checkpoint: str) -> str:
    if checkpoint == "newest":
        place, notes = newest_whole(run.checkpoints)
        if place is None:
            raise CheckpointError(f"{run.path} has no whole checkpoint. {'; '.join(notes)}".rstrip())
        return place.name
    if checkpoint == "best":
        there = {
            r["iteration"]: r["accuracy"] or 0.0
            for r in run.evals()
            if (run.checkpoints / str(r["iteration"])).is_dir()
        }
        if not there:
            raise CheckpointError(f"No checkpoint of {run.path} was evaluated; use --checkpoint newest.")
        trained = {iteration: accuracy for iteration, accuracy in there.items() if iteration > 0}
        among = trained or there  # the start is nobody's result, and the run keeps the best trained one too
        return str(max(among, key=among.__getitem__))
    if not (run.checkpoints / checkpoint).is_dir():
        names = [place.name for place in saved(run.checkpoints)]
        raise CheckpointError(f"{run.path} has no checkpoint {checkpoint!r}; it has: {', '.join(names) or 'none'}.")
    return checkpoint


def _cast(folder: Path, dtype: str) -> None:
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        cast = {name: t.to(getattr(torch, dtype)) if t.is_floating_point() else t for name, t in tensors.items()}
        save_file(cast, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["dtype"] = dtype
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
