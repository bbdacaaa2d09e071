"""gspo: train language models with Group Sequence Policy Optimization (arXiv 2507.18071).

The public names are imported when first used, so that ``import gspo`` and ``gspo --help`` load no torch.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "Config": "gspo.config",
    "GspoError": "gspo.errors",
    "train": "gspo.training.loop",
    "coldstart": "gspo.training.coldstart",
    "GSPOTrainer": "gspo.training.gspo_trainer",
    "Callback": "gspo.training.callbacks",
    "PlainView": "gspo.cli.live",
    "evaluate": "gspo.evaluation.run",
    "sample": "gspo.evaluation.run",
}
__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'gspo' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return __all__
