"""The machine: versions, processor, memory and disk, before a model is sampled from."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
from pathlib import Path

import torch
from packaging.requirements import Requirement
from packaging.version import Version

from gspo.config import PAPER_CLIP, Config, as_path
from gspo.doctor.finding import Finding, fail, ok, warn
from gspo.metrics import Means
from gspo.packing import Row, pack_step
from gspo.policy.load import Policy
from gspo.policy.recompute import find_layers
from gspo.training.trainer import Trainer

PROBE_TOKENS = 96
"""Answer tokens of the pass whose kept activations are counted."""


def check_versions() -> Finding:
    """Installed packages against what this version of gspo asks for."""
    wrong = []
    for text in importlib.metadata.requires("gspo") or []:
        requirement = Requirement(text)
        if requirement.marker is not None:  # an extra
            continue
        found = importlib.metadata.version(requirement.name)
        if not requirement.specifier.contains(Version(found).base_version, prereleases=True):
            wrong.append(f"{requirement.name} {found} is installed, {requirement.specifier} is asked for")
    if wrong:
        return fail("versions", "; ".join(wrong), "Install what is asked for: pip install --upgrade gspo.")
    names = ("torch", "transformers")
    return ok("versions", ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names))


def check_precision(policy: Policy) -> Finding:
    name = str(policy.dtype).removeprefix("torch.")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    return ok("precision", f"{device}; products in {name}, weights and optimizer in float32")


def check_clip_band(config: Config) -> Finding:
    """A band that was meant for the other kind of ratio."""
    low, high = config.clip
    objective = config.algorithm.objective
    paper = PAPER_CLIP[objective]
    text = f"{objective} with {low:g} / {high:g} (the paper: {paper[0]:g} / {paper[1]:g})"
    if objective.startswith("gspo") and min(low, high) >= 0.05:
        return warn(
            "clip range",
            f"{text}: log s is a mean over the answer's tokens and moves by thousandths, so this never clips",
            "Leave algorithm.clip_low and clip_high unset; 0.2 is a range for GRPO's token ratios.",
        )
    if objective == "grpo" and max(low, high) <= 0.01:
        return warn(
            "clip range",
            f"{text}: token ratios move by tenths, so nearly every token that learns is clipped",
            "Leave algorithm.clip_low and clip_high unset; 3e-4 is a range for GSPO's sequence ratios.",
        )
    return ok("clip range", text)


def check_disk(config: Config, trainer: Trainer) -> Finding:
    """Can the run directory be written, and does it hold the checkpoints that will be there at one time?"""
    from gspo.training.checkpoint import bytes_needed

    folder = as_path(config.run.directory)
    existing = next(path for path in [folder.absolute(), *folder.absolute().parents] if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK) or not _can_write(existing):
        return fail("disk", f"{existing} cannot be written", "Choose another run.directory.")
    one = bytes_needed(trainer.optimizer)
    needed = one * (config.run.keep + 2)  # the newest, the best, and the one being written
    free = shutil.disk_usage(existing).free
    text = f"a checkpoint takes {_size(one)}, up to {_size(needed)} at one time; {_size(free)} free at {existing}"
    if free < needed:
        return fail("disk", text, "Free some space, lower run.keep, or choose another run.directory.")
    return ok("disk", text, checkpoint_bytes=one, free_bytes=free)


def _can_write(folder: Path) -> bool:
    """Permissions say nothing on a read-only mount, and root passes them all."""
    probe = folder / f".gspo-{os.getpid()}"
    try:
        probe.write_text("x")
        probe.unlink()
    except OSError:
        return False
    return True


def check_memory(config: Config, trainer: Trainer, now: int, available: int) -> Finding:
    """What a run needs at its peak, by parts, against what there is.

    ``now``: bytes this process has; ``available``: bytes that it may still take.
    """
    policy, optimizer = trainer.policy, trainer.optimizer
    weights = sum(master.numel() for master in optimizer.master)
    longest = config.task.max_prompt_tokens + config.rollout.max_tokens
    rows = config.rollout.prompts_per_iteration * config.rollout.group_size / config.algorithm.updates_per_rollout
    tokens = min(config.batch.max_tokens, rows * longest)
    state, activations = 12 * weights, activation_bytes(trainer) * tokens
    model = policy.model.config.get_text_config()
    heads = getattr(model, "num_key_value_heads", None) or model.num_attention_heads
    width = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
    slots = min(config.engine.max_batch, config.rollout.prompts_per_iteration * config.rollout.group_size)
    cache = 2 * model.num_hidden_layers * heads * width * policy.dtype.itemsize * slots * longest
    more = state + max(activations, cache)  # sampling and training take turns
    text = (
        f"about {_size(now + more)} at the peak: {_size(now)} now, {_size(state)} gradients and moments, then "
        f"{_size(activations)} a pass of {tokens:,.0f} tokens, or {_size(cache)} key/value cache; "
        f"{_size(now + available)} there"
    )
    measured = {"needed_bytes": int(now + more), "available_bytes": now + available}
    if more > available:
        advice = (
            "Lower batch.max_tokens or set batch.recompute_activations (the gradient stays the same), then lower "
            "engine.max_batch, or use a smaller model."
        )
        return fail("memory", text, advice, **measured)
    return ok("memory", text, **measured)


def activation_bytes(trainer: Trainer) -> float:
    """Bytes kept for the backward pass, for each token of a pass; counted, on two short rows.

    With ``batch.recompute_activations``: the input of each layer, and the whole of the one that is computed again.
    """
    policy = trainer.policy
    if policy.recompute:
        policy.recompute = False
        try:
            whole = activation_bytes(trainer)
        finally:
            policy.recompute = True
        layers, width = len(find_layers(policy)), policy.model.config.get_text_config().hidden_size
        return whole / layers + layers * width * policy.dtype.itemsize
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    vocabulary = trainer.policy.model.config.get_text_config().vocab_size
    ids = [[(7 * row + 13 * place) % vocabulary for place in range(PROBE_TOKENS)] for row in range(2)]
    rows = [Row([1], tokens, [True] * PROBE_TOKENS, 1.0, [0.0] * PROBE_TOKENS) for tokens in ids]
    step = pack_step(rows, max_tokens=4 * PROBE_TOKENS)
    parameters = {p.untyped_storage().data_ptr() for p in trainer.policy.model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        trainer.forward_backward(step, Means())
    trainer.optimizer.clear()
    used = sum(size for address, size in kept.items() if address not in parameters)
    return used / step.batches[0].num_tokens


def memory_now_and_available() -> tuple[int, int]:
    """(bytes this process has resident, bytes it may still take), by the system's own count and its control group."""
    page = os.sysconf("SC_PAGE_SIZE")
    statm, meminfo = Path("/proc/self/statm"), Path("/proc/meminfo")
    if not (statm.exists() and meminfo.exists()):
        return 0, os.sysconf("SC_PHYS_PAGES") * page
    now = int(statm.read_text().split()[1]) * page
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and limit.read_text().strip().isdigit():
        available = min(available, int(limit.read_text()) - int(used.read_text()))
    return now, available


def _size(count: float) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
