"""Beside stock SGLang: the same text, and under ``lru`` the same evictions."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from agentflow.engine.base import Call, Coordinates, Sampling
from agentflow.engine.embedded import EmbeddedEngine
from agentflow.engine.models import random_model

pytestmark = pytest.mark.engine

POOL = 2_000
HOST = 3_000


@pytest.fixture(scope="module")
def stock() -> Iterator[EmbeddedEngine]:
    """SGLang's own radix cache, its default LRU, with the same two tiers."""
    with EmbeddedEngine(random_model().path, max_total_tokens=POOL, host_ratio=HOST / POOL, stock_cache=True) as engine:
        yield engine


def sequence() -> list[Call]:
    """Growing conversations with shared beginnings, more than both tiers hold, some calls repeated."""
    rng = random.Random(11)
    system = [[rng.randrange(1_000, 40_000) for _ in range(120)] for _ in range(3)]
    histories = [list(system[i % 3]) for i in range(12)]
    calls = []
    for _ in range(80):
        i = min(int(rng.expovariate(0.25)), 11)
        if len(histories[i]) < 700:
            histories[i] += [rng.randrange(1_000, 40_000) for _ in range(rng.randrange(20, 150))]
        calls.append(
            Call(
                token_ids=tuple(histories[i]),
                at=Coordinates(workflow=f"w{i}", agent="a"),
                sampling=Sampling(max_tokens=6, ignore_eos=True),
            )
        )
    return calls


def test_text_and_evictions_are_those_of_stock_sglang(engine: EmbeddedEngine, stock: EmbeddedEngine) -> None:
    host = stock.control  # the stock engine answers no control requests of ours
    with pytest.raises(Exception, match="SGLang's own cache"):
        host("stats")
    engine.control("configure", {"policies": ["lru"], "reset": True, "device_tokens": POOL, "host_tokens": HOST})
    for n, call in enumerate(sequence()):
        ours, theirs = engine.generate(call), stock.generate(call)
        assert ours.token_ids == theirs.token_ids, f"call {n}"
        assert ours.usage == theirs.usage, f"call {n}"
    counters = engine.stats().counters
    assert counters["demote"] > 20
    assert counters["evict_host"] > 10
