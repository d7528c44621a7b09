"""Fairness between tenants, and between the workflows of one, in the order of service and in the cache.

Order: start-time fair queueing (Goyal, Vin, Cheng 1996) in two levels, with tokens as the measure of service, as the
virtual token counter of Sheng et al. (OSDI 2024) has it. Each call that arrives brings its tenant a turn, tagged with
the service that the tenant will have had by then; the lowest tag runs first. Which of its calls has a tenant's first
turn is decided in the same way between its workflows. Tags are finite and time moves with the service given, on both
levels, so every call runs.

Cache: what tenants left who have nothing to run goes first, then what is beyond a tenant's share of the pool while
others are about.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, NamedTuple, TypeVar

from agentflow.cache.ledger import CallRef, Ledger, NodeRecord, Workflow
from agentflow.cache.policy import (
    CallArrived,
    CallFinished,
    Evicted,
    Explanation,
    Loaded,
    Observation,
    Policy,
    PoolState,
    Score,
    Touched,
    WaitingCall,
)
from agentflow.errors import UsageError

__all__ = ["Fairness"]

#: Tenants, workflows and waiting calls that are followed; the longest silent are forgotten first.
_FOLLOWED = 10_000
#: What a token of an answer counts, in tokens of a prompt.
_OUTPUT_WEIGHT = 2.0
#: Ranks of KV: of tenants that are not present, of those over their share, of all others.
_ABSENT, _OVER, _WITHIN = -1.0, 0.0, 1.0
_T = TypeVar("_T")


class _Tenant:
    """A tenant's calls that are not done, in their order, and as many turns: the n-th call has the n-th turn."""

    __slots__ = ("calls", "name", "now", "served", "turns")

    def __init__(self, name: str) -> None:
        self.name = name
        #: Tags of the turns, in virtual time between tenants, in which ``served`` is the tag of the next.
        self.turns: list[float] = []
        self.served = 0.0
        #: Tags of the calls, in virtual time between the tenant's workflows, which is ``now``, and their numbers.
        self.calls: list[tuple[float, int]] = []
        self.now = 0.0


class _Call(NamedTuple):
    tenant: _Tenant
    workflow: str
    tag: tuple[float, int]
    cost: float


class Fairness(Policy):
    """Serves tenants in proportion to ``weights`` (tenant -> weight, 1.0 where not given), whatever each asks for.

    ``quantum`` tokens of service are one step of the order: within it the policies that follow decide. ``cache``
    False leaves the cache alone. Workflows of one tenant that wait have equal parts of its service; those without a
    tenant are one tenant together. A tenant is present while a workflow of it is running or paused, or a call of it is
    not done.
    ``observe`` and scores are O(1); those of a call O(log n) in the calls that its tenant has waiting.
    """

    name: ClassVar[str] = "fairness"
    precedence: ClassVar[int] = 20
    scores_by_owner: ClassVar[bool] = True
    wants_pool_state: ClassVar[bool] = True

    def __init__(
        self,
        ledger: Ledger,
        clock: Callable[[], float],
        *,
        weights: Mapping[str, float] | None = None,
        quantum: int = 256,
        cache: bool = True,
    ) -> None:
        super().__init__(ledger, clock)
        self.weights = dict(weights or {})
        if min(self.weights.values(), default=1.0) <= 0 or quantum < 1:
            raise UsageError("fairness: weights must be above 0, quantum at least 1 token")
        self.quantum = quantum
        self.cache = cache
        self._heaviest = max([1.0, *self.weights.values()])
        self._now = 0.0
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()
        #: Workflow -> the tag of its next call.
        self._workflows: OrderedDict[str, float] = OrderedDict()
        self._calls: OrderedDict[str, _Call] = OrderedDict()
        self._arrivals = 0
        self._outputs = 64.0
        self._pool = 0
        #: Tenants that are present, and their weights.
        self._present: dict[str, float] = {}
        self._looked = 0.0
        self._nodes: dict[int, tuple[str, int]] = {}
        self._held: Counter[str] = Counter()
        #: Tenants whose KV is not _WITHIN.
        self._ranks: dict[str, float] = {}
        self._flipped: list[str] = []
        self._counts: Counter[str] = Counter()

    def observe(self, observation: Observation) -> None:
        kind = type(observation)
        if kind is Touched:
            if self.cache:
                self._holds(observation.node, observation.call)  # type: ignore[union-attr]
        elif kind is CallArrived:
            self._arrived(observation)  # type: ignore[arg-type]
        elif kind is CallFinished:
            self._finished(observation)  # type: ignore[arg-type]
        elif kind is Evicted:
            if observation.tier == "device":  # type: ignore[union-attr]
                self._lost(observation.node)  # type: ignore[union-attr]
        elif kind is Loaded:
            if self.cache:
                self._holds(observation.node, None)  # type: ignore[union-attr]
        elif kind is PoolState:
            self._pool = observation.total  # type: ignore[union-attr]
            if self.cache:
                self._compare()

    def score_call(self, call: WaitingCall) -> Score:
        known = self._calls.get(call.request)
        if known is None:
            return (float(self._now // self.quantum),)
        tenant = known.tenant
        return (float(tenant.turns[bisect_left(tenant.calls, known.tag)] // self.quantum),)

    def score_node(self, node: NodeRecord) -> Score:
        if not self._ranks or node.anonymous or not node.owners:
            return (_WITHIN,)
        best = _ABSENT
        for thread in node.owners:
            rank = self._ranks.get(thread.workflow.tenant or "", _WITHIN)
            if rank == _WITHIN:
                return (rank,)
            best = max(best, rank)
        return (best,)

    def explain(self, node: NodeRecord) -> Explanation | None:
        rank = self.score_node(node)[0]
        if rank == _WITHIN:
            return None
        tenant = next(t for t in map(_tenant, (o.workflow for o in node.owners)) if self._ranks.get(t) == rank)
        why = "holds more than its share of the cache" if rank == _OVER else "has nothing to run"
        terms = {"held": float(self._held[tenant]), "share": self.share(tenant) * self._pool}
        return Explanation(f"tenant {tenant or '(none)'} {why}", terms)

    def rescored(self) -> Sequence[str]:
        flipped, self._flipped = self._flipped, []
        return flipped

    def share(self, tenant: str) -> float:
        """The tenant's part of the cache among those that are present, 0 to 1."""
        return self._present.get(tenant, 0.0) / (sum(self._present.values()) or 1.0)

    def stats(self) -> Mapping[str, float]:
        served = {f"served:{t.name or '(none)'}": round(t.served, 3) for t in list(self._tenants.values())[-16:]}
        held = {f"held:{t or '(none)'}": float(n) for t, n in self._held.most_common(16)}
        return {**self._counts, **served, **held}

    # -- order -----------------------------------------------------------------------------------------

    def _arrived(self, seen: CallArrived) -> None:
        self._left(seen.request)  # one that comes again
        name, workflow = _names(seen.call)
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = _Tenant(name)
        _put(self._tenants, name, tenant)
        weight = self._present[name] = self._weight(name)
        cost = (seen.tokens + _OUTPUT_WEIGHT * self._outputs) / weight
        turn = max(self._now, tenant.served)
        tenant.served = turn + cost
        start = max(tenant.now, self._workflows.get(workflow, 0.0))
        _put(self._workflows, workflow, start + cost)
        self._arrivals += 1
        tag = (start, self._arrivals)
        insort(tenant.turns, turn)
        insort(tenant.calls, tag)
        self._calls[seen.request] = _Call(tenant, workflow, tag, cost)
        if len(self._calls) > _FOLLOWED:
            self._left(next(iter(self._calls)))

    def _finished(self, seen: CallFinished) -> None:
        known = self._calls.get(seen.request)
        if known is None:
            return
        tenant, workflow, (start, _), cost = known
        tokens = seen.tokens - seen.cached_tokens + _OUTPUT_WEIGHT * seen.output_tokens
        used = tokens / self._weight(tenant.name)
        everyone, own = len(self._calls), len(tenant.calls)
        turn = self._left(seen.request)
        if seen.output_tokens:  # it ran
            self._now = max(self._now, turn)
            tenant.now = max(tenant.now, start)
        # Time moves with all service, though no faster than if everybody shared it. Newcomers are tagged with the time:
        # if it stood still, an endless stream of them would pass one that waits.
        self._now += tokens / (self._heaviest * everyone)
        tenant.now += used / own
        tenant.served += used - cost
        if workflow in self._workflows:
            self._workflows[workflow] += used - cost
        self._outputs += 0.05 * (seen.output_tokens - self._outputs)
        self._counts["calls"] += 1

    def _left(self, request: str) -> float:
        """Forget the call and the turn that it has, whose tag is returned."""
        known = self._calls.pop(request, None)
        if known is None:
            return 0.0
        place = bisect_left(known.tenant.calls, known.tag)
        del known.tenant.calls[place]
        return known.tenant.turns.pop(place)

    def _weight(self, tenant: str) -> float:
        return self.weights.get(tenant, 1.0)

    # -- cache -----------------------------------------------------------------------------------------

    def _holds(self, node: NodeRecord, call: CallRef | None) -> None:
        """The node is on the device; it is on the bill of the tenant that made it."""
        known = self._nodes.get(node.id)
        if known is not None:
            if known[1] != node.tokens:  # it was split since
                self._held[known[0]] += node.tokens - known[1]
                self._nodes[node.id] = (known[0], node.tokens)
            return
        if call is not None and call.thread is not None:
            tenant = _tenant(call.thread.workflow)
        elif node.owners:
            tenant = _tenant(next(iter(node.owners)).workflow)
        else:
            return
        self._nodes[node.id] = (tenant, node.tokens)
        self._held[tenant] += node.tokens

    def _lost(self, node: NodeRecord) -> None:
        known = self._nodes.pop(node.id, None)
        if known is not None:
            self._held[known[0]] -= known[1]
            if self._held[known[0]] <= 0:
                del self._held[known[0]]

    def _compare(self) -> None:
        """Find out who is absent and who holds too much; what they own is ranked anew when that changed."""
        now = self.clock()
        if now - self._looked > 1.0 or now < self._looked:
            self._looked = now
            self._present = {tenant: self._weight(tenant) for tenant in self._tenants_present(now)}
        present = self._present
        part = self._pool / (sum(present.values()) or 1.0)
        ranks = {}
        for tenant, held in self._held.items():
            weight = present.get(tenant)
            if weight is None:
                ranks[tenant] = _ABSENT
            elif held > part * weight and len(present) > 1:
                ranks[tenant] = _OVER
        if ranks != self._ranks:
            changed = {t for t in ranks.keys() | self._ranks.keys() if ranks.get(t) != self._ranks.get(t)}
            self._ranks = ranks
            self._counts["share_changes"] += 1
            self._flipped += [w.id for w in self.ledger.workflows.values() if _tenant(w) in changed]

    def _tenants_present(self, now: float) -> set[str]:
        """O(workflows and calls known)."""
        limits = self.ledger.limits
        running, paused = now - limits.idle_seconds, now - limits.paused_seconds
        present = {call.tenant.name for call in self._calls.values()}
        for workflow in self.ledger.workflows.values():
            if workflow.state != "ended" and workflow.last_seen >= (paused if workflow.state == "paused" else running):
                present.add(workflow.tenant or "")
        return present


def _tenant(workflow: Workflow) -> str:
    return workflow.tenant or ""


def _names(call: CallRef) -> tuple[str, str]:
    if call.thread is None:
        return "", ""
    return _tenant(call.thread.workflow), call.thread.workflow.id


def _put(where: OrderedDict[str, _T], key: str, value: _T) -> None:
    where[key] = value
    where.move_to_end(key)
    if len(where) > _FOLLOWED:
        where.popitem(last=False)
