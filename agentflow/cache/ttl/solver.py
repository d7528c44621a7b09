"""The time-to-live that pays: tau* = argmax over tau of P(tau) * benefit - cost * tau."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from agentflow.cache.ttl.durations import Distribution, Exponential

__all__ = ["Solution", "tau_star"]


class Solution(NamedTuple):
    """A time-to-live in seconds, the probability of a return within it, and what it gains, in seconds."""

    tau: float
    probability: float
    gain: float


NONE = Solution(0.0, 0.0, 0.0)


def tau_star(distribution: Distribution, benefit: float, cost: float) -> Solution:
    """The best time-to-live: ``benefit`` seconds are saved when the return comes within it, and each second of it
    costs ``cost`` seconds.

    Candidates are 0 and the distinct durations of the distribution, which is where the optimum of a step
    function lies; ties go to the smaller. An exponential has its optimum at mean * ln(benefit / (mean * cost)).
    O(candidates).
    """
    if not benefit > 0.0 or not math.isfinite(benefit):
        return NONE
    cost = cost if cost > 0.0 else 0.0
    if isinstance(distribution, Exponential):
        return _exponential(distribution, benefit, cost)
    times = distribution.candidates()
    if not len(times):
        return NONE
    values = getattr(distribution, "values", None)
    chances = values if values is not None else np.array([distribution.cdf(t) for t in times])
    gains = chances * benefit - cost * times
    best = int(np.argmax(gains))  # the first of equals
    if not gains[best] > 0.0:
        return NONE
    return Solution(float(times[best]), float(chances[best]), float(gains[best]))


def _exponential(prior: Exponential, benefit: float, cost: float) -> Solution:
    if cost * prior.mean >= benefit:
        return NONE
    # Without cost any time is worth it: the 0.9999 quantile stands for "for ever".
    rate = max(cost * prior.mean / benefit, 1e-4)
    tau = -prior.mean * math.log(rate)
    chance = prior.cdf(tau)
    return Solution(tau, chance, chance * benefit - cost * tau)
