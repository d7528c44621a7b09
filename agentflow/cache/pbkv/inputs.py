"""What the learned predictor sees of workflows' paths, as arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from agentflow.cache.pbkv.forecast import Hidden
from agentflow.cache.pbkv.graph_data import CallGraph

__all__ = ["CONTEXT", "LENGTH", "PER_AGENT", "RUNS", "Chain", "Inputs", "build"]

#: Calls of a path, the newest, that are attended to.
LENGTH = 32
#: Stretches of calls by one agent that are told apart, counted from the newest.
RUNS = 8
#: Numbers that describe the path as a whole.
CONTEXT = 6
#: Numbers that describe an agent's part in the path.
PER_AGENT = 6


@dataclass(slots=True)
class Inputs:
    """``b`` paths over ``n`` agents; the newest call of a path is at index 0, absent ones are -1.

    ``markov`` (b, steps, n + 1) are the log-probabilities of a Markov chain, of agents given that there is a next
    call and, last, the log-odds of the end. ``allowed`` (b, n) says which agents can be forecast at all.
    """

    path: npt.NDArray[np.int64]
    runs: npt.NDArray[np.int64]
    context: npt.NDArray[np.float32]
    agents: npt.NDArray[np.float32]
    markov: npt.NDArray[np.float32]
    allowed: npt.NDArray[np.bool_]
    hidden: npt.NDArray[np.float32]
    has_hidden: npt.NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.path)

    def take(self, rows: npt.NDArray[np.int64]) -> Inputs:
        """Some of the paths."""
        return Inputs(*(getattr(self, name)[rows] for name in self.__slots__))


def build(
    graph: CallGraph,
    paths: Sequence[Sequence[str]],
    steps: int,
    *,
    hidden: Sequence[Hidden | None] = (),
    hidden_size: int = 0,
    chain: Chain | None = None,
) -> Inputs:
    """Arrays of some paths. Agents that the graph does not know are added to it as mere names.

    A hidden state of another size than ``hidden_size`` counts as absent. ``chain`` is one made of the graph before;
    it is used where no path names a new agent.
    """
    numbers = [[graph.number(agent) for agent in path] for path in paths]
    b, n = len(paths), len(graph)
    out = Inputs(
        path=np.full((b, LENGTH), -1, np.int64),
        runs=np.zeros((b, LENGTH), np.int64),
        context=np.zeros((b, CONTEXT), np.float32),
        agents=np.zeros((b, n, PER_AGENT), np.float32),
        markov=np.empty((0,), np.float32),
        allowed=np.broadcast_to(graph.known, (b, n)).copy(),
        hidden=np.zeros((b, hidden_size), np.float32),
        has_hidden=np.zeros((b, 1), np.float32),
    )
    for i, path in enumerate(numbers):
        _one(out, i, path)
    if chain is None or chain.agents != n:
        chain = Chain(graph, steps)
    current = np.array([path[-1] if path else -1 for path in numbers], np.int64)
    out.markov = chain.rows(current)
    for i, vector in enumerate(hidden):
        if vector is not None and hidden_size and vector.shape == (hidden_size,) and np.isfinite(vector).all():
            norm = float(np.linalg.norm(vector))
            out.hidden[i] = vector * (math.sqrt(hidden_size) / norm) if norm else vector
            out.has_hidden[i] = 1.0
    return out


def _one(out: Inputs, i: int, path: Sequence[int]) -> None:
    if not path:
        return
    newest = path[::-1]
    stretches: list[int] = []
    stretch = 0
    for at, agent in enumerate(newest):
        if at and agent != newest[at - 1]:
            stretch += 1
        stretches.append(stretch)
    kept = min(len(path), LENGTH)
    out.path[i, :kept] = newest[:kept]
    out.runs[i, :kept] = np.minimum(stretches[:kept], RUNS - 1)
    first = stretches.count(0)
    counts: dict[int, int] = {}
    last: dict[int, int] = {}
    for at, agent in enumerate(newest):
        counts[agent] = counts.get(agent, 0) + 1
        last.setdefault(agent, at)
    turns = sum(1 for at in range(len(newest)) if newest[at] == newest[0] and (not at or newest[at - 1] != newest[0]))
    out.context[i] = (
        _size(len(path)),
        _size(first),
        _size(stretch),
        _size(turns - 1),
        _size(len(counts) - 1),
        1.0 / len(path),
    )
    before = newest[first] if first < len(newest) else -1
    for agent, count in counts.items():
        if agent >= 0:
            out.agents[i, agent] = (
                1.0,
                1.0 if agent == newest[0] else 0.0,
                1.0 if agent == before else 0.0,
                1.0 / (1.0 + last[agent]),
                count / len(path),
                1.0 if agent == path[0] else 0.0,
            )
            out.allowed[i, agent] = True


class Chain:
    """What a Markov chain over the graph's transitions as they are now forecasts, worked out as it is asked for.

    ``rows`` gives, for states of the present (-1 is an unknown one), arrays (b, steps, n + 1) as in :class:`Inputs`.
    """

    def __init__(self, graph: CallGraph, steps: int) -> None:
        self._transitions = graph.transitions().astype(np.float32)
        self.agents = len(graph)
        self._found = np.empty((self.agents + 1, steps, self.agents + 1), np.float32)
        self._known = np.zeros(self.agents + 1, bool)

    def rows(self, current: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        missing = np.unique(current[~self._known[current]])
        if len(missing):
            self._found[missing] = self._steps(missing)
            self._known[missing] = True
        return self._found[current]

    def _steps(self, current: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        n, steps = self.agents, self._found.shape[1]
        unknown = self._transitions[:n].mean(0) if n else self._transitions[n]
        rows = np.where((current >= 0)[:, None], self._transitions[current], unknown)
        out = np.empty((len(current), steps, n + 1), np.float32)
        alive = np.ones((len(current), 1), np.float32)
        for k in range(steps):
            survives = np.maximum(rows[:, :n].sum(1, keepdims=True), 1e-9)
            hazard = np.clip(1.0 - survives / alive, 1e-6, 1.0 - 1e-6)
            out[:, k, :n] = np.log(np.maximum(rows[:, :n] / survives, 1e-9))
            out[:, k, n] = np.log(hazard / (1.0 - hazard))[:, 0]
            alive = survives
            rows = rows @ self._transitions
        return out


def _size(count: int) -> float:
    """A count on the scale of the other inputs: 1 for 63."""
    return math.log1p(count) / math.log(64.0)
