"""Prefetching from the host tier inside the real scheduler."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest

from agentflow.engine.base import Call, Completion, Coordinates, Sampling
from agentflow.engine.embedded import EmbeddedEngine
from agentflow.events import WorkflowEnded

pytestmark = pytest.mark.engine


@pytest.fixture
def two_tiers(engine: EmbeddedEngine) -> Iterator[EmbeddedEngine]:
    yield engine
    engine.control("configure", {"policies": ["lifecycle"], "reset": True})


def use(engine: EmbeddedEngine, policy: str) -> None:
    engine.flush()
    engine.configure(reset=True)  # waits until the last call has left the scheduler
    pbkv = {"name": policy, "threshold": 0.2}
    engine.control(
        "configure",
        {"policies": [pbkv], "reset": True, "audit": True, "device_tokens": 1_500, "host_tokens": 6_000},
    )


def prompt(seed: int, tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1_000, 40_000) for _ in range(tokens)]


def ask(engine: EmbeddedEngine, workflow: str, ids: list[int], agent: str = "a") -> Completion:
    at = Coordinates(workflow=workflow, agent=agent)
    return engine.generate(Call(token_ids=ids, at=at, sampling=Sampling(max_tokens=4, ignore_eos=True)))


def ended(engine: EmbeddedEngine, workflow: str) -> None:
    engine.emit(WorkflowEnded(workflow=workflow, seq=1_000, time=time.time()))
    engine.flush()


def test_what_is_predicted_comes_back_into_retired_space_before_it_is_asked_for(two_tiers: EmbeddedEngine) -> None:
    engine = two_tiers
    use(engine, "pbkv")
    for i in range(3):  # agent a is mostly followed by itself: the predictor learns that
        for _ in range(4):
            ask(engine, f"teacher{i}", prompt(90 + i, 20))
        ended(engine, f"teacher{i}")
    mine = prompt(1, 500)
    ask(engine, "mine", mine)
    ask(engine, "second", prompt(2, 500))
    ask(engine, "third", prompt(3, 600))  # no room for three: the oldest goes to the host
    assert engine.stats().counters["demote_tokens"] >= 500
    ended(engine, "second")  # its KV is retired: what is predicted may take its place
    deadline = time.monotonic() + 20
    while not engine.stats().counters.get("prefetches"):
        assert time.monotonic() < deadline, engine.stats()
    back = ask(engine, "mine", mine)
    assert back.usage.cached_device >= 499
    counters = engine.stats().counters
    assert counters["prefetch_used_tokens"] >= 499
    assert counters.get("internal_errors", 0) == 0
    assert counters.get("audit_active_before_retired", 0) == 0
    prefetched = [d for d in engine.decisions() if d.kind == "prefetch"]
    assert prefetched[0].workflows == ("mine",)
    assert prefetched[0].outcome == "used"
    assert engine.control("check") == [{"idle": True, "problems": []}]


def test_a_prefetch_never_displaces_active_kv(two_tiers: EmbeddedEngine) -> None:
    """Many live workflows in turn, so that room is always short and much is wanted back."""
    engine = two_tiers
    use(engine, "pbkv")
    rng = random.Random(3)
    histories = {f"w{i}": prompt(i, 250) for i in range(8)}
    for turn in range(40):
        w = rng.choice(list(histories))
        done = ask(engine, w, histories[w], agent=f"agent{turn % 2}")
        histories[w] = (histories[w] + list(done.token_ids) + prompt(100 + turn, 10))[:600]
        if rng.random() < 0.15:
            ended(engine, w)
            histories[w] = prompt(1_000 + turn, 250)
    engine.flush()
    stats = engine.stats()
    assert stats.counters.get("prefetches", 0) + stats.counters.get("prefetches_refused", 0) > 0
    assert stats.counters.get("internal_errors", 0) == 0
    assert stats.counters.get("policy_errors", 0) == 0
    evictions = [d for d in engine.decisions() if d.kind in ("evict", "demote")]
    assert all(d.request for d in evictions), "every eviction names what it made room for"
    for_prefetch = [d for d in evictions if str(d.request).startswith("prefetch")]
    assert all(d.reason.startswith("retired") for d in for_prefetch), [d.reason for d in for_prefetch]
    assert engine.control("check") == [{"idle": True, "problems": []}]
