"""What a run ran on: versions, hardware, seed."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from gspo.config import Config


def environment(config: Config, policy_dtype: torch.dtype) -> dict[str, Any]:
    """JSON-able facts for environment.json."""
    packages = ("gspo", "torch", "transformers", "tokenizers", "safetensors", "numpy")
    return {
        "versions": {name: _version(name) for name in packages} | {"python": platform.python_version()},
        "commit": _commit(),
        "command": sys.argv,
        "seed": config.run.seed,
        "compute_dtype": str(policy_dtype).removeprefix("torch."),
        "hardware": {
            "machine": platform.machine(),
            "processor": _processor(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "threads": torch.get_num_threads(),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
    }


def peak_memory_bytes() -> int:
    """Largest resident memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def _commit() -> str | None:
    """The commit of the source tree this package runs from, if it is one."""
    folder = Path(__file__).resolve().parent
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() if found.returncode == 0 else None
