"""The agent runtime layer (arXiv 2605.27744): four primitives shared by all policies.

``observe`` takes in events of the framework and observations of the engine, ``score`` ranks what a neighbour
must choose between, ``predict`` forecasts, ``act`` asks for effects. Policies are consulted in order of
precedence; recency breaks ties. A policy that fails is left out from then on, counted and logged once: no
failure reaches a request.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence

from agentflow.cache.decision import Decision, DecisionKind, DecisionOutcome
from agentflow.cache.ledger import CallRef, Ledger, Limits, NodeRecord
from agentflow.cache.policy import (
    Effect,
    Evicted,
    Explanation,
    Forecast,
    Loaded,
    Note,
    Observation,
    Policy,
    PolicySpec,
    Score,
    WaitingCall,
    make_policies,
    spec_name,
)
from agentflow.events import Event
from agentflow.runtime.log import DecisionLog

__all__ = ["Runtime"]

logger = logging.getLogger("agentflow.runtime")

#: Failures of a policy's ``observe`` after which it is left out. A failing ``score`` is left out at once,
#: since scores must be comparable with each other.
OBSERVE_FAILURES = 10


class Runtime:
    """Drives policies on one stream of observations. One owner, one thread.

    ``policies`` are names, or mappings of ``name`` and options, in order of precedence. ``clock`` gives seconds.
    """

    def __init__(
        self,
        policies: Sequence[PolicySpec] = ("lifecycle",),
        *,
        clock: Callable[[], float] = time.time,
        limits: Limits | None = None,
        log_limit: int = 10_000,
    ) -> None:
        self.clock = clock
        self.ledger = Ledger(clock=clock, limits=limits)
        self.log = DecisionLog(log_limit)
        self.counters: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        self.set_policies(policies)

    def set_policies(self, specs: Sequence[PolicySpec]) -> None:
        """Go on with other policies; the ledger, the log and the counters stay."""
        self.policies: list[Policy] = make_policies(specs, self.ledger, self.clock)
        self.specs = tuple(specs)
        self.names = tuple(map(spec_name, specs))  # as chosen; the policies are in order of precedence
        self._failures.clear()
        self._rebuild()

    @property
    def name(self) -> str:
        """The policies' names, joined."""
        return "+".join(self.names) or "lru"

    @property
    def live_names(self) -> tuple[str, ...]:
        """Names of the policies that still have a say: those that failed are left out."""
        return tuple(p.name for p in self.policies)

    # -- observe ---------------------------------------------------------------------------------------

    def observe(self, observation: Observation) -> None:
        """Take in an event of the framework or an observation of the engine."""
        if isinstance(observation, Event):
            self.counters["events"] += 1
            self.ledger.observe(observation)
        for policy in self._observers:
            try:
                policy.observe(observation)
            except Exception:
                self._failed(policy, "observe", OBSERVE_FAILURES)

    def call(
        self,
        workflow: str | None,
        agent: str | None,
        branch: str | None,
        request: str,
        *,
        priority: int = 0,
        tenant: str | None = None,
    ) -> CallRef:
        """Register a call with the ledger."""
        call = self.ledger.call(workflow, agent, branch, request, priority=priority)
        if tenant is not None and call.thread is not None:
            call.thread.workflow.tenant = tenant
        return call

    # -- score -----------------------------------------------------------------------------------------

    def score_node(self, node: NodeRecord, recency: float) -> Score:
        """The node's rank for eviction, lowest first. ``recency`` grows with the last use."""
        return (*self.score_record(node), recency)

    def score_record(self, node: NodeRecord) -> Score:
        """What the policies say of the node, without its recency; the number of opinions may shrink by a failure."""
        score: Score = ()
        for policy in self._node_scorers:
            try:
                score += _checked(policy.score_node(node))
            except Exception:
                self._failed(policy, "score_node", 1)
        return score

    def score_call(self, call: WaitingCall) -> Score:
        """The waiting call's rank, lowest runs first; () when no policy has an opinion."""
        score: Score = ()
        for policy in self._call_scorers:
            try:
                score += _checked(policy.score_call(call))
            except Exception:
                self._failed(policy, "score_call", 1)
        return score

    @property
    def watches_nodes(self) -> bool:
        """Whether any policy wants observations of single nodes."""
        return bool(self._observers)

    @property
    def watches_pool(self) -> bool:
        """Whether any policy wants the pool's state."""
        return self._watches_pool

    @property
    def wants_hidden(self) -> bool:
        """Whether any policy wants hidden states now."""
        return any(p.wants_hidden for p in self._observers)

    @property
    def ranks_nodes(self) -> bool:
        """Whether any policy has an opinion on nodes; without one the order is plain recency."""
        return bool(self._node_scorers)

    @property
    def scores_by_owner(self) -> bool:
        """Whether nodes need scoring again only when they are touched or a workflow of theirs is heard of."""
        return all(p.scores_by_owner for p in self._node_scorers)

    @property
    def ranks_calls(self) -> bool:
        """Whether any policy has an opinion on waiting calls."""
        return bool(self._call_scorers)

    # -- predict, act ----------------------------------------------------------------------------------

    def predict(self, horizon: int) -> list[Forecast]:
        """Forecasts of all policies that make some."""
        out: list[Forecast] = []
        for policy in self._predictors:
            try:
                out += policy.predict(horizon)
            except Exception:
                self._failed(policy, "predict", OBSERVE_FAILURES)
        return out

    def act(self) -> list[Effect]:
        """Effects that policies want now. Their notes go into the decision log."""
        out: list[Effect] = []
        for policy in self._actors:
            try:
                for effect in policy.act():
                    if isinstance(effect, Note):
                        self._note(policy, effect)
                    else:
                        out.append(effect)
            except Exception:
                self._failed(policy, "act", OBSERVE_FAILURES)
        return out

    def rescored(self) -> set[str]:
        """Workflows whose nodes must be scored again, for what policies computed in the background."""
        out: set[str] = set()
        for policy in self._thinkers:
            try:
                out.update(policy.rescored())
            except Exception:
                self._failed(policy, "rescored", OBSERVE_FAILURES)
        return out

    @property
    def acts(self) -> bool:
        """Whether any policy asks for effects."""
        return bool(self._actors)

    # -- decisions -------------------------------------------------------------------------------------

    def _note(self, policy: Policy, note: Note) -> None:
        self.log.add(
            note.kind,
            time=self.clock(),
            policy=policy.name,
            reason=note.reason,
            tokens=note.tokens,
            workflows=(note.workflow,) if note.workflow is not None else (),
            agents=(note.agent,) if note.agent is not None else (),
            terms=note.terms,
        )
        self.counters[note.kind] += 1

    def evicted(self, node: NodeRecord, kind: DecisionKind, *, request: str | None) -> Decision:
        """Record that a node was evicted, demoted to the host, or dropped from the host."""
        why: Explanation | None = None
        by = "lru"
        for policy in self.policies:
            try:
                why = policy.explain(node)
            except Exception:
                self._failed(policy, "explain", OBSERVE_FAILURES)
            if why is not None:
                by = policy.name
                break
        owners = list(node.owners)[:8]
        decision = self.log.add(
            kind,
            time=self.clock(),
            policy=by,
            reason=why.reason if why else "least recently used",
            tokens=node.tokens,
            node=node.id,
            workflows=tuple(dict.fromkeys(t.workflow.id for t in owners)),
            agents=tuple(dict.fromkeys(t.agent for t in owners if t.agent)),
            request=request,
            terms=why.terms if why else None,
        )
        self.counters[kind] += 1
        self.counters[f"{kind}_tokens"] += node.tokens
        if self._observers:
            self.observe(Evicted(node, "host" if kind == "evict_host" else "device", kept=kind == "demote"))
        return decision

    def loaded(self, node: NodeRecord) -> None:
        """A node of the host is on the device again; the demotion that brought it there is regretted."""
        if node.demoted_by:
            self.settle(node.demoted_by, "regretted", node.tokens)
            node.demoted_by = 0
        if self._observers:
            self.observe(Loaded(node))

    def settle(self, seq: int, outcome: DecisionOutcome, tokens: int) -> None:
        """Write what came of decision ``seq`` for ``tokens`` tokens of it, and count it."""
        decision = self.log.settle(seq, outcome)
        kind = decision.kind if decision is not None else "forgotten"
        self.counters[f"{kind}_{outcome}"] += 1
        self.counters[f"{kind}_{outcome}_tokens"] += tokens

    # -- failures --------------------------------------------------------------------------------------

    def failed(self, policy: Policy, where: str) -> None:
        """Count the exception being handled, which ``policy`` raised in ``where``, and leave the policy out."""
        self._failed(policy, where, 1)

    def _failed(self, policy: Policy, where: str, allowed: int) -> None:
        self.counters["policy_errors"] += 1
        key = f"{policy.name}.{where}"
        self._failures[key] += 1
        if self._failures[key] == 1:
            logger.exception("policy %s failed in %s; requests are not affected", policy.name, where)
        if self._failures[key] >= allowed and policy in self.policies:
            logger.error("policy %s is left out from now on; what it decided falls to the others", policy.name)
            self.policies.remove(policy)
            self.counters["policies_left_out"] += 1
            self._rebuild()

    def _rebuild(self) -> None:
        def having(method: str) -> list[Policy]:
            return [p for p in self.policies if getattr(type(p), method) is not getattr(Policy, method)]

        self._observers = having("observe")
        self._watches_pool = any(p.wants_pool_state for p in self._observers)
        self._node_scorers = having("score_node")
        self._call_scorers = having("score_call")
        self._predictors = having("predict")
        self._actors = having("act")
        self._thinkers = having("rescored")


def _checked(score: Score) -> Score:
    """A score that is safe to compare: a tuple of floats, none of them NaN."""
    if type(score) is not tuple:
        raise TypeError(f"a score is a tuple of floats, not {type(score).__name__}")
    for value in score:
        if type(value) is not float or value != value:
            raise TypeError(f"a score is a tuple of floats that are not NaN, got {value!r}")
    return score
