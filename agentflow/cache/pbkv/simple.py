"""Predictors at both ends: one that knows nothing, and one that is told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import ClassVar

from agentflow.cache.pbkv.forecast import END, Hidden, Steps
from agentflow.cache.pbkv.names import AGENTS, Names, whole

__all__ = ["Oracle", "Uniform"]


class Uniform:
    """The end and all agents seen so far (``limit`` at most) are equally likely at every step (once over, over)."""

    name: ClassVar[str] = "uniform"

    def __init__(self, *, limit: int = AGENTS) -> None:
        self._agents = Names(whole("limit", limit, 1))

    def learn(self, path: Sequence[str], following: str) -> None:
        if following != END:
            self._agents.see(following)

    def prior(self, agent: str, following: Sequence[str]) -> None:
        """It counts agents only when they come."""

    def sized(self, agent: str, prompt: int, output: int) -> None:
        """Lengths tell it nothing."""

    def forecast(self, path: Sequence[str], horizon: int, *, workflow: str = "", hidden: Hidden | None = None) -> Steps:
        n = len(self._agents) + 1
        steps = []
        alive = 1.0
        for _ in range(horizon):
            step = dict.fromkeys(self._agents, alive / n)
            alive *= (n - 1) / n
            step[END] = 1.0 - sum(step.values())
            steps.append(step)
        return tuple(steps)


class Oracle:
    """Is told what comes. ``future(workflow, calls so far)`` gives the agents that follow; after the last the
    workflow is over. A replay or simulation of a trace knows them; a live engine does not."""

    name: ClassVar[str] = "oracle"

    def __init__(self, *, future: Callable[[str, int], Sequence[str]]) -> None:
        self._future = future
        self._calls: Counter[str] = Counter()

    def learn(self, path: Sequence[str], following: str) -> None:
        """Nothing to learn."""

    def prior(self, agent: str, following: Sequence[str]) -> None:
        """Nothing to learn."""

    def sized(self, agent: str, prompt: int, output: int) -> None:
        """Nothing to learn."""

    def forecast(self, path: Sequence[str], horizon: int, *, workflow: str = "", hidden: Hidden | None = None) -> Steps:
        self._calls[workflow] += 1  # one forecast is made for each call
        following = list(self._future(workflow, self._calls[workflow]))[:horizon]
        return tuple({a: 1.0} for a in following + [END] * (horizon - len(following)))
