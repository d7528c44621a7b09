"""What an eviction decision costs, ours beside SGLang's own: ``python -m agentflow.engine.sglang.eviction_cost``.

A cache without a model holds many leaves of many workflows. In every round a call adds a leaf and one is evicted, and
only the eviction is timed. All caches take part in every round, so that a slow moment hits all. Printed are medians in
microseconds, and medians of the ratio to SGLang's Python tree in the same round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from array import array
from collections.abc import Sequence
from typing import Any

__all__ = ["main", "measure"]

LEAF = 4
POLICIES = ("lru", "lifecycle", "pbkv-he")


class _Cache:
    """One cache on a pool of its own, filled with ``leaves`` leaves of ``workflows`` workflows."""

    def __init__(self, policy: str | None, backend: str, leaves: int, workflows: int) -> None:
        import torch
        from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        from agentflow.engine.sglang.radix_cache import AgentRadixCache

        size = (leaves + 2) * LEAF
        self.allocator = TokenToKVPoolAllocator(size, torch.float32, "cpu", kvcache=None, need_sort=False)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=self.allocator,
            page_size=1,
            tree_components=(ComponentType.FULL,),
            tree_core_backend=backend,
        )
        self.policy = policy
        self.workflows = workflows
        self.cache: Any = (
            UnifiedRadixCache(params)
            if policy is None
            else AgentRadixCache(params, policies=[policy], shared_time=False)
        )
        self._next = 0
        for _ in range(leaves):
            self.add()

    def add(self) -> None:
        """A call of the next workflow leaves a leaf behind."""
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        n = self._next
        self._next += 1
        key = RadixKey(array("q", [1_000 + n] * LEAF))
        inserted = self.cache.insert(InsertParams(key=key, value=self.allocator.alloc(LEAF)))
        if self.policy is not None:
            from agentflow.cache.policy import CallArrived

            runtime = self.cache.runtime
            workflow = f"w{n % self.workflows}"
            call = runtime.call(workflow, f"agent{n % 5}", None, f"r{n}")
            if runtime.watches_nodes:
                runtime.observe(CallArrived(f"r{n}", call, LEAF))
            self.cache.tree_core.heard_of(workflow)
            lock = self.cache.inc_lock_ref(inserted.last_device_node)
            self.cache.tree_core.touch_path(inserted.last_device_node, call)
            self.cache.dec_lock_ref(inserted.last_device_node, lock.to_dec_params())

    def evict(self) -> float:
        """Evict one leaf; seconds that it took."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        started = time.perf_counter()
        result = self.cache.evict(EvictParams(num_tokens=LEAF))
        took = time.perf_counter() - started
        if result.num_tokens_evicted != LEAF:
            raise RuntimeError(f"{result.num_tokens_evicted} tokens were evicted, {LEAF} asked for")
        return took


def measure(leaves: int = 10_000, workflows: int = 200, rounds: int = 200) -> dict[str, dict[str, float]]:
    """Medians by cache: ``us`` of an eviction, and ``ratio`` to SGLang's Python tree in the same round."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        caches = {
            "sglang python lru": _Cache(None, "python", leaves, workflows),
            "sglang rust lru": _Cache(None, "rust", leaves, workflows),
            **{f"agentflow {p}": _Cache(p, "python", leaves, workflows) for p in POLICIES},
        }
    times: dict[str, list[float]] = {name: [] for name in caches}
    for cache in caches.values():  # whatever is made on first use
        cache.evict()
        cache.add()
    for _ in range(rounds):
        for name, cache in caches.items():
            times[name].append(cache.evict())
            cache.add()
    base = times["sglang python lru"]
    return {
        name: {
            "us": statistics.median(taken) * 1e6,
            "ratio": statistics.median(t / b for t, b in zip(taken, base, strict=True)),
        }
        for name, taken in times.items()
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Print the medians as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--leaves", type=int, default=10_000)
    parser.add_argument("--workflows", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=200)
    args = parser.parse_args(argv)
    print(json.dumps(measure(args.leaves, args.workflows, args.rounds), indent=2))  # noqa: T201


if __name__ == "__main__":
    main()
