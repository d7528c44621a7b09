"""Training of the learned predictor from runs: which agents were called, one after the other.

Runs are told apart into folds. A fold is learned with the call graph and the Markov chain of the other folds, so
that the network sees its training runs as it will see new ones: with agents and transitions that the graph does
not hold. Runs set aside decide when to stop and how to calibrate.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agentflow.cache.pbkv.calibration import expected_calibration_error
from agentflow.cache.pbkv.forecast import END, Hidden
from agentflow.cache.pbkv.graph_data import CallGraph, Run
from agentflow.cache.pbkv.inputs import Inputs, build
from agentflow.cache.pbkv.sage import Network, Shape, network_arrays, tensors_of
from agentflow.errors import UsageError

__all__ = ["Settings", "Trained", "refresh", "train"]

#: Longest part of a path that is looked at, as in the policy.
PATH = 64
#: Positions learned from at most; of more, some are drawn.
POSITIONS = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How to train. ``validation`` is the share of runs set aside; training stops when they were forecast no better
    for ``patience`` epochs. ``geometric`` trains torch-geometric's layers, otherwise the same ones in plain torch."""

    shape: Shape = field(default_factory=lambda: Shape(dropout=0.3))
    epochs: int = 60
    patience: int = 10
    rate: float = 1.5e-3
    decay: float = 0.1
    folds: int = 6
    batch: int = 256
    validation: float = 0.2
    seed: int = 0
    geometric: bool = True

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.patience < 1 or self.folds < 2 or not 0.0 < self.validation < 1.0:
            raise UsageError("epochs and patience must be at least 1, folds 2, validation between 0 and 1")


class Trained(NamedTuple):
    """A network, the call graph of all runs, and what the training came to (of the runs set aside, calibrated)."""

    network: Network
    graph: CallGraph
    report: Mapping[str, float]


class _Set(NamedTuple):
    """Positions of some runs: tensors, what came (b, steps), and the graph that they are seen with."""

    given: dict[str, Tensor]
    came: Tensor
    arrays: tuple[Tensor, Tensor, Tensor]


def train(
    runs: Sequence[Run],
    settings: Settings | None = None,
    *,
    edges: Mapping[str, Sequence[str]] | None = None,
    instructions: Mapping[str, str] | None = None,
) -> Trained:
    """Train on runs. ``edges`` is the static graph, where there is one; ``instructions`` are by agent.

    Raises :class:`~agentflow.errors.UsageError` for fewer than 10 runs. The same seed gives the same network.
    """
    settings = settings or Settings()
    usable = [r for r in runs if r.agents]
    if len(usable) < 10:
        raise UsageError(f"{len(usable)} runs are too few to train a predictor on; at least 10 are needed")
    rng = random.Random(settings.seed)
    rng.shuffle(usable)
    aside = max(2, round(settings.validation * len(usable)))
    kept, held_out = usable[aside:], usable[:aside]

    def graph_of(some: Sequence[Run]) -> CallGraph:
        return _graph(some, edges or {}, instructions or {})

    folds = [kept[i :: settings.folds] for i in range(settings.folds)]
    share = min(1.0, POSITIONS / max(1, sum(len(r.agents) for r in kept)))
    train_sets = []
    for i, fold in enumerate(folds):
        others = [r for j, other in enumerate(folds) if j != i for r in other]
        if fold and others:
            train_sets.append(_positions(graph_of(others), fold, settings.shape, rng, share))
    check = _positions(graph_of(kept), held_out, settings.shape, rng, 1.0)
    learning = Network(settings.shape, geometric=settings.geometric, seed=settings.seed)
    epochs = _fit(learning, train_sets, check, settings, rng)
    network = Network(settings.shape)
    network.load_state_dict(learning.state_dict())
    network.eval()
    _calibrate(network, check)
    graph = graph_of(usable)
    return Trained(network, graph, {"epochs": float(epochs), "runs": float(len(usable)), **_report(network, check)})


def refresh(network: Network, graph: CallGraph, runs: Sequence[Run], *, epochs: int = 2, rate: float = 5e-4) -> Network:
    """A copy of the network, trained a little on recent runs. ``graph`` holds them already and is not changed:
    their part is taken out of a copy while they are learned. The same arguments give the same network."""
    past = copy.deepcopy(graph)
    for run in runs:
        past.learn_run(run.agents, -1.0)
    settings = Settings(shape=network.shape, epochs=epochs, rate=rate)
    learned = copy.deepcopy(network)
    learned.generator.manual_seed(len(runs))
    rng = random.Random(len(runs))
    share = min(1.0, POSITIONS / 10 / max(1, sum(len(r.agents) for r in runs)))
    positions = _positions(past, runs, network.shape, rng, share)
    optimizer = _optimizer(learned, settings)
    for _ in range(epochs):
        _epoch(learned, [positions], optimizer, settings, rng)
    learned.eval()
    return learned


def _graph(runs: Sequence[Run], edges: Mapping[str, Sequence[str]], instructions: Mapping[str, str]) -> CallGraph:
    graph = CallGraph()
    for run in runs:
        graph.learn_run(run.agents)
        for agent, (prompt, output) in zip(run.agents, run.sizes, strict=False):
            graph.sized(agent, prompt, output)
    for agent, following in edges.items():
        graph.prior(agent, following, displace=False)
    for agent, text in instructions.items():
        if agent in graph.agents:
            graph.describe(agent, text)
    return graph


def _positions(graph: CallGraph, runs: Sequence[Run], shape: Shape, rng: random.Random, share: float) -> _Set:
    """Every position of the runs (or a share of them), seen with the graph, which does not learn from them."""
    paths: list[Sequence[str]] = []
    hidden: list[Hidden | None] = []
    following: list[list[str]] = []
    for run in runs:
        for at in range(1, len(run.agents) + 1):
            if share < 1.0 and rng.random() > share:
                continue
            paths.append(run.agents[max(0, at - PATH) : at])
            hidden.append(run.hidden[at - 1] if at <= len(run.hidden) else None)
            after = list(run.agents[at : at + shape.steps])
            following.append(after + [END] * (shape.steps - len(after)))
    inputs: Inputs = build(graph, paths, shape.steps, hidden=hidden, hidden_size=shape.hidden)
    n = len(graph)
    came = np.array([[n if a == END else graph.find(a, add=False) for a in row] for row in following], np.int64)
    return _Set(tensors_of(inputs), torch.from_numpy(came.reshape(-1, shape.steps)), network_arrays(graph))


def _loss(network: Network, embedded: Tensor, given: dict[str, Tensor], came: Tensor) -> Tensor:
    """Log-loss by position and step; an agent that nobody could have named costs nothing but that it was no end."""
    agents, ends = network(embedded, given)
    n = agents.shape[-1]
    alive = torch.cumsum(torch.nn.functional.logsigmoid(-ends), dim=1)
    over = torch.log(-torch.expm1(alive.clamp(max=-1e-6)))
    chosen = agents.gather(2, came.clamp(0, n - 1)[:, :, None])[:, :, 0]
    nameable = (came >= 0) & (came < n) & (chosen > -1e8)
    return -torch.where(came == n, over, alive + torch.where(nameable, chosen, torch.zeros_like(chosen)))


def _optimizer(network: Network, settings: Settings) -> torch.optim.Optimizer:
    learned = [p for p in network.parameters() if p.requires_grad]
    return torch.optim.AdamW(learned, lr=settings.rate, weight_decay=settings.decay)


def _epoch(
    network: Network, sets: Sequence[_Set], optimizer: torch.optim.Optimizer, settings: Settings, rng: random.Random
) -> None:
    network.train()
    batches = []
    for s in sets:
        rows = list(range(len(s.came)))
        rng.shuffle(rows)
        size = max(32, settings.batch)
        batches += [(s, torch.tensor(rows[i : i + size])) for i in range(0, len(rows), size)]
    rng.shuffle(batches)
    for s, rows_now in batches:
        optimizer.zero_grad()
        embedded = network.embed(*s.arrays)
        loss = _loss(network, embedded, {k: v[rows_now] for k, v in s.given.items()}, s.came[rows_now]).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()


def _fit(network: Network, sets: Sequence[_Set], check: _Set, settings: Settings, rng: random.Random) -> int:
    """Train the network, go back to when it forecast the runs set aside best, and return that epoch.

    Epoch 0 is the Markov chain.
    """
    optimizer = _optimizer(network, settings)
    best, best_loss, best_epoch = copy.deepcopy(network.state_dict()), _checked_loss(network, check), 0
    for epoch in range(1, settings.epochs + 1):
        _epoch(network, sets, optimizer, settings, rng)
        loss = _checked_loss(network, check)
        if loss < best_loss - 1e-4:
            best, best_loss, best_epoch = copy.deepcopy(network.state_dict()), loss, epoch
        elif epoch - best_epoch >= settings.patience:
            break
    network.load_state_dict(best)
    return best_epoch


def _checked_loss(network: Network, check: _Set) -> float:
    network.eval()
    with torch.no_grad():
        return float(_loss(network, network.embed(*check.arrays), check.given, check.came).mean())


def _calibrate(network: Network, check: _Set) -> None:
    """One temperature a step for agents and one for the end, those with the least log-loss on the runs set aside."""
    logs = torch.zeros_like(network.temperature, requires_grad=True)
    with torch.no_grad():
        embedded = network.embed(*check.arrays)
        network.temperature.fill_(1.0)
        agents, ends = network(embedded, check.given)
    optimizer = torch.optim.LBFGS([logs], max_iter=60, line_search_fn="strong_wolfe")
    n = agents.shape[-1]
    fixed = _Fixed(agents, ends, logs)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = _loss(fixed, embedded, check.given, check.came).mean() + 1e-3 * logs.square().sum()  # type: ignore[arg-type]
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    if n:
        optimizer.step(closure)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            found = logs.clamp(math.log(0.3), math.log(4.0)).exp()
            if torch.isfinite(found).all():
                network.temperature.copy_(found)


class _Fixed:
    """The network's outputs, with other temperatures."""

    def __init__(self, agents: Tensor, ends: Tensor, logs: Tensor) -> None:
        self._agents, self._ends, self._logs = agents, ends, logs

    def __call__(self, embedded: Tensor, given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        allowed = given["allowed"][:, None]
        scores = (self._agents / self._logs[0].exp()[:, None]).masked_fill(~allowed, -1e9)
        return torch.log_softmax(scores, dim=-1), self._ends / self._logs[1].exp()


def _report(network: Network, check: _Set) -> dict[str, float]:
    with torch.no_grad():
        embedded = network.embed(*check.arrays)
        probabilities = network.probabilities(*network(embedded, check.given)).numpy()
        loss = _loss(network, embedded, check.given, check.came).mean(0)
    came: npt.NDArray[np.int64] = check.came.numpy()
    out: dict[str, float] = {}
    for k in range(came.shape[1]):
        best = probabilities[:, k].argmax(1)
        out[f"log_loss_{k + 1}"] = float(loss[k])
        out[f"top1_{k + 1}"] = float((best == came[:, k]).mean())
        out[f"ece_{k + 1}"] = expected_calibration_error(probabilities[:, k].max(1), best == came[:, k])
    return out
