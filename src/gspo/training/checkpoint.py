"""Saving the policy as a plain Hugging Face folder, atomically."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch

from gspo.errors import CheckpointError
from gspo.policy.load import Policy
from gspo.training.optimizer import MasterOptimizer


def save_policy(policy: Policy, optimizer: MasterOptimizer, folder: Path) -> Path:
    """Write float32 weights, config and tokenizer to ``folder``; it appears only once it is complete.

    Loads with ``AutoModelForCausalLM.from_pretrained(folder)``, and as ``model.path``. Raises CheckpointError when the
    disk does not take it; what was there before is untouched.
    """
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    masters = {id(p): m for p, m in zip(optimizer.model_parameters, optimizer.master, strict=True)}
    names = dict(policy.model.named_parameters(remove_duplicate=False))
    state = policy.model.state_dict()
    state |= {name: masters[id(parameter)].detach() for name, parameter in names.items() if id(parameter) in masters}
    config = policy.model.config
    before = config.dtype
    try:
        with policy.attention_implementation("sdpa"):
            policy.model.save_pretrained(partial, state_dict=state)
            config.dtype = torch.float32  # save_pretrained has written the precision that the model computes in
            config.save_pretrained(partial)
        policy.tokenizer.save_pretrained(partial)
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(partial, folder)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(
            f"The checkpoint {folder} cannot be written: {error.strerror or error}. Earlier checkpoints are "
            "untouched. Free some disk space or choose another run.directory."
        ) from error
    finally:
        config.dtype = before
    return folder


def prune(checkpoints: Path, keep: int, best: int | None) -> list[int]:
    """Delete all but the ``keep`` newest and the best; returns the iterations deleted."""
    saved = sorted(int(path.name) for path in checkpoints.iterdir() if path.name.isdigit())
    gone = [iteration for iteration in saved[:-keep] if iteration != best]
    for iteration in gone:
        shutil.rmtree(checkpoints / str(iteration))
    return gone
