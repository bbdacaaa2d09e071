"""pass@k: the chance that at least one of k answers is right."""

from __future__ import annotations

from math import comb


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Unbiased estimate from ``num_samples`` answers of which ``num_right`` are right: 1 - C(n-c, k) / C(n, k).

    Source: Chen et al. 2021 (arXiv 2107.03374), equation 1. Raises ValueError unless 1 <= k <= num_samples and
    0 <= num_right <= num_samples.
    """
    if not 1 <= k <= num_samples or not 0 <= num_right <= num_samples:
        raise ValueError(f"pass_at_k needs 1 <= k <= n and 0 <= c <= n, found n={num_samples}, c={num_right}, k={k}.")
    return 1.0 - comb(num_samples - num_right, k) / comb(num_samples, k)
