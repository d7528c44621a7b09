"""SGLang's full-attention component with the order of eviction kept up to date, not rebuilt.

SGLang scores every evictable leaf at every eviction. Here the leaves of both tiers live in
:class:`~agentflow.cache.leaves.Leaves`, which asks for a score again only when something was observed that may
change it. What is evicted, and how, stays SGLang's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.unified_cache.components.full import FullComponent

from agentflow.cache.leaves import Leaves, Scoring
from agentflow.runtime import Runtime

if TYPE_CHECKING:
    from agentflow.engine.sglang.tree_core import AgentTreeCore

__all__ = ["AgentFullComponent", "LeafSet"]


class LeafSet(set[Any]):
    """SGLang's set of evictable leaves of one tier, which keeps :class:`Leaves` in step with itself."""

    def __init__(self, core: AgentTreeCore) -> None:
        super().__init__()
        self._core = core
        self._nodes: dict[int, Any] = {}
        self.leaves = leaves_of(core.runtime)

    def add(self, node: Any) -> None:
        if node not in self:
            super().add(node)
            record = self._core.record(node)
            self._nodes[record.id] = node
            self.leaves.add(record, node.last_access_time)

    def discard(self, node: Any) -> None:
        if node in self:
            super().discard(node)
            record = self._core.record(node)
            self._nodes.pop(record.id, None)
            self.leaves.discard(record)

    def lowest(self) -> Any:
        """The leaf that goes first, or None. SGLang notes uses on the node; they are caught up with here."""
        while True:
            record = self.leaves.lowest()
            if record is None:
                return None
            node = self._nodes[record.id]
            if not self.leaves.touch(record, node.last_access_time):
                return node

    def set_aside(self, node: Any) -> None:
        """Skip the leaf until :meth:`rejoin`; it stays in the set."""
        self.leaves.discard(self._core.record(node))

    def rejoin(self, node: Any) -> None:
        """Have a leaf that was set aside come up again, if it is still one."""
        if node in self:
            self.leaves.add(self._core.record(node), node.last_access_time)

    def rebuild(self) -> None:
        """Start over with the core's present runtime."""
        self.leaves = leaves_of(self._core.runtime)
        for record_id, node in self._nodes.items():
            assert record_id == node.id
            self.leaves.add(self._core.record(node), node.last_access_time)


def leaves_of(runtime: Runtime) -> Leaves:
    """Leaves in the order of the runtime's policies."""
    if not runtime.ranks_nodes:
        scoring = Scoring.RECENCY
    else:
        scoring = Scoring.BY_OWNER if runtime.scores_by_owner else Scoring.ALWAYS
    return Leaves(runtime.score_record, scoring, clock=runtime.clock)


class AgentFullComponent(FullComponent):  # type: ignore[misc]
    """Walks the leaves in the order that :class:`LeafSet` keeps. Falls back to SGLang's own walk with its session
    references, which need another order."""

    tree_core: AgentTreeCore

    def _evict_device_start(self, request_cnt: int) -> None:
        if self._sessions_rank():
            super()._evict_device_start(request_cnt)
            return
        self._evict_device_request_cnt = request_cnt
        self._evict_device_last_node = None
        self._evict_device_heap: list[Any] = []
        self._skipped: list[Any] = []
        self.tree_core.evictable_device_leaves.leaves.start()

    def _evict_device_next_node(self, tracker: Any, *args: Any, **kwargs: Any) -> Any:
        if self._sessions_rank():
            return super()._evict_device_next_node(tracker, *args, **kwargs)
        leaves = self.tree_core.evictable_device_leaves
        last = self._evict_device_last_node
        if last is not None and last in leaves:  # it could not be evicted: leave it out of this walk
            leaves.set_aside(last)
            self._skipped.append(last)
        self._evict_device_last_node = None
        if tracker[self.component_type] >= self._evict_device_request_cnt:
            return None
        node = leaves.lowest()
        self._evict_device_last_node = node
        return None if node is None else node.id

    def _evict_device_end(self) -> None:
        if not self._sessions_rank():
            for node in self._skipped:
                self.tree_core.evictable_device_leaves.rejoin(node)
        super()._evict_device_end()

    def drive_host_eviction(
        self, num_tokens: int, tracker: Any, device_frees: Any, host_frees: Any, cache_actions: Any
    ) -> None:
        if self._sessions_rank():
            super().drive_host_eviction(num_tokens, tracker, device_frees, host_frees, cache_actions)
            return
        leaves = self.tree_core.evictable_host_leaves
        leaves.leaves.start()
        while tracker[self.component_type] < num_tokens:
            node = leaves.lowest()
            if node is None:
                return
            self.tree_core._evict_host_leaf(node, tracker, device_frees, host_frees, cache_actions=cache_actions)

    def _sessions_rank(self) -> bool:
        return bool(self.tree_core.enable_session_radix_cache)
