"""One reinforcement-learning run as an experiment records it: the parts of gspo, put together through its Python API.

``train`` does what ``gspo train`` does, without a run folder, and can in addition sample from weights that are some
batches old, or with an engine of its own. What it returns is plain data.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gspo.config import PAPER_CLIP, Config
from gspo.evaluation.run import evaluate_system
from gspo.metrics import mean, percentile, std
from gspo.packing import pack_step
from gspo.rollout.collect import Collected, collect
from gspo.rollout.system import System, load_system
from gspo.sync.publish import Publisher
from gspo.training.iteration import Iteration, advantages_of, run_updates, split_evenly, to_row
from gspo.training.observe import rollout_metrics
from gspo.training.trainer import RowResult, Trainer

LOG_S, LOG_W = PAPER_CLIP["gspo"], PAPER_CLIP["grpo"]


def train(
    config: Config, *, lag: int = 0, prepare: Callable[[System], None] | None = None, final_evaluation: bool = True
) -> dict[str, Any]:
    """Train and return {"curve": metric -> value by iteration, "by_update": ..., "final": ..., "seconds": by part}.

    ``lag``: an update's rollouts were sampled that many rollout batches before it (the first ones by the starting
    weights). ``prepare``: changes the system before anything is sampled, such as its engine.
    """
    config = config.resolved()
    torch.manual_seed(config.run.seed)
    system = load_system(config)
    try:
        if prepare is not None:
            prepare(system)
        return _train(system, config, lag, final_evaluation)
    finally:
        system.close()


def _train(system: System, config: Config, lag: int, final_evaluation: bool) -> dict[str, Any]:
    trainer = Trainer(system.policy, config)
    # weights in files are proved to arrive; an engine in this process holds the very tensors, or a copy
    publish = Publisher(system.policy, system.engine).publish if config.engine.kind == "vllm" else None
    start = evaluations(system, config, ["greedy"]) if final_evaluation else {}
    waiting: deque[Iteration] = deque()
    lines: list[dict[str, float | None]] = []
    seen: list[tuple[int, RowResult]] = []
    seconds = dict.fromkeys(("rollout", "reward", "old_logprobs", "update", "publish"), 0.0)
    for number in range(1, config.run.iterations + lag + 1):
        waiting.append(_collect(system, trainer, config, number, stale=lag > 0))
        if len(waiting) <= lag:
            continue
        iteration = waiting.popleft()
        run_updates(iteration, trainer, config)
        began = time.perf_counter()
        (publish or system.engine.load_weights)(trainer.optimizer.updates)
        seconds["publish"] += time.perf_counter() - began
        seconds["rollout"] += iteration.collected.rollout_seconds
        seconds["reward"] += iteration.collected.reward_seconds
        seconds["old_logprobs"] += iteration.old_seconds
        seconds["update"] += iteration.update_seconds
        by_update = _by_update(iteration, config)
        lines.append(_line(iteration, config, [row for _, row in by_update]))
        if len(lines) > config.run.iterations // 4:  # past the warm-up of Adam and of the learning rate
            seen += by_update
    final = evaluations(system, config, list(TEMPERATURES)) if final_evaluation else {}
    curve = {
        key: [rounded(line.get(key)) for line in lines] for key in dict.fromkeys(k for line in lines for k in line)
    }
    return {
        "curve": curve,
        "by_update": _updates(seen, config),
        "start": start,
        "final": final,
        "seconds": {part: round(value, 1) for part, value in seconds.items()},
    }


def _collect(system: System, trainer: Trainer, config: Config, number: int, *, stale: bool) -> Iteration:
    iteration = Iteration(number, collect(system, config, number), config.algorithm.old_logprobs)
    if stale and config.algorithm.old_logprobs == "trainer":  # scored now: later the weights will be others
        rollouts = iteration.collected.rollouts
        advantages = advantages_of(iteration.collected.groups, config)
        rows = [to_row(rollout, float(advantage)) for rollout, advantage in zip(rollouts, advantages, strict=True)]
        iteration.old = trainer.old_scores(pack_step(rows, max_tokens=config.batch.max_tokens))
    return iteration


TEMPERATURES = {"greedy": 0.0, "sampled": 1.0}


def evaluations(system: System, config: Config, ways: Sequence[str]) -> dict[str, float | None]:
    """Held-out accuracy and mean reward, greedy and sampled."""
    found: dict[str, float | None] = {}
    for name in ways:
        temperature = TEMPERATURES[name]
        record, _ = evaluate_system(system, config.with_values({"eval.temperature": temperature}), 0)
        found |= {f"{name}_accuracy": rounded(record["accuracy"]), f"{name}_reward": rounded(record["reward/mean"])}
    return found


def _by_update(iteration: Iteration, config: Config) -> list[tuple[int, RowResult]]:
    """(number of the update inside its iteration, from 0; what it saw of a row), for every row it computed."""
    parts = split_evenly(
        len(iteration.collected.rollouts), config.algorithm.updates_per_rollout, config.rollout.group_size
    )
    return [(u, iteration.results[n]) for u, part in enumerate(parts) for n in part if n in iteration.results]


def _line(iteration: Iteration, config: Config, rows: Sequence[RowResult]) -> dict[str, float | None]:
    collected: Collected = iteration.collected
    found = rollout_metrics(collected)
    first_terms = [next(iter(r.reward_terms.values()), None) for r in collected.rollouts]
    means = iteration.means.result()
    return {
        "reward": found.get("reward/mean"),
        "accuracy": mean(term for term in first_terms if term is not None),
        "length": found["rollout/length_mean"],
        "truncated": found["rollout/truncated_fraction"],
        "no_signal": found["group/no_signal_fraction"],
        "entropy": means.get("policy/entropy"),
        "kl_old": means.get("policy/kl_old"),
        "expert_change": means.get("moe/expert_change"),
        "grad_norm": mean(iteration.norms),
        "grad_norm_max": max(iteration.norms, default=None),
        "not_finite": float(iteration.not_finite),
        **ratio_statistics(rows, config),
    }


def ratio_statistics(rows: Sequence[RowResult], config: Config) -> dict[str, float | None]:
    """Of the rows of one or several updates.

    clip_tokens: share of tokens whose gradient the objective stopped; clip_sequences: share of sequences with at least
    one. outside_s, outside_w: share of sequences and of tokens whose ratio is outside the paper's band of GSPO and of
    GRPO, whatever the objective and the sign of the advantage. std_log_s, std_log_w: about 0. log_s_p50 and so on:
    percentiles of abs(log s); a band of the 70th stops about 15 % where the signs of advantages are even.
    """
    changes = [torch.tensor(row.logprobs) - torch.tensor(row.old_logprobs) for row in rows]
    if not changes:
        return {}
    log_s = torch.stack([change.mean() for change in changes])
    log_w = torch.cat(changes)
    lengths = torch.tensor([float(len(change)) for change in changes])
    clipped = torch.tensor([row.clipped for row in rows])
    return {
        "clip_tokens": float((clipped * lengths).sum() / lengths.sum()),
        "clip_sequences": float((clipped > 0).float().mean()),
        "outside_s": float(_outside(log_s, LOG_S).float().mean()),
        "outside_w": float(_outside(log_w, LOG_W).float().mean()),
        "std_log_s": float(log_s.square().mean().sqrt()),
        "std_log_w": float(log_w.square().mean().sqrt()),
        **{f"log_s_p{share:.0%}"[:-1]: percentile(log_s.abs().tolist(), share) for share in (0.5, 0.7, 0.9)},
        "engine_gap_p50": percentile([abs(row.engine_gap) for row in rows if row.engine_gap is not None], 0.5),
    }


def _outside(log_ratio: torch.Tensor, band: tuple[float, float]) -> torch.Tensor:
    return (log_ratio < math.log1p(-band[0])) | (log_ratio > math.log1p(band[1]))


def _updates(seen: Sequence[tuple[int, RowResult]], config: Config) -> list[dict[str, Any]]:
    """For each update of an iteration: ratio statistics, and expert change by layer, over the last three quarters."""
    found: list[dict[str, Any]] = []
    for update in range(config.algorithm.updates_per_rollout):
        rows = [row for number, row in seen if number == update]
        line: dict[str, Any] = {key: rounded(value) for key, value in ratio_statistics(rows, config).items()}
        changes = [(row.expert_change, len(row.logprobs)) for row in rows if row.expert_change is not None]
        if changes:
            tokens = sum(length for _, length in changes)
            layers = zip(*([value * length for value in change] for change, length in changes), strict=True)
            line["expert_change_by_layer"] = [rounded(sum(layer) / tokens) for layer in layers]
        found.append(line)
    return found


def rounded(value: float | None) -> float | None:
    """To five significant digits, so that results stay small; None for what is no number."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.5g}")


def interval(values: Sequence[float]) -> tuple[float, float]:
    """(mean, half width of its 95 % interval by Student's t); half width 0 for a single value."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    centre = sum(finite) / len(finite) if finite else float("nan")
    spread = std(finite)
    if spread is None:
        return centre, 0.0
    return centre, _T95[min(len(finite) - 1, len(_T95) - 1)] * spread / math.sqrt(len(finite))


_T95 = (math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Two-sided 95 % quantile of Student's t, by degrees of freedom."""
