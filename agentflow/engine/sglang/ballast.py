"""A smaller pool without a restart: part of both tiers is set aside.

Comparisons under several memory sizes need the same engine under each. The device part is held by a locked
node of a namespace of its own, so that SGLang's own accounting sees it as in use; the host part is allocated
and kept. Emptying the cache gives both back.
"""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple

from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from agentflow.errors import UsageError

__all__ = ["Ballast", "set_aside"]

NAMESPACE = "agentflow.ballast"
#: ``write_through_threshold`` that no hit count reaches.
NEVER = 1 << 60


class Ballast(NamedTuple):
    """Tokens of each tier that are set aside."""

    device: int = 0
    host: int = 0


def set_aside(cache: Any, ballast: Ballast) -> None:
    """Set tokens of an empty cache aside. Raises :class:`~agentflow.errors.UsageError` when they do not fit."""
    if ballast.device < 0 or ballast.host < 0:
        raise UsageError("a pool can be made smaller, not larger")
    if ballast.device:
        slots = cache.token_to_kv_pool_allocator.alloc(ballast.device)
        if slots is None:
            raise UsageError(f"the pool has no {ballast.device} tokens to set aside")
        core = cache.tree_core
        threshold, core.write_through_threshold = core.write_through_threshold, NEVER  # no copy on the host
        try:
            key = RadixKey(array("q", range(ballast.device)), extra_key=NAMESPACE)
            result = cache.insert(InsertParams(key=key, value=slots))
        finally:
            core.write_through_threshold = threshold
        cache.inc_lock_ref(result.last_device_node)
    if ballast.host:
        host = getattr(cache.cache_controller, "mem_pool_host", None)
        if host is None or host.alloc(ballast.host) is None:
            raise UsageError(f"the host tier has no {ballast.host} tokens to set aside")
