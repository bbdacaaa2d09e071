"""(d) Does GSPO tolerate the inference engine's log-probs? (section 5.4)

'noise' arms: answers sampled in float32, bfloat16 or with 8-bit weights by the very weights that a float32 trainer
scores. How far the log ratios are from 0 then, by length; how much is clipped by that alone; and how the gradient with
the engine's log-probs as old ones compares with the gradient without that noise. 'train' arms: whole runs.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from experiments.common import Arm, Experiment, Results, main
from experiments.engines import sample_in_int8
from experiments.measure import ratio_statistics, rounded, train
from experiments.tables import Column, final, late, moved
from gspo.config import PAPER_CLIP, Config
from gspo.metrics import Means, mean
from gspo.packing import pack_step
from gspo.rollout.collect import collect
from gspo.rollout.system import load_system
from gspo.training.iteration import advantages_of, split_evenly, to_row
from gspo.training.trainer import OldScore, RowResult, Trainer
from gspo.types import Rollout

LENGTHS = (4, 8, 16, 32, 64, 128, 256, 512)
ENGINES = ("float32", "bfloat16", "int8")
BASES = {"short": "sort_moe", "long": "long_moe", "smollm2": "word_problems"}


def run(config: Config, *, engine: str, noise: bool = False) -> dict[str, Any]:
    return measure_noise(config, engine) if noise else train(config, prepare=_prepare(engine))


def _prepare(engine: str) -> Any:
    return sample_in_int8 if engine == "int8" else None


def measure_noise(config: Config, engine: str) -> dict[str, Any]:
    """One rollout batch of the starting weights; nothing is trained but for the two updates of 'drifted'."""
    config = config.resolved()
    torch.manual_seed(config.run.seed)
    system = load_system(config)
    if engine == "int8":
        sample_in_int8(system)
    collected = collect(system, config, 1)
    rollouts, advantages = collected.rollouts, advantages_of(collected.groups, config).tolist()
    trainer = Trainer(system.policy, config)
    rows = [to_row(rollout, 1.0) for rollout in rollouts]
    scores = trainer.old_scores(pack_step(rows, max_tokens=config.batch.max_tokens))
    found = {
        "noise": _noise(rollouts, scores, config),
        "cosine": {objective: _cosine(trainer, config, objective, rollouts, advantages, scores)
                   for objective in ("gspo", "grpo")},
    }  # fmt: skip
    parts = split_evenly(len(rollouts), config.algorithm.updates_per_rollout, config.rollout.group_size)
    for part in parts[:2]:  # the drift that the noise comes on top of in practice
        step = pack_step([to_row(rollouts[n], advantages[n]) for n in part], max_tokens=config.batch.max_tokens)
        if step.batches:
            trainer.forward_backward(step, Means())
            trainer.optim_step()
    later = [n for part in parts[2:] for n in part]
    found["cosine_drifted"] = {
        objective: _cosine(
            trainer, config, objective, [rollouts[n] for n in later], [advantages[n] for n in later],
            {place: scores[n] for place, n in enumerate(later)},
        )
        for objective in ("gspo", "grpo")
    }  # fmt: skip
    return found


def _noise(rollouts: Sequence[Rollout], scores: Mapping[int, OldScore], config: Config) -> dict[str, Any]:
    rows = [
        RowResult(1.0, 0.0, rollout.rollout_logprobs, scores[number].logprobs)
        for number, rollout in enumerate(rollouts)
    ]
    by_length = []
    for length in LENGTHS:
        cut = [
            RowResult(1.0, 0.0, row.old_logprobs[:length], row.logprobs[:length])
            for row in rows
            if len(row.logprobs) >= length
        ]
        if len(cut) >= 8:
            by_length.append({"length": length, "count": len(cut)} | _rounded(ratio_statistics(cut, config)))
    lengths = mean(len(row.logprobs) for row in rows)
    return _rounded(ratio_statistics(rows, config)) | {"length": lengths, "by_length": by_length}


def _cosine(
    trainer: Trainer,
    config: Config,
    objective: str,
    rollouts: Sequence[Rollout],
    advantages: Sequence[float],
    scores: Mapping[int, OldScore],
) -> dict[str, float | None]:
    """Of the gradient with the engine's log-probs as old ones to that with the trainer's; and what share is clipped."""
    low, high = PAPER_CLIP[objective]
    trainer.config = config.with_values(
        {"algorithm.objective": objective, "algorithm.clip_low": low, "algorithm.clip_high": high}
    )
    gradients, clipped = [], []
    for engine_old in (False, True):
        rows = [
            to_row(rollout, advantage, OldScore(rollout.rollout_logprobs) if engine_old else scores[number])
            for number, (rollout, advantage) in enumerate(zip(rollouts, advantages, strict=True))
        ]
        step = pack_step(rows, max_tokens=config.batch.max_tokens)
        if not step.batches:
            return {"cosine": None, "norm_ratio": None, "clipped": None, "clipped_clean": None}
        _, results = trainer.forward_backward(step, Means(), moved=True, engine_old=engine_old)
        weights = [p for p in trainer.policy.model.parameters() if p.grad is not None]
        gradients.append(torch.cat([p.grad.flatten().double() for p in weights if p.grad is not None]))
        for parameter in weights:
            parameter.grad = None
        clipped.append(mean(result.clipped for result in results.values()))
    clean, noisy = gradients
    trainer.config = config
    return _rounded(
        {
            "cosine": float(torch.nn.functional.cosine_similarity(clean, noisy, dim=0)),
            "norm_ratio": float(noisy.norm() / clean.norm()),
            "clipped": clipped[1],
            "clipped_clean": clipped[0],
        }
    )


def _rounded(values: Mapping[str, float | None]) -> dict[str, float | None]:
    return {key: rounded(value) for key, value in values.items()}


def arms() -> dict[str, Arm]:
    found: dict[str, Arm] = {}
    for place, base in BASES.items():
        for engine in ENGINES:
            found[f"noise {place} {engine}"] = Arm(base, _dtype(engine), {"engine": engine, "noise": True})
    for objective in ("gspo", "grpo"):
        for engine in ENGINES:
            for old in ("trainer", "engine"):
                if (engine, old) != ("float32", "engine"):  # equal to a thousandth of the band: the same run
                    values = {"algorithm.objective": objective, "algorithm.old_logprobs": old} | _dtype(engine)
                    found[f"train {objective} {engine} old={old}"] = Arm("sort_moe", values, {"engine": engine})
    return found


def _dtype(engine: str) -> dict[str, Any]:
    return {"engine.dtype": "bfloat16" if engine == "bfloat16" else "float32"}


def draw(results: Results, path: Path) -> None:
    from experiments import figures  # matplotlib

    figure, axes = figures.grid(2, 3, "Old log-probs from the engine: noise and what it does")
    noise = figures.by(results, "noise")
    for axis, metric, title in (
        (axes[0][0], "std_log_s", "sd of log s by length, no update made"),
        (axes[0][1], "std_log_w", "sd of log w by length"),
        (axes[0][2], "outside_s", "sequences outside GSPO's band"),
    ):
        for number, (arm, records) in enumerate(noise.items()):
            if "float32" not in arm:
                _by_length(axis, records, metric, arm.removeprefix("noise "), figures.COLOURS[number])
        axis.set_xscale("log", base=2)
        axis.set_title(title, fontsize=9)
    for axis in axes[0][:2]:
        if axis.lines:
            axis.set_yscale("log")
    axes[0][0].axhline(math.log1p(PAPER_CLIP["gspo"][1]), color="black", linestyle=":", linewidth=1)
    axes[0][0].legend(fontsize=6)
    cosines = {
        f"{arm.removeprefix('noise ')} {objective}": [record["cosine"][objective]["cosine"] for record in records]
        for arm, records in noise.items()
        for objective in ("gspo", "grpo")
    }
    known = {arm: [value for value in values if value is not None] for arm, values in cosines.items()}
    figures.points(axes[1][0], {arm: values for arm, values in known.items() if values}, figures.COLOURS * 2)
    axes[1][0].set_title("cosine to the gradient without noise", fontsize=9)
    for axis, objective in zip(axes[1][1:], ("gspo", "grpo"), strict=True):
        chosen = figures.by(results, f"train {objective} ")
        for number, (arm, records) in enumerate(chosen.items()):
            label = arm.removeprefix(f"train {objective} ")
            figures.curves(axis, records, "reward", label, figures.COLOURS[number])
        axis.set_title(f"reward, {objective}", fontsize=9)
        if chosen:
            axis.legend(fontsize=6)
    figures.save(figure, path)


def _by_length(axis: Any, records: Sequence[Mapping[str, Any]], metric: str, label: str, colour: Any) -> None:
    for number, record in enumerate(records):
        lines = record["noise"]["by_length"]
        if not lines:  # hardly any answers, as in a quick run
            continue
        places, values = [line["length"] for line in lines], [line[metric] for line in lines]
        name = label if number == 0 else None
        axis.plot(places, values, "o-", color=colour, markersize=3, linewidth=0.8, label=name)


def noise(name: str, factor: float = 1.0) -> Column:
    return lambda record: record["noise"][name] * factor if "noise" in record else None


def cosine(objective: str, when: str = "cosine") -> Column:
    return lambda record: record[when][objective]["cosine"] if when in record else None


def trained(column: Column) -> Column:
    return lambda record: column(record) if "final" in record else None


COLUMNS = {
    "length": noise("length"),
    "sd log s": noise("std_log_s"),
    "sd log w": noise("std_log_w"),
    "sequences outside GSPO's band, %": noise("outside_s", 100),
    "tokens outside GRPO's, %": noise("outside_w", 100),
    "gradient cosine, GSPO": cosine("gspo"),
    "GRPO": cosine("grpo"),
    "after two updates, GSPO": cosine("gspo", "cosine_drifted"),
    "GRPO after two": cosine("grpo", "cosine_drifted"),
    "reward, last ten iterations": trained(late("reward")),
    "held-out accuracy, sampled": trained(final("sampled_accuracy")),
    "tokens clipped, %": trained(moved("clip_tokens", 100)),
}

EXPERIMENT = Experiment(
    "precision", arms(), range(3), run, draw, COLUMNS,
    ["noise short bfloat16", "noise short int8", "train gspo int8 old=engine"],
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
