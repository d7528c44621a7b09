"""Effects of policies, carried out in the cache between scheduler steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from agentflow.cache.policy import Effect, Prefetch

if TYPE_CHECKING:
    from agentflow.engine.sglang.radix_cache import AgentRadixCache

__all__ = ["carry_out", "make_room"]


def carry_out(
    cache: AgentRadixCache,
    effects: Sequence[Effect],
    others: Mapping[type[Effect], Callable[[Any], bool]] | None = None,
) -> None:
    """Carry out what can be, highest value first; the rest is counted as refused. What was queued starts as one.

    ``others`` says how effects are carried out that are not the cache's own affair.
    """
    queued = False
    for effect in sorted(effects, key=lambda e: -e.value):
        if not isinstance(effect, Prefetch):
            does = (others or {}).get(type(effect))
            if does is None or not does(effect):
                cache.runtime.counters["effects_refused"] += 1
            continue
        cache.tree_core.cause = f"prefetch of node {effect.node}"
        try:
            done = _prefetch(cache, effect)
        finally:
            cache.tree_core.cause = None
        queued = queued or done
        cache.runtime.counters["prefetches" if done else "prefetches_refused"] += 1
    if queued:
        cache.start_prefetches()


def _prefetch(cache: AgentRadixCache, effect: Prefetch) -> bool:
    """Queue the load of a node's KV, and that of its ancestors, from the host."""
    core = cache.tree_core
    node = core._node_arena.get(effect.node)
    if node is None or not node.evicted or not node.backuped or cache.cache_controller is None:
        return False
    if not cache.has_free_load_back_slot():
        return False
    path = []
    above = node
    while above is not core.root_node and above.evicted:
        path.append(above)
        above = above.parent
    needed = sum(len(n.key) for n in path)
    if not make_room(cache, needed, effect.displace, above):
        return False
    if not cache.load_back(effect.node):
        return False
    record = core.record(node)
    decision = cache.runtime.log.add(
        "prefetch",
        time=cache.clock(),
        policy=cache.runtime.name,
        reason=effect.reason,
        tokens=needed,
        node=effect.node,
        workflows=tuple(dict.fromkeys(t.workflow.id for t in list(record.owners)[:8])),
        terms={"value": effect.value},
    )
    for loaded in path:
        core.record(loaded).prefetched_by = decision.seq
    return True


def make_room(
    cache: AgentRadixCache, needed: int, displace: Literal["nothing", "retired", "active"], anchor: Any
) -> bool:
    """Have ``needed`` tokens free, displacing no more than ``displace`` allows.

    Retired leaves are evicted one by one; when they do not suffice, what they gave is free space all the same, and
    nobody that is alive lost anything. The node that the load hangs on is kept.
    """
    core = cache.tree_core
    available = cache.token_to_kv_pool_allocator.available_size
    if available() >= needed:
        return True
    if displace == "nothing":
        return False
    if displace == "active":
        return True  # load_back evicts for itself, in the policies' order
    leaves = core.evictable_device_leaves
    leaves.leaves.start()
    tracker: dict[Any, int] = defaultdict(int)
    while available() < needed:
        lowest = leaves.lowest()
        if lowest is None or lowest is anchor or core.runtime.ledger.is_live(core.record(lowest)):
            return False
        if cache._evict_device_leaf(lowest.id, tracker) is not None:
            return False  # it must be written to the host first
    return True
