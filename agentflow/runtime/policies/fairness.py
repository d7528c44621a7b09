"""Fairness between tenants, and between the workflows of one, in the order of service and in the cache.

Order: start-time fair queueing (Goyal, Vin, Cheng 1996) with tokens as the measure of service, as the virtual token
counter of Sheng et al. (OSDI 2024) has it. A call is tagged when it arrives with the service that its tenant will
have had by then; the lowest tag runs first. Tags are finite and time moves with the service given, so every call runs.

Cache: a tenant that holds more than its share of the pool while others are about loses KV first.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

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


class Fairness(Policy):
    """Serves tenants in proportion to ``weights`` (tenant -> weight, 1.0 where not given), whatever each asks for.

    ``quantum`` tokens of service are one step of the order: within it the policies that follow decide. ``cache``
    False leaves the cache alone. Workflows without a tenant are one tenant together. ``observe`` and scores are O(1).
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
        self._now = 0.0
        self._served: OrderedDict[str, float] = OrderedDict()
        self._workflows: OrderedDict[str, float] = OrderedDict()
        self._tags: OrderedDict[str, tuple[float, float, str, str]] = OrderedDict()
        self._waiting: Counter[str] = Counter()
        self._outputs = 64.0
        self._pool = 0
        self._nodes: dict[int, tuple[str, int]] = {}
        self._held: Counter[str] = Counter()
        self._over: frozenset[str] = frozenset()
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
        tag = self._tags.get(call.request)
        if tag is None:
            return (float(self._now // self.quantum),)
        return (float((tag[0] + self._excess(tag[2], tag[3])) // self.quantum),)

    def score_node(self, node: NodeRecord) -> Score:
        if not self._over:
            return (1.0,)
        for thread in node.owners:
            if _tenant(thread.workflow) not in self._over:
                return (1.0,)
        return (0.0,) if node.owners else (1.0,)

    def explain(self, node: NodeRecord) -> Explanation | None:
        if self.score_node(node) != (0.0,):
            return None
        tenant = _tenant(next(iter(node.owners)).workflow)
        return Explanation(
            f"tenant {tenant or '(none)'} holds more than its share of the cache",
            {"held": float(self._held[tenant]), "share": self.share(tenant) * self._pool},
        )

    def rescored(self) -> Sequence[str]:
        flipped, self._flipped = self._flipped, []
        return flipped

    def share(self, tenant: str) -> float:
        """The tenant's part of the cache, 0 to 1, among those that hold some or wait."""
        present = (
            {t for t, n in self._held.items() if n > 0} | {t for t, n in self._waiting.items() if n > 0} | {tenant}
        )
        return self._weight(tenant) / sum(self._weight(t) for t in present)

    def stats(self) -> Mapping[str, float]:
        served = {f"served:{t or '(none)'}": round(v, 3) for t, v in list(self._served.items())[-16:]}
        held = {f"held:{t or '(none)'}": float(n) for t, n in self._held.most_common(16)}
        return {**self._counts, **served, **held}

    # -- order -----------------------------------------------------------------------------------------

    def _arrived(self, seen: CallArrived) -> None:
        tenant, workflow = _names(seen.call)
        cost = (seen.tokens + _OUTPUT_WEIGHT * self._outputs) / self._weight(tenant)
        start = max(self._now, self._served.get(tenant, 0.0))
        self._put(self._served, tenant, start + cost)
        self._tags[seen.request] = (start, cost, tenant, workflow)
        self._waiting[tenant] += 1
        if len(self._tags) > _FOLLOWED:
            _, (_, _, gone, _) = self._tags.popitem(last=False)
            self._waiting[gone] -= 1

    def _finished(self, seen: CallFinished) -> None:
        tag = self._tags.pop(seen.request, None)
        if tag is None:
            return
        start, cost, tenant, workflow = tag
        self._now = max(self._now, start)
        self._waiting[tenant] -= 1
        if self._waiting[tenant] <= 0:
            del self._waiting[tenant]
        used = (seen.tokens - seen.cached_tokens + _OUTPUT_WEIGHT * seen.output_tokens) / self._weight(tenant)
        self._outputs += 0.05 * (seen.output_tokens - self._outputs)
        if tenant in self._served:
            self._served[tenant] += used - cost
        self._put(self._workflows, workflow, self._workflows.get(workflow, self._now) + used)
        self._counts["calls"] += 1

    def _excess(self, tenant: str, workflow: str) -> float:
        """How much more than the order's time a workflow was served: what puts it behind others of its tenant."""
        return max(0.0, self._workflows.get(workflow, 0.0) - max(self._now, self._served.get(tenant, 0.0)))

    def _weight(self, tenant: str) -> float:
        return self.weights.get(tenant, 1.0)

    @staticmethod
    def _put(where: OrderedDict[str, float], key: str, value: float) -> None:
        where[key] = value
        where.move_to_end(key)
        if len(where) > _FOLLOWED:
            where.popitem(last=False)

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
        """Find out who holds too much; what they own is ranked anew when that changed."""
        present = set(self._held) | set(self._waiting)
        over: frozenset[str] = frozenset()
        if len(present) > 1:
            total = sum(self._weight(t) for t in present)
            over = frozenset(t for t in present if self._held[t] > self._pool * self._weight(t) / total)
        if over != self._over:
            changed = over ^ self._over
            self._over = over
            self._counts["share_changes"] += 1
            self._flipped += [w.id for w in self.ledger.workflows.values() if _tenant(w) in changed]


def _tenant(workflow: Workflow) -> str:
    return workflow.tenant or ""


def _names(call: CallRef) -> tuple[str, str]:
    if call.thread is None:
        return "", ""
    return _tenant(call.thread.workflow), call.thread.workflow.id
