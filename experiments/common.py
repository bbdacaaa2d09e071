"""The runner of all experiments: which runs there are, which are done, one process a run, results merged.

    python -m experiments.NAME                      what is missing, run after run; then figure and table
    python -m experiments.NAME --quick              the same in miniature, into experiments/results/quick
    python -m experiments.NAME --list               the runs that are missing, one a line
    python -m experiments.NAME --arm A --seed S     that run alone
    python -m experiments.NAME --draw               figure and table of what is there

A run is stored as soon as it is done, so that a stopped experiment goes on where it was. Every run uses one thread, and
as many run at a time as there are cores.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from experiments.tables import table
from gspo.config import Config
from gspo.records import to_json
from gspo.training.coldstart import coldstart
from gspo.training.environment import environment

ROOT = Path(__file__).resolve().parent
RESULTS = ROOT / "results"
MODELS = ROOT / "models"

Results = Mapping[str, Sequence[Mapping[str, Any]]]
"""Arm -> the records of its seeds."""


@dataclass(frozen=True)
class Arm:
    """One setting. ``base``: a file of experiments/configs; ``values``: what is different from it; ``options``: for
    ``Experiment.run``."""

    base: str
    values: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    def config(self, seed: int, quick: bool) -> Config:
        """The run's config, from the cold-started model of ``base``, which is made if it is missing."""
        config = base_config(self.base, quick)
        values = {"model.path": str(start_model(self.base, quick)), "run.seed": seed, **self.values}
        return config.with_values({**values, **(QUICK if quick else {})})


@dataclass(frozen=True)
class Experiment:
    """``run(config, **arm.options)`` makes the body of a record; ``draw(results, path)`` the figure. ``quick_arms``:
    the arms that a quick run makes, with one seed."""

    name: str
    arms: Mapping[str, Arm]
    seeds: Sequence[int]
    run: Callable[..., dict[str, Any]]
    draw: Callable[[Results, Path], None]
    columns: Mapping[str, Callable[[Mapping[str, Any]], float | None]]
    quick_arms: Sequence[str]

    def planned(self, quick: bool) -> list[tuple[str, int]]:
        """(arm, seed) of every run; all arms of a seed before the next seed, so that half an experiment is balanced."""
        if quick:
            return [(arm, 0) for arm in self.quick_arms]
        return [(arm, seed) for seed in self.seeds for arm in self.arms]


QUICK: Mapping[str, Any] = {
    "run.iterations": 2,
    "rollout.prompts_per_iteration": 4,
    "rollout.group_size": 4,
    "algorithm.updates_per_rollout": 4,
    "rollout.max_tokens": 32,
    "eval.num_prompts": 4,
}
QUICK_START: Mapping[str, Any] = {
    "coldstart.steps": 4,
    "coldstart.batch_size": 4,
    "rollout.max_tokens": 900,
    "eval.every": 0,
}


def main(experiment: Experiment, arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=f"python -m experiments.{experiment.name}")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--draw", action="store_true")
    parser.add_argument("--arm", choices=list(experiment.arms))
    parser.add_argument("--seed", type=int)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time")
    options = parser.parse_args(arguments)
    store = Store(experiment, options.quick)
    if options.list:
        print("\n".join(f"{arm} {seed}" for arm, seed in store.missing()))
    elif options.arm is not None:
        run_one(experiment, options.arm, options.seed or 0, store)
    else:
        if not options.draw:
            _run_missing(experiment, store, options.jobs)
        experiment.draw(store.results(), store.folder / f"{experiment.name}.png")
        (store.folder / f"{experiment.name}.md").write_text(table(store.results(), experiment.columns), "utf-8")
    return 0


def run_one(experiment: Experiment, arm: str, seed: int, store: Store) -> None:
    """Make one run in this process and store it."""
    torch.set_num_threads(1)
    setting = experiment.arms[arm]
    config = setting.config(seed, store.quick)
    start = time.perf_counter()
    body = experiment.run(config, **setting.options)
    facts = environment(config, torch.float32)
    record = {
        "arm": arm,
        "seed": seed,
        "command": f"python -m experiments.{experiment.name} --arm {arm} --seed {seed}",
        "commit": facts["commit"],
        "hardware": facts["hardware"],
        "versions": facts["versions"],
        "minutes": round((time.perf_counter() - start) / 60, 2),
        "base": setting.base,
        "values": dict(setting.values) | dict(setting.options),
        **body,
    }
    store.add(record)


def _run_missing(experiment: Experiment, store: Store, jobs: int) -> None:
    missing = store.missing()
    for base in dict.fromkeys(experiment.arms[arm].base for arm, _ in missing):
        start_model(base, store.quick)  # before two runs could make it at the same time

    def run(number: int, arm: str, seed: int) -> None:
        print(f"{experiment.name} {number}/{len(missing)}: {arm} seed {seed}", flush=True)
        command = [sys.executable, "-m", f"experiments.{experiment.name}", "--arm", arm, "--seed", str(seed)]
        quick = ["--quick"] if store.quick else []
        subprocess.run([*command, *quick], check=True, cwd=ROOT.parent, env=os.environ | {"OMP_NUM_THREADS": "1"})

    with ThreadPoolExecutor(jobs) as pool:
        runs = [pool.submit(run, number, arm, seed) for number, (arm, seed) in enumerate(missing, 1)]
        try:
            for done in runs:
                done.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


class Store:
    """Results of one experiment: one JSON file of all runs, rewritten whole when a run is added."""

    def __init__(self, experiment: Experiment, quick: bool) -> None:
        self.experiment, self.quick = experiment, quick
        self.folder = RESULTS / "quick" if quick else RESULTS
        self.path = self.folder / f"{experiment.name}.json"

    def records(self) -> list[dict[str, Any]]:
        return json.loads(self.path.read_text(encoding="utf-8"))["runs"] if self.path.exists() else []

    def results(self) -> Results:
        """Of the arms there are now, in their order; seeds ascending."""
        records = self.records()
        by_arm = {
            arm: sorted((r for r in records if r["arm"] == arm), key=lambda r: r["seed"])
            for arm in self.experiment.arms
        }
        return {arm: found for arm, found in by_arm.items() if found}

    def missing(self) -> list[tuple[str, int]]:
        done = {(record["arm"], record["seed"]) for record in self.records()}
        return [run for run in self.experiment.planned(self.quick) if run not in done]

    def add(self, record: Mapping[str, Any]) -> None:
        """Written under another name and renamed: a killed run leaves the file as it was."""
        order = {run: number for number, run in enumerate(self.experiment.planned(False))}
        with self._alone():
            kept = [r for r in self.records() if (r["arm"], r["seed"]) != (record["arm"], record["seed"])]
            runs = sorted([*kept, record], key=lambda r: order.get((r["arm"], r["seed"]), 0))
            partial = self.path.with_suffix(".partial")
            partial.write_text('{"runs": [\n' + ",\n".join(map(to_json, runs)) + "\n]}\n", encoding="utf-8")
            partial.replace(self.path)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """While no other run reads and writes the file."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def base_config(base: str, quick: bool) -> Config:
    config = Config.load(ROOT / "configs" / f"{base}.toml")
    return config.with_values(QUICK_START) if quick else config


def start_model(base: str, quick: bool) -> Path | str:
    """The model that runs of ``base`` start from: as the config says, cold-started once if it has worked solutions.

    The same as ``gspo coldstart experiments/configs/BASE.toml --out experiments/models/BASE``.
    """
    config = base_config(base, quick)
    if not config.model.path.startswith("builtin:"):
        return config.model.path if not quick else "builtin:tiny"
    folder = MODELS / ("quick" if quick else "") / base
    if not folder.is_dir():
        print(f"cold start of {base} ...", flush=True)
        coldstart(config, folder)
    return folder
