"""Program-level first come, first served: calls of the workflow that began first run first.

Under first come, first served by call, more workflows than the pool holds take turns, each finds its KV gone when its
turn comes, and even the best order of eviction keeps little. By workflow, as many as the pool holds go on at full
speed, and the others begin as those end (Continuum, arXiv 2511.02230, section on scheduling).
"""

from __future__ import annotations

from collections.abc import Callable

from agentflow.cache.ledger import Ledger
from agentflow.cache.policy import Policy, Score, WaitingCall
from agentflow.errors import UsageError

__all__ = ["ByWorkflow", "rank_by_workflow"]

#: Seconds after which a waiting call comes before all that did not wait so long.
PATIENCE = 1_800.0


def rank_by_workflow(call: WaitingCall, now: float, patience: float) -> Score:
    """Preempted calls and those that waited for more than ``patience`` seconds first, then by the beginning of the
    workflow, then by their own arrival. A call without a workflow is a workflow of its own. O(1)."""
    thread = call.call.thread
    began = call.arrived if thread is None else min(thread.workflow.started, call.arrived)
    urgent = call.preempted or now - call.arrived > patience
    return (0.0 if urgent else 1.0, began, call.arrived)


class ByWorkflow(Policy):
    """Orders the queue and has no opinion on KV: put it beside one that has, as in ``lifecycle`` with it.

    Nobody starves: a call that waits for ``patience`` seconds comes before all that do not.
    """

    name = "by-workflow"

    def __init__(self, ledger: Ledger, clock: Callable[[], float], *, patience: float = PATIENCE) -> None:
        super().__init__(ledger, clock)
        if not patience >= 0.0:
            raise UsageError("patience must be at least 0 seconds")
        self.patience = patience

    def score_call(self, call: WaitingCall) -> Score:
        return rank_by_workflow(call, self.clock(), self.patience)
