"""Drawing from measured distributions, with a seed."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import TypeVar

__all__ = ["PROBABILITIES", "Quantiles", "choose", "count", "draw", "share"]

#: Where a distribution is measured. Draws end at the last one: the longest 1 % of what was seen is left out.
PROBABILITIES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)

#: A distribution as its values at ``PROBABILITIES``.
Quantiles = tuple[float, ...]

T = TypeVar("T")


def draw(rng: random.Random, quantiles: Quantiles) -> float:
    """A value of the distribution, linear between its quantiles."""
    p = rng.random() * PROBABILITIES[-1]
    i = bisect_right(PROBABILITIES, p) - 1
    low, high = PROBABILITIES[i], PROBABILITIES[i + 1]
    return quantiles[i] + (quantiles[i + 1] - quantiles[i]) * (p - low) / (high - low)


def count(rng: random.Random, quantiles: Quantiles, *, scale: float = 1.0, least: int = 1) -> int:
    """A whole number of the distribution times ``scale``, at least ``least``."""
    return max(least, round(draw(rng, quantiles) * scale))


def choose(rng: random.Random, weights: Mapping[T, float]) -> T:
    """A key, as often as its weight says. The weights need not sum to 1."""
    keys: Sequence[T] = list(weights)
    return rng.choices(keys, list(weights.values()))[0]


def share(rng: random.Random, probability: float) -> bool:
    """True with ``probability``."""
    return rng.random() < probability
