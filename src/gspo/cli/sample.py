"""``gspo sample CONFIG.toml [--prompt TEXT ...] [--num_samples N] [--temperature T] [--section.key VALUE ...]``"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.markup import escape

from gspo.cli.options import load, parse
from gspo.config import Config

DESCRIPTION = "Show answers of model.path. Without --prompt: to three held-out prompts."


@dataclass(frozen=True)
class SampleOptions:
    prompt: tuple[str, ...] = ()
    """What to ask; several may follow."""
    num_samples: int = 1
    """Answers to each prompt."""
    temperature: float = 1.0
    """Sampling temperature; 0 is greedy."""
    config: Config = field(default_factory=Config)


def run(arguments: Sequence[str]) -> int:
    config, flags = load("sample", arguments)
    sections = tuple(vars(config))
    # the config's own flags have no prefix on the command line
    flags = [f"--config.{flag[2:]}" if flag[2:].split(".")[0] in sections else flag for flag in flags]
    options = parse("sample", SampleOptions, SampleOptions(config=config), flags, DESCRIPTION)
    from gspo.evaluation.run import prompt_text, sample
    from gspo.tasks import load_task

    prompts = list(options.prompt)
    if not prompts:
        prompts = [prompt_text(prompt) for prompt in load_task(options.config).heldout[:3]]
    rows = sample(options.config, prompts, num_samples=options.num_samples, temperature=options.temperature)
    console = Console(highlight=False)
    for prompt, answers in zip(prompts, rows, strict=True):
        console.print(f"[bold]{escape(prompt)}")
        for answer in answers:
            console.print(f"  {escape(answer.strip()) or '[dim](empty)'}")
    return 0
