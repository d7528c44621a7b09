"""PBKV that also sees the waiting queue: beyond the paper.

A call that has arrived is no forecast: its agent will read what it touched before as soon as the scheduler gets to
it. Under load that wait is long, and the paper's score, which looks from the newest call onward, lets the KV of
waiting calls go. Here a waiting call is step 0 of its workflow, with probability 1, and the steps after it are
discounted once more. Of nodes that are worth the same, those of the workflows that began first stay, since these
run first. Retired nodes that several workflows used go after those that only one used, as in ``lifecycle``.

The queue is ordered too, by workflow (:mod:`agentflow.cache.by_workflow`): what is kept is then what runs next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from agentflow.cache.by_workflow import PATIENCE, ByWorkflow
from agentflow.cache.ledger import Ledger, NodeRecord, Thread
from agentflow.cache.pbkv.policy import PBKV, RESOLUTION
from agentflow.cache.policy import CallArrived, CallFinished, Explanation, Observation, Score, WaitingCall

__all__ = ["PBKVQueue"]

#: Threads with waiting calls that are followed; more are not told apart from idle ones.
WAITING = 20_000


class PBKVQueue(PBKV):
    """Look-ahead eviction with the waiting queue as step 0, conservative prefetch, and program-level order.

    ``order_calls``: calls run by the beginning of their workflow, preempted ones first; False leaves the queue as it
    is. Nobody starves: a call that waits for ``patience`` seconds comes before all that do not.
    """

    name = "pbkv-queue"

    def __init__(
        self,
        ledger: Ledger,
        clock: Callable[[], float],
        *,
        order_calls: bool = True,
        patience: float = PATIENCE,
        **options: Any,
    ) -> None:
        super().__init__(ledger, clock, **options)
        self._order = ByWorkflow(ledger, clock, patience=patience) if order_calls else None
        #: The threads of the calls that wait or run, by request.
        self._calls: dict[str, Thread] = {}
        #: How many calls of each thread wait or run.
        self._waiting: Counter[Thread] = Counter()

    def observe(self, observation: Observation) -> None:
        super().observe(observation)
        if isinstance(observation, CallArrived):
            thread = observation.call.thread
            if thread is not None and (thread in self._waiting or len(self._waiting) < WAITING):
                self._calls[observation.request] = thread
                self._waiting[thread] += 1
        elif isinstance(observation, CallFinished):
            thread = self._calls.pop(observation.request, None)
            if thread is not None:
                self._waiting[thread] -= 1
                if not self._waiting[thread]:
                    del self._waiting[thread]

    def score_call(self, call: WaitingCall) -> Score:
        return self._order.score_call(call) if self._order is not None else ()

    def score_node(self, node: NodeRecord) -> Score:
        owners = self.ledger.live_owners(node)
        if not owners:
            if node.anonymous:
                return (1.0, 0.0, 0.0)
            return (0.5 if node.shared else 0.0, 0.0, 0.0)
        value = self._worth(owners)
        began = min(t.workflow.started for t in owners)
        return (1.0, round(value / RESOLUTION) * RESOLUTION, -began)

    def _worth(self, owners: Sequence[Thread]) -> float:
        return self.gamma * self._value(owners, lambda p: p.values) + sum(t in self._waiting for t in owners)

    def explain(self, node: NodeRecord) -> Explanation | None:
        """As the score has it: the waiting calls, and the discounted sum of the steps, discounted once more."""
        explanation = super().explain(node)
        owners = self.ledger.live_owners(node)
        if explanation is None:
            return None
        if not owners:
            active = 1.0 if node.anonymous else 0.5 if node.shared else 0.0
            return Explanation(explanation.reason, {**explanation.terms, "active": active})
        waiting = float(sum(t in self._waiting for t in owners))
        terms = {**explanation.terms, "score": self._worth(owners), "waiting_calls": waiting}
        return Explanation(explanation.reason, terms)
