"""Small pieces that several tests build their input from."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gspo.packing import Row


def random_rows(
    lengths: Sequence[Sequence[int]],
    *,
    vocabulary: int = 90,
    seed: int = 0,
    prompt_lengths: Sequence[int] | None = None,
    drift: float | None = None,
) -> list[Row]:
    """One group for each list of completion lengths; advantages differ and sum to about 0.

    ``drift``: standard deviation of old log-probs around -4.5, the tiny model's at random weights; None: none given.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for number, group in enumerate(lengths):
        prompt_length = 4 + number if prompt_lengths is None else prompt_lengths[number]
        prompt = torch.randint(0, vocabulary, (prompt_length,), generator=generator).tolist()
        for length in group:
            tokens = torch.randint(0, vocabulary, (length,), generator=generator).tolist()
            noise = torch.randn(length, generator=generator)
            rows.append(
                Row(
                    prompt_ids=prompt,
                    token_ids=tokens,
                    completion_mask=[True] * length,
                    advantage=float(torch.randn(1, generator=generator)),
                    rollout_logprobs=(-4.5 + noise * 0.01).tolist(),
                    old_logprobs=None if drift is None else (-4.5 + noise * drift).tolist(),
                )
            )
    return rows
