"""SGLang's own eviction strategies (``--radix-eviction-policy``), rule by rule; ties go to recency, as there."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from agentflow.cache.ledger import Ledger, NodeRecord
from agentflow.cache.policy import Explanation, Policy, Score

__all__ = ["FIFO", "LFU", "SLRU", "Priority"]


class LFU(Policy):
    """Least frequently used: SGLang's ``LFUStrategy``, (hit count, last access).

    A request counts once for every node on its path, the one that made the node included. SGLang stops
    counting for nodes that are on the host only, and for all under the write-back policy; here they count.
    """

    name = "lfu"
    scores_by_owner = True

    def score_node(self, node: NodeRecord) -> Score:
        return (float(node.hits),)

    def explain(self, node: NodeRecord) -> Explanation | None:
        return Explanation("least frequently used", {"hits": float(node.hits)})


class SLRU(Policy):
    """Segmented LRU: SGLang's ``SLRUStrategy``. Nodes that fewer than ``protected_threshold`` requests used are
    on probation and go first; within a segment the least recently used goes first."""

    name = "slru"
    scores_by_owner = True

    def __init__(self, ledger: Ledger, clock: Callable[[], float], *, protected_threshold: int = 2) -> None:
        super().__init__(ledger, clock)
        if protected_threshold < 1:
            raise ValueError("protected_threshold must be at least 1")
        self.protected_threshold = protected_threshold

    def score_node(self, node: NodeRecord) -> Score:
        return (1.0,) if node.hits >= self.protected_threshold else (0.0,)

    def explain(self, node: NodeRecord) -> Explanation | None:
        segment = "protected" if node.hits >= self.protected_threshold else "on probation"
        return Explanation(f"{segment}, least recently used there", {"hits": float(node.hits)})


class FIFO(Policy):
    """First in, first out: SGLang's ``FIFOStrategy``, by creation; the two halves of a split node keep its time."""

    name = "fifo"
    scores_by_owner = True

    def score_node(self, node: NodeRecord) -> Score:
        return (node.created, float(node.id))

    def explain(self, node: NodeRecord) -> Explanation | None:
        return Explanation("oldest", {"created": node.created})


class Priority(Policy):
    """SGLang's ``PriorityStrategy``: the highest priority of the requests that used a node, then recency.

    A call's own priority counts, plus what ``tenants``, ``graphs`` and ``agents`` (name -> priority) give for
    the workflow's tenant and graph and for the agent. SGLang also raises the prompt of a finished request by
    one over its answer, which is not followed.
    """

    name = "priority"
    scores_by_owner = True

    def __init__(
        self,
        ledger: Ledger,
        clock: Callable[[], float],
        *,
        tenants: Mapping[str, int] | None = None,
        graphs: Mapping[str, int] | None = None,
        agents: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(ledger, clock)
        self._tenants = dict(tenants or {})
        self._graphs = dict(graphs or {})
        self._agents = dict(agents or {})
        self._named = bool(self._tenants or self._graphs or self._agents)

    def score_node(self, node: NodeRecord) -> Score:
        own = float(node.priority or 0)
        if not self._named or not node.owners:
            return (own,)
        extra = max(
            self._tenants.get(t.workflow.tenant or "", 0)
            + self._graphs.get(t.workflow.graph or "", 0)
            + self._agents.get(t.agent or "", 0)
            for t in node.owners
        )
        return (own + extra,)

    def explain(self, node: NodeRecord) -> Explanation | None:
        return Explanation("lowest priority, least recently used there", {"priority": self.score_node(node)[0]})
