"""The three objectives on padded [B, T] arrays, token by token in plain Python and float64.

Written by another route than the library: no tensors, no log-space mean (the sequence ratio is a root of a product of
probability ratios), the clip as a bound on one side chosen by the advantage's sign, and gradients not by autograd but
from the coefficients c_it of the paper's equations (10), (12) and (17): grad J = sum_it c_it grad log pi(y_it).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass
class Padded:
    """[B, T] each; entries where ``mask`` is False may be anything."""

    logprobs: Array
    old_logprobs: Array
    mask: NDArray[np.bool_]
    advantages: Array


@dataclass
class Answer:
    """``loss``; ``gradient`` [B, T] of the loss with respect to log-probs; by row the ratio and the clipped shares."""

    loss: float
    gradient: Array
    ratio: Array
    high: Array
    low: Array


def bounded(ratio: float, advantage: float, low: float, high: float) -> tuple[float, bool, bool]:
    """Pessimistic value, and whether the bound above or below holds it."""
    if advantage > 0:
        return advantage * min(ratio, 1 + high), ratio > 1 + high, False
    return advantage * max(ratio, 1 - low), False, advantage < 0 and ratio < 1 - low


def solve(name: str, batch: Padded, low: float, high: float) -> Answer:
    rows, width = batch.mask.shape
    present = [row for row in range(rows) if any(batch.mask[row])]
    answer = Answer(0.0, np.zeros((rows, width)), np.ones(rows), np.zeros(rows), np.zeros(rows))
    for row in present:
        tokens = [t for t in range(width) if batch.mask[row, t]]
        share = 1 / (len(present) * len(tokens))
        ratios = token_ratios(batch, row, tokens)
        if name != "grpo":
            ratios = [math.prod(ratios) ** (1 / len(tokens))] * len(tokens)
        answer.ratio[row] = sum(ratios) / len(tokens)
        for t, ratio in zip(tokens, ratios, strict=True):
            advantage = batch.advantages[row, t]
            value, above, below = bounded(ratio, advantage, low, high)
            answer.loss -= share * value
            answer.high[row] += above / len(tokens)
            answer.low[row] += below / len(tokens)
            answer.gradient[row, t] = 0.0 if above or below else -share * ratio * advantage
    return answer


def token_ratios(batch: Padded, row: int, tokens: list[int]) -> list[float]:
    return [math.exp(batch.logprobs[row, t]) / math.exp(batch.old_logprobs[row, t]) for t in tokens]


def surrogate(name: str, batch: Padded, frozen: Array, low: float, high: float) -> float:
    """The loss as a function of ``batch.logprobs``, stop-gradients held at ``frozen``: for finite differences."""
    total, present = 0.0, 0
    for row in range(batch.mask.shape[0]):
        tokens = [t for t in range(batch.mask.shape[1]) if batch.mask[row, t]]
        if not tokens:
            continue
        present += 1
        ratios = token_ratios(batch, row, tokens)
        whole = math.prod(ratios) ** (1 / len(tokens))
        if name == "gspo":
            total += bounded(whole, batch.advantages[row, tokens[0]], low, high)[0]
            continue
        if name == "gspo_token":
            held = Padded(frozen, batch.old_logprobs, batch.mask, batch.advantages)
            whole = math.prod(token_ratios(held, row, tokens)) ** (1 / len(tokens))
            ratios = [whole * math.exp(batch.logprobs[row, t]) / math.exp(frozen[row, t]) for t in tokens]
        values = [bounded(r, batch.advantages[row, t], low, high)[0] for t, r in zip(tokens, ratios, strict=True)]
        total += sum(values) / len(tokens)
    return -total / present


def finite_differences(name: str, batch: Padded, low: float, high: float, step: float = 1e-6) -> Array:
    gradient = np.zeros_like(batch.logprobs)
    for place in zip(*np.nonzero(batch.mask), strict=True):
        ends = []
        for sign in (1, -1):
            moved = batch.logprobs.copy()
            moved[place] += sign * step
            ends.append(
                surrogate(
                    name, Padded(moved, batch.old_logprobs, batch.mask, batch.advantages), batch.logprobs, low, high
                )
            )
        gradient[place] = (ends[0] - ends[1]) / (2 * step)
    return gradient
