"""What the learned predictor sees of workflows' paths, as arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from agentflow.cache.pbkv.forecast import Hidden
from agentflow.cache.pbkv.graph_data import LIMIT, CallGraph

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
    """Arrays of some paths. Agents that the graph does not know are added to it as mere names, while there is room.

    A hidden state of another size than ``hidden_size`` counts as absent. ``chain`` is one made of the graph before;
    it is used where no path names a new agent.
    """
    numbers = [[graph.find(agent) for agent in path] for path in paths]
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
    _describe(out, numbers)
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


def _describe(out: Inputs, numbers: Sequence[Sequence[int]]) -> None:
    """Fill ``path``, ``runs``, ``context``, ``agents`` and ``allowed`` from the numbers of the paths' agents.

    The calls of all paths lie in one array, newest first: ``row`` says whose a call is, ``at`` how many came after it.
    """
    some = np.array([i for i, path in enumerate(numbers) if path], np.int64)
    if not len(some):
        return
    lengths = np.array([len(numbers[i]) for i in some], np.int64)
    called = np.array([agent for path in numbers for agent in reversed(path)], np.int64)
    ends = np.cumsum(lengths)
    begins = ends - lengths
    row = np.repeat(np.arange(len(some)), lengths)
    at = np.arange(len(called)) - begins[row]
    opens = (at == 0) | (called != np.roll(called, 1))
    stretch = np.cumsum(opens) - 1
    stretch -= stretch[begins][row]
    kept = at < LENGTH
    out.path[some[row[kept]], at[kept]] = called[kept]
    out.runs[some[row[kept]], at[kept]] = np.minimum(stretch[kept], RUNS - 1)

    current, oldest = called[begins], called[ends - 1]
    first = np.bincount(row[stretch == 0])
    before = np.where(first < lengths, called[np.minimum(begins + first, ends - 1)], -1)
    turns = np.bincount(row[opens & (called == current[row])])
    # Each agent of each path once, where it was called last; -1 are all that there was no room for.
    _, last, counts = np.unique(row * (LIMIT + 1) + called + 1, return_index=True, return_counts=True)
    distinct = np.bincount(row[last])
    out.context[some, :5] = _size(np.stack([lengths, first, stretch[ends - 1], turns - 1, distinct - 1], axis=1))
    out.context[some, 5] = 1.0 / lengths
    last, counts = last[called[last] >= 0], counts[called[last] >= 0]
    whose, agent = row[last], called[last]
    out.agents[some[whose], agent] = np.stack(
        [
            np.ones(len(last)),
            agent == current[whose],
            agent == before[whose],
            1.0 / (1.0 + at[last]),
            counts / lengths[whose],
            agent == oldest[whose],
        ],
        axis=1,
    )
    out.allowed[some[whose], agent] = True


class Chain:
    """What a Markov chain over the graph's transitions as they are now forecasts, worked out as it is asked for.

    ``rows`` gives, for states of the present (-1 is an unknown one), arrays (b, steps, n + 1) as in :class:`Inputs`.
    """

    def __init__(self, graph: CallGraph, steps: int) -> None:
        self._transitions = graph.transitions().astype(np.float32)
        self.agents = len(graph)
        self.version = graph.version
        self._found = np.empty((0, steps, self.agents + 1), np.float32)
        self._place = np.full(self.agents + 1, -1)  # of a state in what was found

    def rows(self, current: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        missing = np.unique(current[self._place[current] < 0])
        if len(missing):
            self._place[missing] = len(self._found) + np.arange(len(missing))
            self._found = np.concatenate([self._found, self._steps(missing)])
        found: npt.NDArray[np.float32] = self._found[self._place[current]]
        return found

    def _steps(self, current: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        n, steps = self.agents, self._found.shape[1]
        unknown = self._transitions[:n].mean(0) if n else self._transitions[n]
        out = np.empty((len(current), steps, n + 1), np.float32)
        out[:, 0] = np.where((current >= 0)[:, None], self._transitions[current], unknown)
        rows, transitions = torch.from_numpy(out), torch.from_numpy(self._transitions)
        for k in range(1, steps):
            rows[:, k] = rows[:, k - 1] @ transitions  # NumPy's product would take all cores
        survives = np.maximum(out[:, :, :n].sum(2), 1e-9)
        alive = np.concatenate([np.ones((len(current), 1), np.float32), survives[:, :-1]], axis=1)
        hazard = np.clip(1.0 - survives / alive, 1e-6, 1.0 - 1e-6)
        out[:, :, :n] /= survives[:, :, None]
        out[:, :, :n] = np.log(np.maximum(out[:, :, :n], 1e-9))
        out[:, :, n] = np.log(hazard / (1.0 - hazard))
        return out


def _size(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Counts on the scale of the other inputs: 1 for 63."""
    return np.log1p(counts) / math.log(64.0)
