"""The bounded log of decisions, and what came of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from agentflow.cache.decision import Decision, DecisionKind, DecisionOutcome

__all__ = ["DecisionLog"]


class DecisionLog:
    """The newest ``limit`` decisions, numbered from 1. Adding and settling one are O(1)."""

    def __init__(self, limit: int = 10_000) -> None:
        self.limit = limit
        self.last_seq = 0
        self._log: OrderedDict[int, Decision] = OrderedDict()

    def add(
        self,
        kind: DecisionKind,
        *,
        time: float,
        policy: str,
        reason: str,
        tokens: int = 0,
        node: int | None = None,
        workflows: tuple[str, ...] = (),
        agents: tuple[str, ...] = (),
        request: str | None = None,
        terms: Mapping[str, float] | None = None,
    ) -> Decision:
        """Append a decision under the next number."""
        self.last_seq += 1
        decision = Decision(
            seq=self.last_seq,
            time=time,
            kind=kind,
            policy=policy,
            reason=reason,
            tokens=tokens,
            node=node,
            workflows=workflows,
            agents=agents,
            request=request,
            terms=terms or {},
        )
        self._log[self.last_seq] = decision
        if len(self._log) > self.limit:
            self._log.popitem(last=False)
        return decision

    def settle(self, seq: int, outcome: DecisionOutcome) -> Decision | None:
        """Write what came of decision ``seq``, if nothing is written yet; None when the log no longer holds it."""
        decision = self._log.get(seq)
        if decision is not None and decision.outcome is None:
            decision.outcome = outcome
        return decision

    def since(self, seq: int) -> list[Decision]:
        """Decisions numbered above ``seq`` that the log still holds, oldest first."""
        if seq >= self.last_seq:
            return []
        oldest = self.last_seq - len(self._log) + 1
        return [self._log[n] for n in range(max(seq + 1, oldest), self.last_seq + 1)]
