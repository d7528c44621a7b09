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
from agentflow.cache.pbkv.inputs import build
from agentflow.cache.pbkv.sage import Network, forecast, network_arrays
from agentflow.cache.pbkv.training import Trained, refresh

__all__ = ["Forecaster"]

#: Agents named in a step's forecast at most; the likeliest are.
KEPT = 24
#: Transitions after which embeddings are made anew although the graph's edges are the same.
STALE = 512
#: Runs remembered for a refresh.
RECENT = 500


class Forecaster:
    """One owner, one thread."""

    def __init__(self, trained: Trained) -> None:
        self.network: Network = trained.network
        self.graph = copy.deepcopy(trained.graph)
        self.recent: deque[Run] = deque(maxlen=RECENT)
        self._version = -1
        self._learned = 0
        self._embedded: torch.Tensor | None = None
        self._transitions: npt.NDArray[np.float64] | None = None

    @property
    def hidden_size(self) -> int:
        """Size of the hidden states that it uses; 0 when it uses none."""
        shape = self.network.shape
        return shape.hidden if shape.use_text else 0

    def learn(self, path: Sequence[str], following: str) -> None:
        """One transition; at a workflow's end its path is remembered for a refresh."""
        self.graph.learn(path, following)
        self._learned += 1
        self._transitions = None
        if following == END and path:
            self.recent.append(Run(tuple(path)))

    def forecast_many(
        self,
        paths: Sequence[Sequence[str]],
        horizon: int,
        *,
        hidden: Sequence[Hidden | None] = (),
        kept: int | None = KEPT,
    ) -> list[Steps]:
        """Steps of each path, in one pass. Beyond the steps it was trained for, the last is repeated."""
        if not paths:
            return []
        inputs = build(
            self.graph,
            paths,
            self.network.shape.steps,
            hidden=hidden,
            hidden_size=self.network.shape.hidden,
            transitions=self._transitions,
        )
        if self._transitions is None:
            self._transitions = self.graph.transitions()
        if self._embedded is None or self._version != self.graph.version or self._learned > STALE:
            with torch.inference_mode():
                self._embedded = self.network.embed(*network_arrays(self.graph))
            self._version, self._learned = self.graph.version, 0
        found = forecast(self.network, self._embedded, inputs)
        return self._named(found[:, :horizon], horizon, kept)

    def refresher(self) -> Callable[[], Network]:
        """What makes a network trained a little on the recent runs. It takes seconds, and may run in any thread."""
        network, graph, runs = self.network, copy.deepcopy(self.graph), list(self.recent)
        return lambda: refresh(network, graph, runs)

    def use(self, network: Network) -> None:
        """Go on with another network of the same shape."""
        self.network = network
        self._embedded = None

    def _named(self, found: npt.NDArray[np.float32], horizon: int, kept: int | None) -> list[Steps]:
        names = [*self.graph.names, END]
        n = len(self.graph)
        agents = found[:, :, :n]
        if kept is not None and n > kept:
            places = np.argpartition(agents, n - kept, axis=2)[:, :, n - kept :]
            values = np.take_along_axis(agents, places, axis=2)
            # What the others had goes to those that are named, so that the end keeps its probability.
            lost = np.maximum(values.sum(2, keepdims=True), 1e-9)
            values = values * (agents.sum(2, keepdims=True) / lost)
        else:
            places = np.broadcast_to(np.arange(n), agents.shape)
            values = agents
        ends = found[:, :, n].tolist()
        out: list[Steps] = []
        for row, chances, over in zip(places.tolist(), values.tolist(), ends, strict=True):
            steps = []
            for which, probabilities, end in zip(row, chances, over, strict=True):
                step = {names[i]: p for i, p in zip(which, probabilities, strict=True) if p > 1e-6}
                step[END] = end if step else 1.0
                steps.append(step)
            steps += steps[-1:] * (horizon - len(steps))
            out.append(tuple(steps))
        return out
