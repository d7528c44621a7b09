"""Policies of the runtime layer inside the real scheduler: holds, warm-ups, order, and all nine at once."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from agentflow.cache.policy import PolicySpec
from agentflow.engine.base import Call, Completion, Coordinates, Sampling
from agentflow.engine.embedded import EmbeddedEngine
from agentflow.engine.workflow import WorkflowRun
from agentflow.events import AgentEnded, AgentStarted, WorkflowEnded, WorkflowStarted

pytestmark = pytest.mark.engine

ANCHOR = 300


@pytest.fixture
def pool(engine: EmbeddedEngine) -> Iterator[EmbeddedEngine]:
    yield engine
    engine.flush()
    engine.configure(policies=["lifecycle"], reset=True)


def use(engine: EmbeddedEngine, policies: Sequence[PolicySpec], tokens: int = 2_000) -> None:
    engine.flush()
    engine.configure(policies=list(policies), reset=True)
    mine = list(engine.policies)
    engine.control(
        "configure", {"policies": mine, "reset": True, "audit": False, "device_tokens": tokens, "host_tokens": 1}
    )


def words(seed: Any, tokens: int) -> list[int]:
    rng = random.Random(str(seed))
    return [rng.randrange(1_000, 40_000) for _ in range(tokens)]


class Flow:
    """One workflow: agents with anchors of their own, and text that only it reads."""

    def __init__(self, engine: EmbeddedEngine, name: str, tenant: str | None = None) -> None:
        self.engine = engine
        self.run = WorkflowRun(engine, name, tenant=tenant)
        self.run.emit(WorkflowStarted, graph="g", tenant=tenant)
        self.text = words(name, 40)

    def call(self, agent: str, own: int = 40, output: int = 4) -> Call:
        ids = words(agent, ANCHOR) + words((self.run.workflow, own), own)
        return Call(
            token_ids=ids,
            anchor=ANCHOR,
            at=Coordinates(workflow=self.run.workflow, agent=agent, tenant=self.run.tenant),
            sampling=Sampling(max_tokens=output, ignore_eos=True),
        )

    def step(self, agent: str, own: int = 40) -> Completion:
        self.run.emit(AgentStarted, agent=agent)
        self.engine.flush()
        done = self.engine.generate(self.call(agent, own))
        self.run.emit(AgentEnded, agent=agent)
        return done

    def end(self) -> None:
        self.run.emit(WorkflowEnded)
        self.engine.flush()


def sound(engine: EmbeddedEngine) -> None:
    deadline = time.monotonic() + 20
    while not (reply := engine.control("check")[0])["idle"]:
        assert time.monotonic() < deadline
    assert reply["problems"] == []
    counters = engine.stats().counters
    assert counters.get("internal_errors", 0) == 0
    assert counters.get("policy_errors", 0) == 0


def test_an_anchor_is_computed_ahead_and_found_by_the_next_session(pool: EmbeddedEngine) -> None:
    engine = pool
    use(engine, [{"name": "cachesage", "weight": 0.0}], tokens=1_500)  # weight 0: warm-ups alone, order of recency
    for i in range(3):
        flow = Flow(engine, f"teacher{i}")
        for agent in ("a", "b", "c"):
            flow.step(agent)
        flow.end()
    flow = Flow(engine, "pusher")
    flow.step("x", own=1_100)  # pushes all three anchors out
    flow.end()
    late = Flow(engine, "late")
    late.step("a")
    deadline = time.monotonic() + 20
    while not engine.stats().counters.get("warm_ups"):
        assert time.monotonic() < deadline, engine.stats()
    sound(engine)
    warm = next(d for d in engine.decisions() if d.kind == "warm")
    assert warm.tokens == ANCHOR
    done = late.step("b")
    assert done.usage.cached_device >= ANCHOR
    assert next(d for d in engine.decisions() if d.kind == "warm").outcome == "used"
    late.end()
    sound(engine)
    assert engine.stats().running == engine.stats().waiting == 0


def test_nothing_of_a_session_is_ever_computed_ahead(pool: EmbeddedEngine) -> None:
    engine = pool
    use(engine, [{"name": "cachesage", "weight": 0.0}], tokens=1_500)
    alone = Flow(engine, "alone")  # the only workflow that ever used this anchor
    alone.step("secret")
    alone.step("x", own=1_100)
    alone.step("secret")
    alone.end()
    sound(engine)
    assert engine.stats().counters.get("warm_ups", 0) == 0


def test_programs_beyond_the_room_are_held_and_all_come_to_their_end(pool: EmbeddedEngine) -> None:
    engine = pool
    use(engine, [{"name": "admission", "high": 0.9, "low": 0.7}], tokens=1_500)

    async def one(number: int) -> list[Completion]:
        flow = Flow(engine, f"p{number}")
        done = []
        for turn in range(3):
            flow.run.emit(AgentStarted, agent="a")
            done.append(await engine.agenerate(flow.call("a", own=300 + 50 * turn)))
        flow.run.emit(WorkflowEnded)
        return done

    async def all_of_them() -> list[list[Completion]]:
        return await asyncio.wait_for(asyncio.gather(*(one(n) for n in range(8))), 60)

    done = asyncio.run(all_of_them())
    assert all(len(d.token_ids) == 4 for calls in done for d in calls)
    stats = engine.stats()
    assert stats.counters["calls_held"] > 0
    assert stats.details["policies"]["admission"]["total_admitted"] >= 8
    sound(engine)


@pytest.mark.slow
def test_a_tenant_with_a_long_backlog_does_not_keep_another_waiting(pool: EmbeddedEngine) -> None:
    engine = pool
    finished: dict[str, list[float]] = {}

    async def tenant(name: str, calls: int) -> None:
        flows = [Flow(engine, f"{name}{i}", tenant=name) for i in range(calls)]

        async def one(flow: Flow) -> None:
            await engine.agenerate(flow.call("a", own=200, output=8))
            finished.setdefault(name, []).append(time.monotonic())

        await asyncio.gather(*(one(f) for f in flows))

    async def both() -> None:
        hostile = asyncio.create_task(tenant("hostile", 40))
        async with asyncio.timeout(30):
            while not (await engine.astats()).waiting:  # noqa: ASYNC110 (it is another process that is waited for)
                await asyncio.sleep(0.01)
        await asyncio.gather(hostile, tenant("modest", 3))

    places = {}
    for policy in ("lru", "fairness"):
        use(engine, [policy], tokens=900)  # room for about two calls at once
        finished.clear()
        asyncio.run(asyncio.wait_for(both(), 100))
        order = sorted((t, name) for name, times in finished.items() for t in times)
        places[policy] = max(i for i, (_, name) in enumerate(order) if name == "modest")
        sound(engine)
    assert places["fairness"] <= places["lru"] - 10, places


def test_all_nine_at_once_answer_as_without_them(pool: EmbeddedEngine) -> None:
    engine = pool

    def session(policies: Sequence[PolicySpec]) -> list[tuple[int, ...]]:
        use(engine, policies)
        answers = []
        for i in range(4):
            flow = Flow(engine, f"w{i}", tenant=f"t{i % 2}")
            answers += [flow.step(agent, own=60 + 10 * i).token_ids for agent in ("a", "b", "c")]
            flow.end()
        sound(engine)
        return answers

    nine = [
        "admission", "fairness", "shaping", "lifecycle", "cachesage", "adapters", "safety", "memo", "speculation",
        "hedging",
    ]  # fmt: skip
    assert session(nine) == session(["lifecycle"])
