"""KV of closed sessions goes first: SGLang's ``--enable-session-radix-cache``."""

from __future__ import annotations

from agentflow.cache.ledger import NodeRecord
from agentflow.cache.policy import Explanation, Policy, Score

__all__ = ["SessionReferenced"]


class SessionReferenced(Policy):
    """SGLang's session-referenced radix cache, with workflows as sessions.

    Its rule is (referenced by an open session, by how many, last access), lowest first. A workflow is an
    open session until it ends. Unlike ``lifecycle`` it knows no superseded state and no abandoned branch, and
    KV of callers without a workflow counts as unreferenced.
    """

    name = "session"
    scores_by_owner = True

    def score_node(self, node: NodeRecord) -> Score:
        count = self._references(node)
        return (1.0 if count else 0.0, float(count))

    def explain(self, node: NodeRecord) -> Explanation | None:
        count = self._references(node)
        reason = f"used by {count} open sessions" if count else "used by no open session"
        return Explanation(f"{reason}, least recently used there", {"sessions": float(count)})

    def _references(self, node: NodeRecord) -> int:
        if len(node.owners) == 1:
            (thread,) = node.owners
            return int(thread.workflow.state != "ended")
        return len({t.workflow for t in node.owners if t.workflow.state != "ended"})
