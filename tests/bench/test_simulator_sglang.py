"""The simulated tree against SGLang's own: the same operations leave the same nodes and evict the same tokens, on
both tiers."""

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

pytestmark = [pytest.mark.engine, pytest.mark.slow]  # importing SGLang takes longer than the tests
POOL = 400


@pytest.fixture(scope="module", autouse=True)
def sglang() -> None:
    """SGLang's modules, which warn while they load."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("sglang.srt.mem_cache.unified_radix_cache")


class Wires:
    """In the place of the controller that copies KV between the tiers: gives out slots, copies nothing, and a
    transfer is over when the test says so."""

    write_policy = "write_through"

    def __init__(self, host_tokens: int, device: Any) -> None:
        import torch

        self.torch = torch
        self.device = device
        self.host = list(range(host_tokens))
        self.writing: list[int] = []
        self.mem_pool_host = self.anchor_entry = self.host_pool = self
        self.shared_allocation_domain = self.host_evict_fn = None

    def available_size(self) -> int:
        return len(self.host)

    def free(self, values: Any, pool: Any) -> None:
        self.host += values.tolist()

    def write(self, values: Any, *, node_id: int, extra_pools: Any, flush: bool) -> Any:
        if len(self.host) < len(values):
            return None
        taken, self.host = self.host[: len(values)], self.host[len(values) :]
        self.writing.append(node_id)
        return self.torch.tensor(taken, dtype=self.torch.int64)

    def load(self, host_indices: Any, *, node_id: int, extra_pools: Any) -> Any:
        slots = self.device.alloc(len(host_indices))
        return None if slots is None else slots.to(self.torch.int64)


class Stock:
    """SGLang's unified radix cache with its LRU, without a model; with a host tier where it has tokens."""

    def __init__(self, host_tokens: int) -> None:
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
        self.wires = Wires(host_tokens, self.allocator)
        if host_tokens:
            self.cache.cache_controller = self.cache.host_pool_group = self.wires
            self.cache.components[ComponentType.FULL]._full_kv_pool_host = self.wires
            self.cache.tree_core.set_hicache_enabled()
            self.cache.write_through_threshold = 1
            self.cache.load_back_threshold = 10

    def key(self, tokens: list[int]) -> Any:
        from sglang.srt.mem_cache.radix_cache import RadixKey

        return RadixKey(array("q", tokens))

    def match(self, tokens: list[int]) -> Any:
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

        return self.cache.match_prefix(MatchPrefixParams(key=self.key(tokens)))

    def loaded(self, node_id: int) -> None:
        """The load of the node is over."""
        _, lock, host_lock = self.cache.ongoing_load_back.pop(node_id)
        self.cache.dec_lock_ref(node_id, lock)
        self.cache.dec_host_lock_ref(node_id, host_lock)

    def insert(self, tokens: list[int], values: Any, protected: int, inserted: int) -> Any:
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams

        params = InsertParams(
            key=self.key(tokens), value=values, prev_prefix_len=protected, inserted_len=inserted, priority=0
        )
        return self.cache.insert(params).last_device_node

    def room(self, tokens: int) -> None:
        from sglang.srt.mem_cache.common import evict_from_tree_cache

        evict_from_tree_cache(self.cache, tokens)

    def nodes(self) -> list[tuple[Any, ...]]:
        """Every node in order of recency: the path of tokens to its end, and the tiers it is on."""
        out = []
        for node in self.cache.tree_core._node_arena.values():
            path: list[int] = []
            at = node
            while at is not self.cache.tree_core.root_node:
                path = [*at.key.raw_token_ids(), *path]
                at = at.parent
            if path:
                out.append((node.last_access_time, tuple(path), not node.evicted, node.backuped))
        return [found for _, *found in sorted(out)]


class Simulated:
    def __init__(self, host_tokens: int) -> None:
        self.links = Links()
        spec = EngineSpec(pool_tokens=POOL, host_tokens=host_tokens)
        self.tree = Tree(spec, Runtime(["lru"], clock=lambda: 0.0))
        self.tokens: dict[Content, list[int]] = {}

    def nodes(self) -> list[tuple[Any, ...]]:
        out = [(n.recency, tuple(self.tokens[n.content][: n.end]), n.device, n.host) for n in self.tree.nodes.values()]
        return [found for _, *found in sorted(out)]


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

    def admit(self, loads: list[tuple[Node, int]]) -> bool:
        tree, cache = self.simulated.tree, self.stock.cache
        found = tree.match(self.content, self.prompt - 1)
        stock = self.stock.match(self.tokens[: self.prompt - 1])
        assert (stock.device_prefix_len, stock.host_hit_length) == (found.device, found.host)
        tree.lock(found.node)
        passing = cache.inc_lock_ref(stock.last_device_node).to_dec_params()
        assert tree.evictable == cache.evictable_size()
        admitted = tree.free + tree.evictable > self.prompt - found.device
        if admitted:
            node, handle, length = found.node, stock.last_device_node, found.device
            if found.host:
                loaded = tree.load_back(found.best)
                assert cache.load_back(stock.best_match_node) == bool(loaded)
                if loaded:
                    assert loaded == found.host
                    tree.lock(found.best)
                    loads.append((found.best, stock.best_match_node))
                    node, handle, length = found.best, stock.best_match_node, length + loaded
            tree.lock(node)
            self.node, self.handle, self.protected = node, handle, length
            self.lock = cache.inc_lock_ref(handle).to_dec_params()
        tree.unlock(found.node)
        cache.dec_lock_ref(stock.last_device_node, passing)
        if not admitted:
            return False
        new = self.prompt - self.protected
        assert tree.make_room(new)
        tree.free -= new
        self.stock.room(new)
        torch = self.stock.torch
        path = cache.path_device_indices(self.handle) if self.protected else torch.empty((0,), dtype=torch.int64)
        self.values = torch.cat([path, self.stock.allocator.alloc(new).to(torch.int64)])
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
        assert self.node is not None
        node, _ = tree.insert(self.content, end, protected=self.protected, inserted=self.inserted, known=self.node)
        tree.lock(node)
        tree.unlock(self.node)
        handle = self.stock.insert(self.tokens[:end], self.values[:end].clone(), self.protected, self.inserted)
        if self.prompt < end:
            tree.cut(node, self.prompt)
            self.stock.insert(self.tokens[: self.prompt], self.values[: self.prompt].clone(), self.prompt, self.prompt)
        self.values = cache.path_device_indices(handle)
        cache.dec_lock_ref(self.handle, self.lock)
        self.handle, self.lock = handle, cache.inc_lock_ref(handle).to_dec_params()
        self.node, self.protected, self.inserted = node, end, max(self.inserted, end)

    def finish(self) -> None:
        self.checkpoint(len(self.values))
        self.stock.cache.dec_lock_ref(self.handle, self.lock)
        assert self.node is not None
        self.simulated.tree.unlock(self.node)


@pytest.mark.parametrize("host_tokens", [0, 500, 20_000])
@pytest.mark.parametrize("seed", range(6))
def test_same_nodes_same_order_same_evictions(seed, host_tokens):
    """Random requests with shared beginnings, several at once, in tiers too small for them."""
    rng = random.Random(seed)
    stock, simulated = Stock(host_tokens), Simulated(host_tokens)
    tree = simulated.tree
    sizes = {name: rng.randint(1, 40) for name in range(30)}
    running: list[Request] = []
    finished: list[Request] = []
    writes: list[Node] = []
    loads: list[tuple[Node, int]] = []
    loaded = 0
    for _ in range(400):
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
            before = len(loads)
            if request.admit(loads):
                running.append(request)
            loaded += len(loads) - before
        elif what < 0.7 and running:
            for _ in range(rng.randint(1, 20)):
                rng.choice(running).decode()
        elif what < 0.85 and running:
            request = running.pop(rng.randrange(len(running)))
            request.finish()
            finished.append(request)
        else:
            for _ in range(rng.randint(0, len(writes))):
                tree.unlock(writes.pop(0))
                stock.cache._finish_write_through_ack(stock.wires.writing.pop(0))
            for _ in range(rng.randint(0, len(loads))):
                node, handle = loads.pop(0)
                tree.unlock(node)
                stock.loaded(handle)
        writes += tree.writes
        tree.writes.clear()
        assert len(writes) == len(stock.wires.writing)
        assert stock.allocator.available_size() == tree.free
        assert stock.wires.available_size() == tree.host_free
        assert stock.cache.evictable_size() == tree.evictable
        assert stock.cache.protected_size() == tree.protected
        assert stock.nodes() == simulated.nodes()
        assert tree.check() == []
    counters = tree.runtime.counters
    assert counters["evict"] + counters["demote"] > 10
    if host_tokens:
        assert (loaded > 0) or host_tokens == 500
        assert (counters["evict_host"] > 0) == (host_tokens == 500)
