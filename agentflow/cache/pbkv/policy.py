"""PBKV's eviction and prefetch (arXiv 2605.06472), driven by any predictor.

The score of node c is the paper's

    Score(c) = sum_{k=1..K} gamma^(k-1) * sum_{w in W_act(c)} s_w^(k) * A_w(c) * P_w^(k)

with s_w^(k) * P_w^(k) the predicted probability that step k of workflow w invokes an agent that touches c. What
depends on the workflow alone is summed when its forecast is made; a node's score is then a sum over the
threads that own it. Retired nodes score below all active ones, and recency breaks ties.
"""

from __future__ import annotations

import logging
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

from agentflow.cache.ledger import EARLY, Ledger, NodeRecord, Thread
from agentflow.cache.pbkv.forecast import END, Hidden, Predictor, Steps, agent_values
from agentflow.cache.pbkv.learned import Learned
from agentflow.cache.pbkv.markov import Markov
from agentflow.cache.pbkv.names import Names, whole
from agentflow.cache.pbkv.predictors import make_predictor
from agentflow.cache.pbkv.trust import Trust
from agentflow.cache.policy import (
    CallArrived,
    CallFinished,
    Evicted,
    Explanation,
    Forecast,
    Loaded,
    Observation,
    Policy,
    Prefetch,
    Prefilled,
    Score,
)
from agentflow.errors import UsageError
from agentflow.events import AgentEnded, AgentStarted, StateSuperseded, WorkflowEnded

__all__ = ["PBKV", "PBKVAggressive", "PBKVEvict"]

logger = logging.getLogger("agentflow.pbkv")

#: Scores are told apart in steps of this size; closer ones count as equal, and recency decides.
RESOLUTION = 0.02
#: Agents of a workflow's path that predictors see.
PATH = 64
#: Workflows followed at once; the longest silent are forgotten.
WORKFLOWS = 10_000
#: Nodes on the host that are considered for prefetching.
HOST_NODES = 20_000
#: Agents of a workflow whose calls are made early, followed at once.
BETS = 16
#: Failures of a predictor after which a Markov chain takes its place.
FAILURES = 3


class _Path:
    """A workflow's agents so far, and what is forecast for it.

    ``steps`` are the predictor's, ``used`` what trust made of them, ``values`` their discounted sum, and ``scores``
    what nodes of one agent have, as far as anybody asked.
    """

    __slots__ = ("agents", "ahead", "early", "scores", "steps", "taken", "used", "values")

    def __init__(self) -> None:
        self.agents: deque[str] = deque(maxlen=PATH)
        #: Agents of which a call is made early; the agent reached last, if such a call is its step; and, where that
        #: call was given up after all, the agent whose real call is that step.
        self.early: set[str] = set()
        self.taken: str | None = None
        self.ahead: str | None = None
        self.steps: Steps = ()
        self.used: Steps = ()
        self.values: Mapping[str, float] = {}
        self.scores: dict[str | None, Score] = {}


class PBKVEvict(Policy):
    """Look-ahead eviction without prefetch (the paper's HE).

    ``horizon`` K steps are forecast, each discounted by ``gamma``. ``backbone`` names the predictor and ``predictor``
    holds its options. A learned one (``sage``, ``rgcn``) takes the ``path`` of its file and answers in the background;
    until it does, and where it cannot, a Markov chain forecasts. ``noise`` replaces that share of every forecast by
    chance (seeded), for studies of robustness. ``trust`` weighs the predictor against knowing nothing, by how well it
    forecast of late (:class:`~agentflow.cache.pbkv.trust.Trust`); without it the predictor is believed.
    """

    name = "pbkv-he"
    scores_by_owner = True

    def __init__(
        self,
        ledger: Ledger,
        clock: Callable[[], float],
        *,
        horizon: int = 4,
        gamma: float = 0.7,
        backbone: str = "markov",
        predictor: Mapping[str, Any] | None = None,
        noise: float = 0.0,
        trust: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__(ledger, clock)
        if not 0.0 < gamma <= 1.0 or not 0.0 <= noise <= 1.0:
            raise UsageError("gamma must be in (0, 1], noise in [0, 1]")
        self.horizon = whole("horizon", horizon, 1)
        self.gamma = gamma
        self.noise = noise
        self.predictor: Predictor = make_predictor(backbone, predictor or {})
        self.trust = Trust() if trust else None
        self._random = random.Random(seed)
        self._paths: dict[str, _Path] = {}
        self._agents, self._told = Names(), Names()
        self._failures: Counter[str] = Counter()

    # -- observe, predict --------------------------------------------------------------------------------

    def observe(self, observation: Observation) -> None:
        if isinstance(observation, CallArrived):
            self._called(observation.call.thread)
        elif isinstance(observation, CallFinished):
            thread = observation.call.thread
            if thread is not None and thread.agent is not None:
                self.predictor.sized(thread.agent, observation.tokens, observation.output_tokens)
        elif isinstance(observation, Prefilled):
            self._prefilled(observation.call.thread, observation.hidden)
        elif isinstance(observation, AgentStarted):
            self._began(observation)
        elif isinstance(observation, StateSuperseded):
            self._given_up(observation)
        elif isinstance(observation, AgentEnded):
            self._said_next(observation)
        elif isinstance(observation, WorkflowEnded):
            self._ended(observation.workflow)

    def predict(self, horizon: int) -> Sequence[Forecast]:
        return [Forecast(w, p.steps[:horizon]) for w, p in self._paths.items() if p.steps]

    def _called(self, thread: Thread | None) -> None:
        if thread is None or thread.agent is None:
            return
        path = self._paths.pop(thread.workflow.id, None) or _Path()
        self._paths[thread.workflow.id] = path  # the longest silent come first
        if len(self._paths) > WORKFLOWS:
            del self._paths[next(iter(self._paths))]
        if thread.branch == EARLY:  # no step before its agent is reached, which it may never be
            if len(path.early) < BETS:
                path.early.add(thread.agent)
        elif path.ahead == thread.agent:
            path.ahead = None
        else:
            self._step(thread.workflow.id, path, thread.agent)

    def _step(self, workflow: str, path: _Path, agent: str) -> None:
        self._agents.see(agent)
        self._learn(path, agent)
        path.agents.append(agent)
        path.taken = path.ahead = None
        self._forecast(workflow, path)

    def _began(self, event: AgentStarted) -> None:
        """An agent is reached. If its first call was made early, no other may come for that step."""
        path = self._paths.get(event.workflow)
        if path is not None and event.agent in path.early:
            path.early.discard(event.agent)
            self._step(event.workflow, path, event.agent)
            path.taken = event.agent

    def _given_up(self, event: StateSuperseded) -> None:
        """A call that was made early is not used. Where its agent was reached, the real call is that step."""
        path = self._paths.get(event.workflow)
        if path is None or event.branch != EARLY or event.agent is None:
            return
        if path.taken == event.agent:
            path.taken, path.ahead = None, event.agent
        path.early.discard(event.agent)

    def _prefilled(self, thread: Thread | None, hidden: Hidden) -> None:
        """Forecast once more, now that the model has read the prompt; not when another agent was called meanwhile."""
        path = self._paths.get(thread.workflow.id) if thread is not None else None
        if thread is None or path is None or not path.agents or thread.branch == EARLY:
            return
        if path.agents[-1] == thread.agent:
            self._forecast(thread.workflow.id, path, hidden)

    def _said_next(self, event: AgentEnded) -> None:
        """The graph's own edges, which are known before any run came that way."""
        if event.agent is not None and event.next and self._told.see(event.agent).new:
            self.predictor.prior(event.agent, event.next)

    @property
    def wants_hidden(self) -> bool:  # type: ignore[override]
        """Whether the predictor uses hidden states."""
        return isinstance(self.predictor, Learned) and self.predictor.wants_hidden

    def rescored(self) -> Sequence[str]:
        """Take in what a learned predictor found in the background."""
        if not isinstance(self.predictor, Learned):
            return ()
        out = []
        for workflow, steps in self.predictor.answers():
            path = self._paths.get(workflow)
            if path is not None:
                self._believe(path, steps)
                out.append(workflow)
        return out

    def _ended(self, workflow: str) -> None:
        path = self._paths.pop(workflow, None)
        if path is not None:
            self._learn(path, END)

    def _learn(self, path: _Path, following: str) -> None:
        if not path.agents:
            return
        if self.trust is not None and path.steps:
            self.trust.learn(path.steps[0].get(following, 0.0), len(self._agents) + 1)
        try:
            self.predictor.learn(list(path.agents), following)
        except Exception:
            self._failed("learning")

    def _forecast(self, workflow: str, path: _Path, hidden: Hidden | None = None) -> None:
        try:
            steps = self.predictor.forecast(list(path.agents), self.horizon, workflow=workflow, hidden=hidden)
        except Exception:
            # Without a forecast all active nodes score the same: the order is that of `lifecycle`.
            self._failed("a forecast")
            path.steps, path.used, path.values, path.scores = (), (), {}, {}
            return
        self._believe(path, steps)

    def _believe(self, path: _Path, steps: Steps) -> None:
        if self.noise:
            steps = tuple(self._noisy(s) for s in steps)
        path.steps = steps
        if self.trust is not None:
            steps = self.trust.blend(steps, self._agents)
        path.used = steps
        path.values, path.scores = agent_values(steps, self.gamma), {}

    def _failed(self, what: str) -> None:
        name = self.predictor.name
        self._failures[name] += 1
        if self._failures[name] == 1:
            logger.exception("%s of predictor %s failed; requests are not affected", what, name)
        if self._failures[name] == FAILURES and not isinstance(self.predictor, Markov):
            logger.warning("predictor %s failed %d times; a Markov chain takes its place", name, FAILURES)
            self.predictor = Markov()

    def stats(self) -> Mapping[str, float]:
        """How far the predictor is believed, workflows followed, failures, and a learned predictor's counts."""
        out = {"workflows": float(len(self._paths)), "predictor_failures": float(self._failures.total())}
        if self.trust is not None:
            out["trust"] = self.trust.weight
        if isinstance(self.predictor, Learned):
            out["predictor_ready"] = float(self.predictor.ready)
            out |= {f"predictor_{k}": float(v) for k, v in self.predictor.counters.items()}
        return out

    def _noisy(self, step: Mapping[str, float]) -> dict[str, float]:
        """The step with a share of ``noise`` replaced by a random distribution over the agents called so far."""
        names = [*self._agents, END]
        draws = [-math.log(1.0 - self._random.random()) for _ in names]
        total = sum(draws) or 1.0
        keep = 1.0 - self.noise
        chance = {n: self.noise * d / total for n, d in zip(names, draws, strict=True)}
        return chance | {n: keep * p + chance.get(n, 0.0) for n, p in step.items()}

    # -- score -------------------------------------------------------------------------------------------

    def score_node(self, node: NodeRecord) -> Score:
        owners = self.ledger.live_owners(node)
        if not owners:
            return (1.0, 0.0) if node.anonymous else (0.0, 0.0)
        path = self._paths.get(owners[0].workflow.id) if len(owners) == 1 else None
        if path is None:
            return self._score(owners)
        score = path.scores.get(owners[0].agent)  # an eviction may ask for many nodes of one agent
        if score is None:
            score = path.scores[owners[0].agent] = self._score(owners)
        return score

    def _score(self, owners: Sequence[Thread]) -> Score:
        return (1.0, round(self._value(owners, _values) / RESOLUTION) * RESOLUTION)

    def _value(self, owners: Sequence[Thread], of: Callable[[_Path], Mapping[str, float]]) -> float:
        """Sum over the owning workflows, and over the agents that touch the node, of their predicted worth."""
        agents = {t.agent for t in owners if t.agent is not None}
        total = 0.0
        for workflow in {t.workflow.id for t in owners}:
            path = self._paths.get(workflow)
            if path is not None:
                values = of(path)
                total += sum(values.get(a, 0.0) for a in agents)
        return total

    def explain(self, node: NodeRecord) -> Explanation | None:
        owners = self.ledger.live_owners(node)
        if not owners:
            if node.anonymous:
                return Explanation("active: used by callers without a workflow, of which nothing is predicted")
            return Explanation(f"retired: {self.ledger.retired_because(node)}", {"active": 0.0, "score": 0.0})
        terms: dict[str, float] = {"active": 1.0, "score": self._value(owners, _values)}
        for k in range(self.horizon):
            terms[f"p{k + 1}"] = round(self._value(owners, partial(_step, k=k)), 4)
        if self.trust is not None:
            terms["trust"] = round(self.trust.weight, 4)
        return Explanation("active, least predicted reuse of what remains", terms)


def _values(path: _Path) -> Mapping[str, float]:
    return path.values


def _step(path: _Path, k: int) -> Mapping[str, float]:
    return path.used[k] if k < len(path.used) else {}


class PBKV(PBKVEvict):
    """PBKV in full: look-ahead eviction and conservative prefetch.

    Nodes on the host whose predicted reuse in the next step is at least ``threshold`` are asked for, the most
    valuable first, at most ``budget`` tokens at a time. The engine loads them into free or retired space only, while
    no prefill waits.
    """

    name = "pbkv"
    displace: ClassVar[Literal["retired", "active"]] = "retired"

    def __init__(
        self,
        ledger: Ledger,
        clock: Callable[[], float],
        *,
        threshold: float = 0.3,
        budget: int = 4_096,
        **options: Any,
    ) -> None:
        super().__init__(ledger, clock, **options)
        if not threshold >= 0.0:
            raise UsageError(f"threshold must be at least 0, not {threshold!r}")
        self.threshold = threshold
        self.budget = whole("budget", budget, 1)
        self._on_host: dict[int, NodeRecord] = {}
        self._news = False

    def observe(self, observation: Observation) -> None:
        if isinstance(observation, Evicted):
            if observation.kept:
                self._on_host[observation.node.id] = observation.node
                if len(self._on_host) > HOST_NODES:
                    del self._on_host[next(iter(self._on_host))]
            else:
                self._on_host.pop(observation.node.id, None)
            self._news = True
        elif isinstance(observation, Loaded):
            self._on_host.pop(observation.node.id, None)
        else:
            super().observe(observation)
            # New forecasts, or room: what was refused may fit now.
            self._news = self._news or isinstance(observation, CallArrived | CallFinished | Prefilled | WorkflowEnded)

    def rescored(self) -> Sequence[str]:
        found = super().rescored()
        self._news = self._news or bool(found)
        return found

    def act(self) -> Sequence[Prefetch]:
        """Nothing unless something changed since it was last asked: what was refused then would be again."""
        if not self._news or not self._on_host:
            return ()
        self._news = False
        ranked: list[tuple[float, NodeRecord]] = []
        for node in self._on_host.values():
            owners = self.ledger.live_owners(node)
            value = self._value(owners, partial(_step, k=0))
            if owners and value >= self.threshold:
                ranked.append((value, node))
        ranked.sort(key=lambda pair: (-pair[0], pair[1].id))
        out: list[Prefetch] = []
        left = self.budget
        for value, node in ranked:
            if node.tokens <= left:
                left -= node.tokens
                reason = f"predicted with {value:.2f} for the next step"
                out.append(Prefetch(node.id, reason, value, displace=self.displace))
        return out


class PBKVAggressive(PBKV):
    """Prefetch that also displaces active KV. For comparison only: it loses when predictions are wrong."""

    name = "pbkv-aggressive"
    displace = "active"
