"""Corrected and exact calls in any order, aborted, starved of memory, with estimators that fail: nothing is lost."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Iterator

import pytest

from agentflow.engine.base import Call, Completion, Coordinates, Reuse, Sampling, Segment
from agentflow.engine.embedded import EmbeddedEngine
from agentflow.events import WorkflowEnded

pytestmark = pytest.mark.engine

AGENTS = ("planner", "coder", "critic", "writer")
#: Small enough that calls displace each other's KV, in both tiers, and that running ones must be put back.
DEVICE, HOST = 1_600, 900


def tokens(seed: int, n: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1_000, 40_000) for _ in range(n)]


PREFIXES = {agent: tokens(i, 30 + 25 * i) for i, agent in enumerate(AGENTS)}
SHARED = {f"slot{i}": tokens(100 + i, 40 + 35 * i) for i in range(5)}
END = tokens(200, 10)


def call(rng: random.Random, agent: str, slots: list[str], *, reuse: Reuse, workflow: str) -> Call:
    ids = list(PREFIXES[agent])
    segments = [Segment("private", 0, len(ids))]
    for slot in slots:
        segments.append(Segment("shared", len(ids), len(SHARED[slot]), slot))
        ids += SHARED[slot]
    segments.append(Segment("private", len(ids), len(END)))
    return Call(
        token_ids=ids + END,
        segments=tuple(segments),
        at=Coordinates(workflow=workflow, agent=agent),
        sampling=Sampling(max_tokens=rng.choice((4, 4, 8, 60)), ignore_eos=True),
        reuse=reuse,
    )


@pytest.fixture
def starved(engine: EmbeddedEngine) -> Iterator[EmbeddedEngine]:
    """The session's engine with little memory, an estimator that fails now and then, and many checks."""
    correction = {"method": "fullshared", "faults": 0.45, "check": 0.2, "source_bytes": 3_000_000}
    body = {"reset": True, "correction": correction, "device_tokens": DEVICE, "host_tokens": HOST}
    engine.control("configure", body)
    yield engine
    engine.configure(reset=True)


@pytest.mark.parametrize("operations", [60, pytest.param(1_000, marks=pytest.mark.slow)])
async def test_random_operations_lose_nothing(starved: EmbeddedEngine, operations: int) -> None:
    rng = random.Random(operations)
    running: dict[str, asyncio.Task[Completion]] = {}
    exact: list[tuple[tuple[str, tuple[str, ...]], Completion]] = []
    corrected = 0

    async def run(asked: Call, what: tuple[str, tuple[str, ...]]) -> Completion:
        nonlocal corrected
        done = await starved.agenerate(asked)
        corrected += done.usage.corrected
        if asked.reuse == "exact" and done.finish == "length":
            exact.append((what, done))
        return done

    for step in range(operations):
        draw = rng.random()
        if draw < 0.68 or not running:
            agent = rng.choice(AGENTS)
            slots = rng.sample(sorted(SHARED), rng.randrange(1, 4))
            reuse: Reuse = "exact" if rng.random() < 0.35 else "corrected"
            asked = call(rng, agent, slots, reuse=reuse, workflow=f"w{step // 25}")
            running[asked.request_id] = asyncio.create_task(run(asked, (agent, tuple(slots))))
        elif draw < 0.78:
            starved.abort(rng.choice(list(running)))
        elif draw < 0.86:
            running[rng.choice(list(running))].cancel()
        elif draw < 0.9:
            starved.emit(WorkflowEnded(workflow=f"w{rng.randrange(operations // 25 + 1)}", seq=10**6, time=time.time()))
        else:
            await asyncio.wait({rng.choice(list(running.values()))}, timeout=60)
        while len(running) >= 8 or (running and rng.random() < 0.15):
            await asyncio.wait(running.values(), return_when=asyncio.FIRST_COMPLETED, timeout=60)
            for name in [n for n, t in running.items() if t.done()]:
                with contextlib.suppress(asyncio.CancelledError):
                    await running.pop(name)
    async with asyncio.timeout(120):
        await asyncio.gather(*running.values(), return_exceptions=True)
        while True:
            stats = await starved.astats()
            (state,) = await starved.acontrol("check")
            if state["idle"] and not stats.details["correction"]["checks_waiting"]:
                break
            await asyncio.sleep(0.05)
    assert state["problems"] == []
    assert stats.device_free + stats.device_cached + stats.device_held == stats.device_total
    assert stats.counters["evict"] + stats.counters["demote"] > 0
    assert stats.counters["estimates_failed"] > 0
    assert stats.counters["correction_checks"] > 0
    assert stats.counters.get("internal_errors", 0) == 0
    assert corrected > 0
    # Exact calls gave what they give on an empty engine, whatever was cached when they ran.
    starved.configure(reset=True)
    for (agent, chosen), done in exact[: 3 + operations // 50]:
        again = call(rng, agent, list(chosen), reuse="exact", workflow="again")
        alone = await starved.agenerate(again)
        shorter = min(len(alone.token_ids), len(done.token_ids))
        assert alone.token_ids[:shorter] == done.token_ids[:shorter]
