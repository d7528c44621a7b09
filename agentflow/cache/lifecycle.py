"""Lifecycle-aware eviction: what nobody can use again goes first.

The prediction-free part of PBKV (arXiv 2605.06472, "lifecycle-aware reclamation"): nodes that only ended
workflows, superseded states or abandoned branches touched are retired and are evicted before any active
node; within each class the least recently used goes first. A paused workflow is not ended.
"""

from __future__ import annotations

from agentflow.cache.ledger import NodeRecord
from agentflow.cache.policy import Explanation, Policy, Score

__all__ = ["Lifecycle"]

RETIRED: Score = (0.0,)
RETIRED_SHARED: Score = (0.5,)
ACTIVE: Score = (1.0,)


class Lifecycle(Policy):
    """Retired before active; ties go to the runtime's recency order. O(owners of the node), mostly O(1)."""

    name = "lifecycle"
    scores_by_owner = True

    def score_node(self, node: NodeRecord) -> Score:
        if self.ledger.is_live(node):
            return ACTIVE
        return RETIRED_SHARED if node.shared else RETIRED

    def explain(self, node: NodeRecord) -> Explanation | None:
        owners = self.ledger.live_owners(node)
        if not owners and not node.anonymous:
            return Explanation(f"retired: {self.ledger.retired_because(node)}", {"active": 0.0})
        return Explanation("active, least recently used of what remains", {"active": 1.0, "live_owners": len(owners)})
