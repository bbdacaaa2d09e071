"""``gspo sample CONFIG.toml [--prompt TEXT ...] [--num_samples N] [--temperature T] [--section.key VALUE ...]``"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import tyro
from rich.console import Console
from rich.text import Text

from gspo.cli.options import parse
from gspo.errors import ConfigError

DESCRIPTION = "Show answers of model.path. Without --prompt: to three held-out prompts."


@dataclass(frozen=True)
class SampleOptions:
    prompt: tyro.conf.UseAppendAction[tuple[tuple[str, ...], ...]] = ()
    """What to ask; several may follow."""
    num_samples: int = 1
    """Answers to each prompt."""
    temperature: float = 1.0
    """Sampling temperature; 0 is greedy."""


def run(arguments: Sequence[str]) -> int:
    config, options = parse("sample", arguments, SampleOptions, DESCRIPTION)
    from gspo.cli.live import visible
    from gspo.evaluation.run import prompt_text, sample
    from gspo.tasks import load_task

    prompts = list(chain.from_iterable(options.prompt))
    if not prompts:
        prompts = [prompt_text(prompt) for prompt in load_task(config).heldout[:3]]
    if not prompts:
        raise ConfigError("There are no held-out prompts to answer. Give one with --prompt, or set eval.prompts.")
    rows = sample(config, prompts, num_samples=options.num_samples, temperature=options.temperature)
    console = Console(highlight=False)
    for prompt, answers in zip(prompts, rows, strict=True):
        console.print(Text(visible(prompt), style="bold"), soft_wrap=True)
        for answer in answers:
            said = visible(answer.strip()).replace("\n", "\n  ")
            console.print("  ", Text(said) if said else Text("(empty)", style="dim"), sep="", soft_wrap=True)
    return 0
