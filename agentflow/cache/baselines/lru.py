"""Least recently used: SGLang's default eviction strategy."""

from __future__ import annotations

from agentflow.cache.ledger import NodeRecord
from agentflow.cache.policy import Explanation, Policy

__all__ = ["LRU"]


class LRU(Policy):
    """No opinion of its own: the runtime's recency order alone decides, which is SGLang's."""

    name = "lru"

    def explain(self, node: NodeRecord) -> Explanation | None:
        return Explanation("least recently used")
