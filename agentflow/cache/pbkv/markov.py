"""First-order Markov chain over agents, learned online, with the graph's own edges as prior."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from agentflow.cache.pbkv.forecast import END, Hidden, Steps

__all__ = ["Markov"]


class Markov:
    """Transition counts in a sliding window of ``window`` transitions; K steps by K products with the matrix.

    ``edges`` (agent -> agents that may follow; a workflow may end after an agent that has none, or whose edges
    name ``""``) count ``prior`` pseudo-transitions per agent, spread evenly. An agent never seen forecasts the
    mixture of all agents, weighted by how often they follow anything, and the mean chance to end. ``limit`` bounds
    the agents known. ``learn`` costs O(1), ``forecast`` O(horizon * agents) with the rows cached.
    """

    name: ClassVar[str] = "markov"

    def __init__(
        self,
        *,
        edges: Mapping[str, Sequence[str]] | None = None,
        prior: float = 1.0,
        window: int = 20_000,
        limit: int = 256,
    ) -> None:
        self._limit = limit
        self._index: dict[str, int] = {END: 0}
        self._names = [END]
        self._counts = np.zeros((8, 8))
        self._recent: deque[tuple[int, int]] = deque(maxlen=window)
        self._matrix: npt.NDArray[np.float64] | None = None
        self._prior = prior
        for agent, following in (edges or {}).items():
            self.prior(agent, following)

    def prior(self, agent: str, following: Sequence[str]) -> None:
        """The graph lets ``following`` come after ``agent``; nothing, or END, is the end."""
        targets = list(following) or [END]
        for target in targets:
            a, b = self._number(agent), self._number(target)
            if a is not None and b is not None:
                self._counts[a, b] += self._prior / len(targets)
        self._matrix = None

    def start_from(self, names: Sequence[str], flow: Sequence[tuple[int, int, float]]) -> None:
        """Add transitions counted elsewhere, as :meth:`CallGraph.flow` gives them; they do not leave the window."""
        for source, target, count in flow:
            a = self._number(names[source])
            b = self._number(names[target]) if target < len(names) else 0
            if a is not None and b is not None:
                self._counts[a, b] += count
        self._matrix = None

    def sized(self, agent: str, prompt: int, output: int) -> None:
        """Lengths tell it nothing."""

    def learn(self, path: Sequence[str], following: str) -> None:
        if not path:
            return
        a, b = self._number(path[-1]), self._number(following)
        if a is None or b is None or a == 0:
            return
        if len(self._recent) == self._recent.maxlen:
            old = self._recent.popleft()
            self._counts[old] = max(0.0, self._counts[old] - 1.0)
        self._recent.append((a, b))
        self._counts[a, b] += 1.0
        self._matrix = None

    def forecast(self, path: Sequence[str], horizon: int, *, workflow: str = "", hidden: Hidden | None = None) -> Steps:
        n = len(self._names)
        if n == 1:
            return ({END: 1.0},) * horizon
        matrix = self._transitions()
        current = self._index.get(path[-1]) if path else None
        row = matrix[current] if current is not None else self._unknown()
        steps = []
        for _ in range(horizon):
            steps.append({self._names[i]: float(p) for i, p in enumerate(row) if p > 1e-6})
            row = row @ matrix
        return tuple(_normal(s) for s in steps)

    def _transitions(self) -> npt.NDArray[np.float64]:
        if self._matrix is None:
            n = len(self._names)
            counts = self._counts[:n, :n]
            totals = counts.sum(axis=1, keepdims=True)
            unknown = self._unknown()
            matrix = np.where(totals > 0, counts / np.maximum(totals, 1e-12), unknown)
            matrix[0] = 0.0
            matrix[0, 0] = 1.0
            self._matrix = matrix
        return self._matrix

    def _unknown(self) -> npt.NDArray[np.float64]:
        """What follows an agent of which nothing is known."""
        n = len(self._names)
        column = self._counts[:n, :n].sum(axis=0)
        total = column.sum()
        result: npt.NDArray[np.float64] = column / total if total > 0 else np.full(n, 1.0 / n)
        return result

    def _number(self, agent: str) -> int | None:
        number = self._index.get(agent)
        if number is None and len(self._names) < self._limit:
            number = self._index[agent] = len(self._names)
            self._names.append(agent)
            self._matrix = None
            if number >= len(self._counts):
                grown = np.zeros((2 * len(self._counts),) * 2)
                grown[: len(self._counts), : len(self._counts)] = self._counts
                self._counts = grown
        return number


def _normal(step: dict[str, float]) -> dict[str, float]:
    total = sum(step.values())
    return {a: p / total for a, p in step.items()}
