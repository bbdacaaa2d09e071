"""How each number of a run reduces: over sequences, tokens, micro-batches and updates.

A mean is kept as a sum and a count until the end, so that uneven micro-batches weigh right; NaN is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class Mean:
    """A weighted mean that can be added to piece by piece; None when nothing was added."""

    total: float = 0.0
    count: float = 0.0

    def add(self, value: float, count: float = 1.0) -> None:
        """Add ``count`` observations whose mean is ``value``; not-a-number and infinities are left out."""
        if count and math.isfinite(value):
            self.total += value * count
            self.count += count

    @property
    def value(self) -> float | None:
        return self.total / self.count if self.count else None


@dataclass
class Means:
    """Named means; ``result()`` has only the names that were observed."""

    values: dict[str, Mean] = field(default_factory=dict)

    def add(self, name: str, value: float, count: float = 1.0) -> None:
        self.values.setdefault(name, Mean()).add(value, count)

    def result(self) -> dict[str, float]:
        return {name: mean.value for name, mean in self.values.items() if mean.value is not None}


def mean(values: Iterable[float]) -> float | None:
    """Mean of the finite values; None when there are none."""
    result = Mean()
    for value in values:
        result.add(value)
    return result.value


def std(values: Iterable[float]) -> float | None:
    """Sample deviation (ddof 1) of the finite values; None below two."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2:
        return None
    centre = sum(finite) / len(finite)
    return math.sqrt(sum((value - centre) ** 2 for value in finite) / (len(finite) - 1))


def percentile(values: Iterable[float], share: float) -> float | None:
    """The smallest value that at least ``share`` of the finite values do not exceed; None when there are none."""
    ordered = sorted(value for value in values if math.isfinite(value))
    return ordered[max(math.ceil(share * len(ordered)), 1) - 1] if ordered else None
