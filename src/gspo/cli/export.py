"""``gspo export RUN OUT [--checkpoint NAME] [--dtype bfloat16]``"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from gspo.config import Config

DESCRIPTION = (
    "Write a run's policy as a plain Hugging Face folder, for AutoModelForCausalLM.from_pretrained(OUT), vLLM, or "
    "model.path of another run."
)


@dataclass(frozen=True)
class ExportOptions:
    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The run's folder, or its name under runs/."""
    out: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """The folder to write; it must not exist yet."""
    checkpoint: str = "newest"
    """Which checkpoint: 'newest', 'best' (trained, by held-out accuracy), or its name under RUN/checkpoints."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the weights written. float32 is what was trained; bfloat16 takes half the space."""


def run(arguments: Sequence[str]) -> int:
    options = tyro.cli(
        ExportOptions, args=list(arguments), prog="gspo export", description=DESCRIPTION, use_underscores=True
    )
    from gspo.training.export import export
    from gspo.training.resume import run_folder

    written = export(run_folder(Config(), options.run), Path(options.out), options.checkpoint, options.dtype)
    print(f"checkpoint {written} written to {options.out}")
    return 0
