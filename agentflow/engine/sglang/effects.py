"""Effects of policies, carried out in the cache between scheduler steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from agentflow.cache.policy import Effect, Prefetch

if TYPE_CHECKING:
    from agentflow.engine.sglang.radix_cache import AgentRadixCache

__all__ = ["carry_out"]


def carry_out(cache: AgentRadixCache, effects: Sequence[Effect]) -> None:
    """Carry out what can be; the rest is counted. Highest value first."""
    for effect in sorted(effects, key=lambda e: -e.value):
        done = _prefetch(cache, effect)
        cache.runtime.counters["prefetches" if done else "prefetches_refused"] += 1


def _prefetch(cache: AgentRadixCache, effect: Prefetch) -> bool:
    """Start loading a node's KV, and that of its ancestors, from the host. Free space only."""
    core = cache.tree_core
    node = core._node_arena.get(effect.node)
    if node is None or not node.evicted or not node.backuped or cache.cache_controller is None:
        return False
    needed = 0
    above = node
    while above is not core.root_node and above.evicted:
        needed += len(above.key)
        above = above.parent
    if needed > cache.token_to_kv_pool_allocator.available_size():
        return False
    if not cache.load_back(effect.node):
        return False
    cache.ready_to_load_host_cache()
    record = core.record(node)
    decision = cache.runtime.log.add(
        "prefetch",
        time=cache.clock(),
        policy=cache.runtime.name,
        reason=effect.reason,
        tokens=needed,
        node=effect.node,
        workflows=tuple({t.workflow.id: None for t in list(record.owners)[:8]}),
        terms={"value": effect.value},
    )
    record.prefetched_by = decision.seq
    return True
