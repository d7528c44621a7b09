"""Beside stock SGLang: the same text, and under ``lru`` the same evictions."""

from __future__ import annotations

import random

import pytest

from agentflow.engine.base import Call, Coordinates, Sampling
from agentflow.engine.embedded import EmbeddedEngine

pytestmark = pytest.mark.engine

#: As in ``conftest``.
POOL, HOST = 2_000, 3_000


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


def test_text_and_evictions_are_those_of_stock_sglang(engine: EmbeddedEngine, stock_engine: EmbeddedEngine) -> None:
    stock = stock_engine
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
