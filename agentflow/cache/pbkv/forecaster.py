"""A trained network in use: forecasts of many workflows at once, over a call graph that goes on learning."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from agentflow.cache.pbkv.forecast import END, Hidden, Steps
from agentflow.cache.pbkv.graph_data import Run
from agentflow.cache.pbkv.inputs import Chain, build
from agentflow.cache.pbkv.sage import Network, forecast, network_arrays
from agentflow.cache.pbkv.training import Trained, refresh

__all__ = ["Forecaster"]

#: Agents less likely than this are not named in a step's forecast, unless none is likelier.
NAMED = 0.01
#: Transitions after which the Markov chain is made anew although the graph's edges are the same.
CHAIN = 32
#: Transitions after which embeddings are made anew: where there are new edges, and where the edges are the same. A new
#: agent is embedded at once.
FRESH, STALE = 32, 512
#: Runs remembered for a refresh.
RECENT = 500


class Forecaster:
    """One owner, one thread."""

    def __init__(self, trained: Trained) -> None:
        self.network: Network = trained.network
        self.graph = copy.deepcopy(trained.graph)
        self.recent: deque[Run] = deque(maxlen=RECENT)
        self._version = self._given = -1
        self._learned = 0
        self._embedded: torch.Tensor | None = None
        self._chain: Chain | None = None
        self._chained = 0

    @property
    def hidden_size(self) -> int:
        """Size of the hidden states that it uses; 0 when it uses none."""
        shape = self.network.shape
        return shape.hidden if shape.use_text else 0

    def learn(self, path: Sequence[str], following: str) -> None:
        """One transition; at a workflow's end its path is remembered for a refresh."""
        self.graph.learn(path, following)
        self._learned += 1
        self._chained += 1
        if following == END and path:
            self.recent.append(Run(tuple(path)))

    def prior(self, agent: str, following: Sequence[str]) -> None:
        """Edges of a static graph; the next forecast knows them."""
        before = self.graph.version
        self.graph.prior(agent, following)
        if self.graph.version != before:
            self._embedded = None

    def forecast_many(
        self,
        paths: Sequence[Sequence[str]],
        horizon: int,
        *,
        hidden: Sequence[Hidden | None] = (),
        named: float = NAMED,
    ) -> list[Steps]:
        """Steps of each path, in one pass; none where the network's answer is no distribution. Beyond the steps it was
        trained for, the last is repeated."""
        if not paths:
            return []
        for path in paths:
            if path:
                self.graph.number(path[-1])
        for path in paths:
            for agent in path:
                self.graph.find(agent)
        if self._chain is None or self._chain.version != self.graph.version or self._chained >= CHAIN:
            self._chain, self._chained = Chain(self.graph, self.network.shape.steps), 0
        inputs = build(
            self.graph,
            paths,
            self.network.shape.steps,
            hidden=hidden,
            hidden_size=self.network.shape.hidden,
            chain=self._chain,
        )
        found = forecast(self.network, self._embeddings(), inputs)
        sound = (np.abs(found.sum(2) - 1.0) < 1e-3).all(1) & (found.min((1, 2)) >= 0.0)  # NaN is neither
        steps = _named(np.where(sound[:, None, None], found, 0.0)[:, :horizon], self.graph.names, horizon, named)
        return [s if fine else () for s, fine in zip(steps, sound.tolist(), strict=True)]

    def _embeddings(self) -> torch.Tensor:
        """Embeddings (agents, width) of the graph as it is, or as it was a few transitions ago."""
        found = self._embedded
        due = FRESH if self._version != self.graph.version else STALE
        if found is None or self._given != self.graph.agents.given or self._learned >= due:
            with torch.inference_mode():
                found = self._embedded = self.network.embed(*network_arrays(self.graph))
            self._version, self._given, self._learned = self.graph.version, self.graph.agents.given, 0
        return found

    def refresher(self) -> Callable[[], Network]:
        """What makes a network trained a little on the recent runs. It takes seconds, and may run in any thread."""
        network, graph, runs = self.network, copy.deepcopy(self.graph), list(self.recent)
        return lambda: refresh(network, graph, runs)

    def use(self, network: Network) -> None:
        """Go on with another network of the same shape."""
        self.network = network
        self._embedded = None


def _named(found: npt.NDArray[np.float32], agents: Sequence[str], horizon: int, least: float) -> list[Steps]:
    """Arrays (b, steps, agents + 1) as steps. What the unnamed had goes to the named, so that the end keeps its
    probability."""
    n = len(agents)
    if not n:
        return [({END: 1.0},) * horizon for _ in found]
    k = found.shape[1]
    chances = found[:, :, :n].reshape(-1, n)
    named = np.flatnonzero(chances >= np.minimum(least, chances.max(1, keepdims=True)))
    row, values = named // n, chances.ravel()[named]
    held = np.bincount(row, values, minlength=len(chances))
    values *= (chances.sum(1) / np.maximum(held, 1e-9))[row]
    names, flat = [agents[i] for i in (named % n).tolist()], values.tolist()
    stops = np.cumsum(np.bincount(row, minlength=len(chances))).tolist()
    ends = found[:, :, n].ravel().tolist()
    steps: list[dict[str, float]] = []
    start = 0
    for stop, end in zip(stops, ends, strict=True):
        step = dict(zip(names[start:stop], flat[start:stop], strict=True))
        step[END] = end
        steps.append(step)
        start = stop
    return [tuple(steps[i : i + k] + steps[i + k - 1 : i + k] * (horizon - k)) for i in range(0, len(steps), k)]
