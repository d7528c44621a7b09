"""The time-to-live that pays: tau* = argmax over tau of P(tau) * benefit - cost * tau."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from agentflow.cache.ttl.durations import Curve, Distribution, Exponential

__all__ = ["Solution", "tau_star"]


class Solution(NamedTuple):
    """A time-to-live in seconds, the probability of a return within it, and what it gains, in seconds."""

    tau: float
    probability: float
    gain: float


NONE = Solution(0.0, 0.0, 0.0)


def tau_star(distribution: Distribution, benefit: float, cost: float, *, held: bool = False) -> Solution:
    """The best time-to-live: ``benefit`` seconds are saved when the return comes within it, and each second of it
    costs ``cost`` seconds.

    With ``held`` only the seconds until the return cost: E[min(duration, tau)] in place of tau, which is what a
    pin that ends with the return really holds. Candidates are 0 and the distinct durations of the distribution,
    which is where the optimum of a step function lies; ties go to the smaller. An exponential has its optimum at
    mean * ln(benefit / (mean * cost)); with ``held`` it is all or nothing. O(candidates), for a curve that was asked
    before O(log candidates).
    """
    if not benefit > 0.0 or not math.isfinite(benefit):
        return NONE
    cost = cost if cost > 0.0 else 0.0
    if isinstance(distribution, Exponential):
        return _exponential(distribution, benefit, cost, held)
    curve = distribution if isinstance(distribution, Curve) else _curve(distribution)
    times, chances = curve.times, curve.values
    if not len(times):
        return NONE
    hull = curve.hull(held)
    if hull is not None:
        solution = Solution(*hull.best(benefit, cost))
        return solution if solution.gain > 0.0 else NONE
    seconds = curve.held() if held else times
    gains = chances * benefit - cost * seconds
    best = int(np.argmax(gains))  # the first of equals
    if not gains[best] > 0.0:
        return NONE
    return Solution(float(times[best]), float(chances[best]), float(gains[best]))


def _curve(distribution: Distribution) -> Curve:
    times = distribution.candidates()
    return Curve(times, np.array([distribution.cdf(t) for t in times]))


def _exponential(prior: Exponential, benefit: float, cost: float, held: bool) -> Solution:
    if cost * prior.mean >= benefit:
        return NONE
    # Without a cost that grows any time is worth it: the 0.9999 quantile stands for "for ever".
    rate = 1e-4 if held else max(cost * prior.mean / benefit, 1e-4)
    tau = -prior.mean * math.log(rate)
    chance = prior.cdf(tau)
    return Solution(tau, chance, chance * benefit - cost * (prior.mean * chance if held else tau))
