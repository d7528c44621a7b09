"""First-order Markov chain over agents, learned online, with the graph's own edges as prior."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from agentflow.cache.pbkv.forecast import END, Hidden, Steps
from agentflow.cache.pbkv.names import AGENTS, Names, whole
from agentflow.errors import UsageError

__all__ = ["Markov"]


class Markov:
    """Transition counts in a sliding window of ``window`` transitions; K steps by K products with the matrix.

    ``edges`` (agent -> agents that may follow; a workflow may end after an agent that has none, or whose edges
    name ``""``) count ``prior`` pseudo-transitions per agent, spread evenly. An agent never seen forecasts the
    mixture of all agents, weighted by how often they follow anything, and the mean chance to end. At most
    ``limit`` agents are known; for a new one that unseen for longest is forgotten. ``learn`` costs O(1), O(agents) for
    a new agent, ``forecast`` O(horizon * agents) with the rows cached.
    """

    name: ClassVar[str] = "markov"

    def __init__(
        self,
        *,
        edges: Mapping[str, Sequence[str]] | None = None,
        prior: float = 1.0,
        window: int = 20_000,
        limit: int = AGENTS,
    ) -> None:
        if type(prior) not in (int, float) or not 0.0 <= prior < math.inf:
            raise UsageError(f"prior must be a number of at least 0, not {prior!r}")
        # State 0 is the end, the others are the agents.
        self._agents = Names(whole("limit", limit, 2))
        self._counts = np.zeros((8, 8))
        self._recent: deque[tuple[int, int]] = deque(maxlen=whole("window", window, 1))
        #: Transitions learned so far, and how many it were when each state was given to its agent.
        self._learned = 0
        self._since = [0]
        self._matrix: npt.NDArray[np.float64] | None = None
        self._prior = prior
        for agent, following in (edges or {}).items():
            self.prior(agent, following)

    def prior(self, agent: str, following: Sequence[str]) -> None:
        """The graph lets ``following`` come after ``agent``; nothing, or END, is the end."""
        targets = list(following) or [END]
        for target in targets:
            a, b = self._state(agent), self._state(target)
            self._counts[a, b] += self._prior / len(targets)
        self._matrix = None

    def start_from(self, names: Sequence[str], flow: Sequence[tuple[int, int, float]]) -> None:
        """Add transitions counted elsewhere, as :meth:`CallGraph.flow` gives them; they do not leave the window. Agents
        for which there is no room are left out."""
        states = [self._state(n) if self._agents.room or n in self._agents else None for n in names]
        for source, target, count in flow:
            a, b = states[source], states[target] if target < len(names) else 0
            if a is not None and b is not None:
                self._counts[a, b] += count
        self._matrix = None

    def sized(self, agent: str, prompt: int, output: int) -> None:
        """Lengths tell it nothing."""

    def learn(self, path: Sequence[str], following: str) -> None:
        if not path:
            return
        a, b = self._state(path[-1]), self._state(following)
        if a == 0:
            return
        if len(self._recent) == self._recent.maxlen:
            learned = self._learned - len(self._recent)
            old = self._recent.popleft()
            if learned >= max(self._since[old[0]], self._since[old[1]]):  # else it was forgotten with its agent
                self._counts[old] = max(0.0, self._counts[old] - 1.0)
        self._recent.append((a, b))
        self._learned += 1
        self._counts[a, b] += 1.0
        self._matrix = None

    def forecast(self, path: Sequence[str], horizon: int, *, workflow: str = "", hidden: Hidden | None = None) -> Steps:
        if not self._agents:
            return ({END: 1.0},) * horizon
        matrix = self._transitions()
        names = [END, *self._agents]
        current = self._agents.find(path[-1]) if path else None
        row = matrix[current + 1] if current is not None else self._unknown()
        steps = []
        for _ in range(horizon):
            steps.append({names[i]: float(p) for i, p in enumerate(row) if p > 1e-6})
            row = row @ matrix
        return tuple(_normal(s) for s in steps)

    def _transitions(self) -> npt.NDArray[np.float64]:
        if self._matrix is None:
            n = len(self._agents) + 1
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
        n = len(self._agents) + 1
        column = self._counts[:n, :n].sum(axis=0)
        total = column.sum()
        result: npt.NDArray[np.float64] = column / total if total > 0 else np.full(n, 1.0 / n)
        return result

    def _state(self, agent: str) -> int:
        if agent == END:
            return 0
        number, new = self._agents.see(agent)
        state = number + 1
        if new:
            self._matrix = None
            if state == len(self._since):
                self._since.append(0)
            self._since[state] = self._learned
            if state >= len(self._counts):
                grown = np.zeros((2 * len(self._counts),) * 2)
                grown[: len(self._counts), : len(self._counts)] = self._counts
                self._counts = grown
            self._counts[state] = self._counts[:, state] = 0.0
        return state


def _normal(step: dict[str, float]) -> dict[str, float]:
    total = sum(step.values())
    return {a: p / total for a, p in step.items()}
