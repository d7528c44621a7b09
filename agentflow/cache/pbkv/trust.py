"""How far a predictor is believed, learned from how well it forecast."""

from __future__ import annotations

import math
from collections.abc import Iterable

from agentflow.cache.pbkv.forecast import END, Steps

__all__ = ["Trust"]

#: Probabilities below this share of chance count as this share of it, which bounds what one step can cost.
FLOOR = 0.05


class Trust:
    """The posterior weight of a predictor against one that calls all agents equally likely.

    Both are charged the log-loss of each step that came about; the charges fade with ``memory`` steps. A useless
    predictor loses its weight within tens of steps, so that decisions fall back to lifecycle and recency, and a good
    one gets it back. The charge of one step is bounded, so that no single surprise decides.
    """

    def __init__(self, memory: float = 200.0) -> None:
        self._decay = 1.0 - 1.0 / memory
        self._advantage = 0.0

    @property
    def weight(self) -> float:
        """Between 0 (not believed) and 1."""
        return 1.0 / (1.0 + math.exp(-max(-50.0, min(50.0, self._advantage))))

    def learn(self, predicted: float, choices: int) -> None:
        """What came had been forecast with probability ``predicted``, by chance it was one of ``choices``."""
        gain = math.log(max(FLOOR, predicted * max(1, choices)))
        self._advantage = self._decay * self._advantage + gain

    def blend(self, steps: Steps, agents: Iterable[str]) -> Steps:
        """The forecast mixed with the even one over ``agents`` and the end, by weight."""
        weight = self.weight
        names = [*agents, END]
        even = dict.fromkeys(names, (1.0 - weight) / len(names))
        return tuple(even | {n: weight * p + even.get(n, 0.0) for n, p in step.items()} for step in steps)
