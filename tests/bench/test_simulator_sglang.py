"""The simulated tree against SGLang's own: the same operations leave the same nodes and evict the same tokens."""

from __future__ import annotations

import random
import warnings
from array import array
from typing import Any

import pytest

from agentflow.bench.simulator.config import EngineSpec
from agentflow.bench.simulator.content import Content, Links
from agentflow.bench.simulator.tree import Node, Tree
from agentflow.bench.traces.model import Span
from agentflow.runtime import Runtime

pytestmark = pytest.mark.engine
POOL = 600


@pytest.fixture(scope="module", autouse=True)
def sglang() -> None:
    """SGLang's modules, which warn while they load."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("sglang.srt.mem_cache.unified_radix_cache")


class Stock:
    """SGLang's unified radix cache with its LRU, on the device tier alone, without a model."""

    def __init__(self) -> None:
        import torch
        from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        self.torch = torch
        self.allocator = TokenToKVPoolAllocator(POOL, torch.float32, "cpu", kvcache=None, need_sort=False)
        self.cache = UnifiedRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=None,
                token_to_kv_pool_allocator=self.allocator,
                page_size=1,
                tree_components=(ComponentType.FULL,),
                tree_core_backend="python",
            )
        )

    def key(self, tokens: list[int]) -> Any:
        from sglang.srt.mem_cache.radix_cache import RadixKey

        return RadixKey(array("q", tokens))

    def match(self, tokens: list[int]) -> tuple[int, Any]:
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

        found = self.cache.match_prefix(MatchPrefixParams(key=self.key(tokens)))
        return found.device_prefix_len, found.last_device_node

    def insert(self, tokens: list[int], values: Any, protected: int, inserted: int) -> Any:
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams

        params = InsertParams(
            key=self.key(tokens), value=values, prev_prefix_len=protected, inserted_len=inserted, priority=0
        )
        return self.cache.insert(params).last_device_node

    def room(self, tokens: int) -> None:
        from sglang.srt.mem_cache.common import evict_from_tree_cache

        evict_from_tree_cache(self.cache, tokens)

    def nodes(self) -> list[tuple[int, ...]]:
        """Every node as the path of tokens to its end, in order of recency."""
        out = []
        for node in self.cache.tree_core._node_arena.values():
            path: list[int] = []
            at = node
            while at is not self.cache.tree_core.root_node:
                path = [*at.key.raw_token_ids(), *path]
                at = at.parent
            if path:
                out.append((node.last_access_time, tuple(path)))
        return [path for _, path in sorted(out)]


class Simulated:
    def __init__(self) -> None:
        self.links = Links()
        self.tree = Tree(EngineSpec(pool_tokens=POOL), Runtime(["lru"], clock=lambda: 0.0))
        self.tokens: dict[Content, list[int]] = {}

    def nodes(self) -> list[tuple[int, ...]]:
        out = [(n.recency, tuple(self.tokens[n.content][: n.end])) for n in self.tree.nodes.values()]
        return [path for _, path in sorted(out)]


class Request:
    """A request in both trees at once, driven as SGLang's scheduler drives one."""

    def __init__(self, stock: Stock, simulated: Simulated, spans: list[Span], prompt: int, tokens: list[int]) -> None:
        self.stock, self.simulated, self.spans = stock, simulated, spans
        self.content: Content = simulated.links.content(tuple(spans))
        simulated.tokens[self.content] = tokens
        self.tokens, self.prompt = tokens, prompt
        self.values: Any = None
        self.node: Node | None = None
        self.handle: Any = None
        self.lock: Any = None
        self.protected = self.inserted = 0

    def admit(self) -> bool:
        tree, cache = self.simulated.tree, self.stock.cache
        found = tree.match(self.content, self.prompt - 1)
        length, handle = self.stock.match(self.tokens[: self.prompt - 1])
        assert length == found.device
        new = self.prompt - length
        tree.lock(found.node)
        lock = cache.inc_lock_ref(handle).to_dec_params()
        assert tree.evictable == cache.evictable_size()
        if tree.free + tree.evictable < new:
            tree.unlock(found.node)
            cache.dec_lock_ref(handle, lock)
            return False
        assert tree.make_room(new)
        tree.free -= new
        self.stock.room(new)
        torch = self.stock.torch
        path = cache.path_device_indices(handle) if length else torch.empty((0,), dtype=torch.int64)
        self.values = torch.cat([path, self.stock.allocator.alloc(new).to(torch.int64)])
        self.node, self.handle, self.lock = found.node, handle, lock
        self.protected = length
        self.checkpoint(self.prompt)
        return True

    def decode(self) -> bool:
        """One more token's KV."""
        tree = self.simulated.tree
        end = len(self.values)
        if end >= len(self.tokens) or not tree.make_room(1):
            return False
        tree.free -= 1
        self.stock.room(1)
        torch = self.stock.torch
        self.values = torch.cat([self.values, self.stock.allocator.alloc(1).to(torch.int64)])
        return True

    def checkpoint(self, end: int) -> None:
        tree, cache = self.simulated.tree, self.stock.cache
        node, _ = tree.insert(self.content, end, protected=self.protected, inserted=self.inserted)
        handle = self.stock.insert(self.tokens[:end], self.values[:end].clone(), self.protected, self.inserted)
        if self.prompt < end:
            tree.insert(self.content, self.prompt, protected=self.prompt, inserted=self.prompt)
            self.stock.insert(self.tokens[: self.prompt], self.values[: self.prompt].clone(), self.prompt, self.prompt)
        self.values = cache.path_device_indices(handle)
        cache.dec_lock_ref(self.handle, self.lock)
        self.handle, self.lock = handle, cache.inc_lock_ref(handle).to_dec_params()
        tree.lock(node)
        assert self.node is not None
        tree.unlock(self.node)
        self.node, self.protected, self.inserted = node, end, max(self.inserted, end)

    def finish(self) -> None:
        self.checkpoint(len(self.values))
        self.stock.cache.dec_lock_ref(self.handle, self.lock)
        assert self.node is not None
        self.simulated.tree.unlock(self.node)


@pytest.mark.parametrize("seed", range(12))
def test_same_nodes_same_order_same_evictions(seed):
    """Random requests with shared beginnings, several at once, in a pool too small for them."""
    rng = random.Random(seed)
    stock, simulated = Stock(), Simulated()
    sizes = {name: rng.randint(1, 40) for name in range(30)}
    running: list[Request] = []
    finished: list[Request] = []
    for _ in range(150):
        what = rng.random()
        if what < 0.4 and len(running) < 4:
            if finished and rng.random() < 0.6:
                earlier = rng.choice(finished)
                spans = earlier.spans[: rng.randint(1, len(earlier.spans))]
            else:
                spans = []
            spans = [*spans, *(Span(str(n), sizes[n]) for n in rng.choices(range(30), k=rng.randint(1, 4)))]
            tokens = [int(s.id) * 1_000 + k for s in spans for k in range(s.tokens)]
            request = Request(stock, simulated, spans, rng.randint(1, len(tokens)), tokens)
            if request.admit():
                running.append(request)
        elif what < 0.8 and running:
            for _ in range(rng.randint(1, 20)):
                rng.choice(running).decode()
        elif running:
            request = running.pop(rng.randrange(len(running)))
            request.finish()
            finished.append(request)
        tree = simulated.tree
        assert stock.allocator.available_size() == tree.free
        assert stock.cache.evictable_size() == tree.evictable
        assert stock.cache.protected_size() == tree.protected
        assert stock.nodes() == simulated.nodes()
        assert tree.check() == []
    assert simulated.tree.runtime.counters["evict"] > 10
