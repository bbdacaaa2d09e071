"""Group-relative advantages: how much better an answer is than the others to the same prompt."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

Scale = Literal["group_std", "none", "batch_std"]


def group_advantages(rewards: Tensor, group_ids: Tensor, *, scale: Scale = "group_std", eps: float = 1e-6) -> Tensor:
    """f32[S] advantages, equation (6) of the GSPO paper (arXiv 2507.18071): (r_i - mean) / std over the group.

    The deviation is the sample one (ddof 1), as in the field's trainers; the paper does not say. ``eps`` is added to
    it. Groups are found by id, in any order and of any size.

    Args:
        rewards: [S]; NaN marks an unscored answer, which stays outside mean and deviation and gets advantage 0.
        group_ids: int[S], equal for answers to the same prompt.
        scale: 'group_std' (the paper); 'none' (reward minus mean: Dr. GRPO, arXiv 2503.20783); 'batch_std' (deviation
            of all scored rewards of the batch: Lite PPO, arXiv 2508.08221).

    A group without signal, see ``groups_without_signal``, has advantages of exactly 0; so has a group of one.
    Raises ValueError for shapes that differ, a reward that is infinite, or an unknown scale.
    """
    if scale not in get_args(Scale):
        raise ValueError(f"scale must be 'group_std', 'none' or 'batch_std'; found {scale!r}.")
    if rewards.ndim != 1 or rewards.shape != group_ids.shape:
        raise ValueError(
            f"rewards and group_ids must be 1-D of equal length, found {list(rewards.shape)} and "
            f"{list(group_ids.shape)}."
        )
    infinite = rewards.isinf().nonzero()
    if infinite.numel():
        raise ValueError(f"The reward of row {int(infinite[0])} is infinite; rewards must be finite, or NaN: unscored.")
    values = rewards.double()  # 7 rewards of 0.1 have a spread of 1e-8 in float32, which eps would blow up to 0.007
    ids, inverse = group_ids.unique(return_inverse=True)
    scored = values.isfinite()
    centred = torch.zeros_like(values)
    deviation = torch.ones_like(values)
    quiet = groups_without_signal(rewards, group_ids)
    for number in range(ids.shape[0]):
        members = (inverse == number) & scored
        if quiet[number]:
            continue
        centred[members] = values[members] - values[members].mean()
        deviation[members] = values[members].std()
    if scale == "batch_std" and int(scored.sum()) > 1:
        deviation = values[scored].std().expand_as(values)
    if scale == "none":
        return centred.float()
    return torch.where(centred == 0, 0.0, centred / (deviation + eps)).float()


def groups_without_signal(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """bool by group, in order of id: its scored rewards are all equal to rounding, or fewer than two.

    Equal means max - min <= 1e-8 max(1, |max|): a comparison of deviations with 0 would be fooled by rounding.
    """
    values = rewards.double()
    ids, inverse = group_ids.unique(return_inverse=True)
    quiet = torch.ones(ids.shape[0], dtype=torch.bool, device=rewards.device)
    for number in range(ids.shape[0]):
        members = values[(inverse == number) & values.isfinite()]
        if members.shape[0] > 1:
            largest, smallest = float(members.max()), float(members.min())
            quiet[number] = largest - smallest <= 1e-8 * max(1.0, abs(largest))
    return quiet
