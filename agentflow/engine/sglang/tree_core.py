"""SGLang's Python radix tree with a record on every node, and our eviction order.

The tree keeps all its mechanism. Added is: a :class:`~agentflow.cache.ledger.NodeRecord` per node, kept
through splits; an eviction strategy that asks the runtime layer; and a decision record for every node that
leaves a tier. No policy logic lives here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from sglang.srt.mem_cache.evict_policy import EvictionStrategy
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore, UnifiedTreeNode

from agentflow.cache.decision import DecisionKind
from agentflow.cache.ghosts import Ghosts, Tokens, path_hash
from agentflow.cache.ledger import CallRef, NodeRecord
from agentflow.cache.policy import Touched
from agentflow.engine.sglang.eviction import LeafSet
from agentflow.runtime import Runtime

__all__ = ["AgentTreeCore", "RuntimeStrategy"]


class RuntimeStrategy(EvictionStrategy):  # type: ignore[misc]
    """Asks the runtime for a node's rank; plain recency, as SGLang's LRU, when no policy ranks nodes."""

    def __init__(self, core: AgentTreeCore) -> None:
        self._core = core

    def get_priority(self, node: Any) -> Any:
        runtime = self._core.runtime
        if not runtime.ranks_nodes:
            return node.last_access_time
        return runtime.score_node(self._core.record(node), node.last_access_time)


class AgentTreeCore(UnifiedTreeCore):  # type: ignore[misc]
    """The tree of one scheduler. ``runtime`` may be exchanged while the tree is empty."""

    def __init__(self, params: Any, components: Any, *, runtime: Runtime) -> None:
        self.runtime = runtime
        self.ghosts = Ghosts()
        #: The request for which room is being made, if it is known.
        self.cause: str | None = None
        #: Check at every eviction of an active node that no retired one could have gone instead.
        self.audit = False
        self._specs = runtime.live_names
        super().__init__(params, components)
        self.eviction_strategy = RuntimeStrategy(self)

    # -- order -----------------------------------------------------------------------------------------

    def use(self, runtime: Runtime) -> None:
        """Go on with another runtime."""
        self.runtime = runtime
        self.reorder()

    def reorder(self) -> None:
        """The runtime's policies are others than before: rank all leaves anew."""
        self._specs = self.runtime.live_names
        self.evictable_device_leaves.rebuild()
        self.evictable_host_leaves.rebuild()

    def heard_of(self, workflow: str) -> None:
        """Something of the workflow was observed: what it owns may rank otherwise now."""
        if self._specs != self.runtime.live_names:
            self.reorder()
        self.evictable_device_leaves.leaves.changed(workflow)
        self.evictable_host_leaves.leaves.changed(workflow)

    # -- records ---------------------------------------------------------------------------------------

    def record(self, node: Any) -> NodeRecord:
        """The node's record, made when it has none yet."""
        record: NodeRecord | None = getattr(node, "agentflow", None)
        if record is None:
            record = NodeRecord(node.id, len(node.key), self.runtime.clock())
            parent = node.parent
            if parent is not None:
                record.path_hash = path_hash(self._hash_of(parent, node), _tokens(node))
            node.agentflow = record
        return record

    def touch_path(self, node_id: int, call: CallRef) -> None:
        """Note that ``call`` used the node and all above it. O(depth)."""
        runtime = self.runtime
        node = self.node_by_id(node_id)
        while node is not self.root_node:
            record = self.record(node)
            runtime.ledger.touch(record, call)
            if record.prefetched_by:
                runtime.settle(record.prefetched_by, "used", record.tokens)
                record.prefetched_by = 0
            if runtime.watches_nodes:
                runtime.observe(Touched(record, call))
            node = node.parent

    def _hash_of(self, parent: Any, child: Any) -> int:
        """Hash of the path to ``parent``; the root's depends on the child's namespace (extra key, salt)."""
        if parent is not self.root_node:
            return self.record(parent).path_hash
        key = child.key
        namespace = (getattr(key, "extra_key", None), getattr(key, "cache_salt", None))
        return 0 if namespace == (None, None) else hash(namespace) % 2**63

    # -- tree hooks ------------------------------------------------------------------------------------

    def reset(self) -> None:
        self.ghosts.clear()
        super().reset()
        self.evictable_device_leaves: LeafSet = LeafSet(self)
        self.evictable_host_leaves: LeafSet = LeafSet(self)

    def _split_node(self, key: Any, child: UnifiedTreeNode, split_len: int) -> Any:
        record = self.record(child)
        parent_hash = self._hash_of(child.parent, child)
        new_node, action = super()._split_node(key, child, split_len)
        head = record.split(new_node.id, len(new_node.key))
        head.path_hash = path_hash(parent_hash, _tokens(new_node))
        new_node.agentflow = head
        return new_node, action

    def _add_new_node(self, parent: UnifiedTreeNode, *args: Any, **kwargs: Any) -> UnifiedTreeNode:
        node = super()._add_new_node(parent, *args, **kwargs)
        self.record(node)
        if self.ghosts:
            for regret in self.ghosts.computed(self._hash_of(parent, node), _tokens(node)):
                self.runtime.settle(regret.seq, "regretted", regret.tokens)
        return node

    def evict_device_leaf(self, node_id: int, is_write_back: bool) -> Any:
        node = self.node_by_id(node_id)
        kind: DecisionKind = "demote" if node.backuped else "evict"
        leaving = self._about_to_leave(node)
        result = super().evict_device_leaf(node_id, is_write_back)
        if result.backup_kv is None:  # else it is written to the host first, and demoted then
            self._left(node, kind, leaving)
        return result

    def demote(self, node_id: int) -> Any:
        node = self.node_by_id(node_id)
        leaving = self._about_to_leave(node)
        result = super().demote(node_id)
        self._left(node, "demote", leaving)
        return result

    def drop_subtree_no_host(self, node_id: int) -> Any:
        node = self.node_by_id(node_id)
        leaving = self._about_to_leave(node)
        result = super().drop_subtree_no_host(node_id)
        if result.is_dropped:
            self._left(node, "evict", leaving)
        return result

    def _evict_host_leaf(self, node: UnifiedTreeNode, *args: Any, **kwargs: Any) -> None:
        leaving = self._about_to_leave(node)
        super()._evict_host_leaf(node, *args, **kwargs)
        self._left(node, "evict_host", leaving)

    def commit_load_back(self, node_id: int, *args: Any, **kwargs: Any) -> Any:
        actions = super().commit_load_back(node_id, *args, **kwargs)
        node = self.node_by_id(node_id)
        while node is not self.root_node:
            record = self.record(node)
            if record.demoted_by:
                self.runtime.loaded(record)
            node = node.parent
        return actions

    # -- decisions -------------------------------------------------------------------------------------

    def _about_to_leave(self, node: Any) -> tuple[int, Tokens]:
        """What is needed of a node once it is out of the tree: its parent's hash and its tokens."""
        if self.audit and self.runtime.ledger.is_live(self.record(node)):
            self._audit(node)
        return self._hash_of(node.parent, node), _tokens(node)

    def _left(self, node: Any, kind: DecisionKind, leaving: tuple[int, Tokens]) -> None:
        record = self.record(node)
        if record.prefetched_by:
            self.runtime.settle(record.prefetched_by, "wasted", record.tokens)
            record.prefetched_by = 0
        decision = self.runtime.evicted(record, kind, request=self.cause)
        if kind == "demote":
            record.demoted_by = decision.seq
        else:
            self.ghosts.evicted(*leaving, decision.seq)

    def _audit(self, node: Any) -> None:
        leaves = self.evictable_device_leaves if not node.evicted else self.evictable_host_leaves
        self.runtime.counters["audited_active_evictions"] += 1
        if any(n is not node and not self.runtime.ledger.is_live(self.record(n)) for n in leaves):
            self.runtime.counters["audit_active_before_retired"] += 1


def _tokens(node: Any) -> Tokens:
    """The node's own tokens."""
    return np.asarray(node.key.raw_token_ids(), dtype=np.int64)
