"""The plugin inside the real SGLang: eviction order, decisions, control requests, integrity, equal output."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Iterator

import pytest

from agentflow.engine.base import Call, Completion, Coordinates, Sampling
from agentflow.engine.embedded import EmbeddedEngine
from agentflow.errors import BadRequest, EngineFailure
from agentflow.events import (
    AgentEnded,
    AgentStarted,
    Event,
    ToolEnded,
    ToolStarted,
    WorkflowEnded,
    WorkflowPaused,
    WorkflowStarted,
)

pytestmark = pytest.mark.engine

POOL = 2_000


@pytest.fixture
def small(engine: EmbeddedEngine) -> Iterator[EmbeddedEngine]:
    """The session's engine, empty, with a pool of POOL tokens and no host tier worth the name, audited."""
    limit(engine, ["lifecycle"])
    yield engine
    engine.control("configure", {"policies": ["lifecycle"], "reset": True})


def limit(engine: EmbeddedEngine, policies: list[str], *, device: int = POOL, host: int = 1) -> None:
    engine.flush()
    engine.configure(reset=True)  # waits until the last call has left the scheduler
    engine.control(
        "configure",
        {"policies": policies, "reset": True, "audit": True, "device_tokens": device, "host_tokens": host},
    )


def prompt(seed: int, tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1_000, 40_000) for _ in range(tokens)]


def ask(engine: EmbeddedEngine, workflow: str | None, ids: list[int], *, agent: str = "a", n: int = 4) -> Completion:
    at = Coordinates(workflow=workflow, agent=agent)
    return engine.generate(Call(token_ids=ids, at=at, sampling=Sampling(max_tokens=n, ignore_eos=True)))


async def until(true: Callable[[], bool], seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not true():  # noqa: ASYNC110 (the engine has no such event)
            await asyncio.sleep(0.01)


def ended(engine: EmbeddedEngine, workflow: str) -> None:
    engine.emit(WorkflowEnded(workflow=workflow, seq=1_000, time=time.time()))
    engine.flush()


def test_a_pool_can_be_limited_and_is_given_back(engine: EmbeddedEngine) -> None:
    whole = engine.stats()
    limit(engine, ["lru"], device=1_500, host=700)
    stats = engine.stats()
    assert (stats.policy, stats.device_total, stats.device_free, stats.host_free) == ("lru", 1_500, 1_500, 700)
    assert engine.control("check") == [{"idle": True, "problems": []}]
    engine.control("configure", {"policies": ["lifecycle"], "reset": True})
    assert engine.stats().device_free == whole.device_total
    for bad in (0, -1, whole.device_total + 1, "many", True):
        with pytest.raises(EngineFailure, match="device_tokens must be an integer"):
            engine.control("configure", {"reset": True, "device_tokens": bad})


def test_a_call_larger_than_a_limited_pool_holds_up_nobody(engine: EmbeddedEngine) -> None:
    """It is cut to what there is room for, or refused. Waiting for more, it would wait for ever, and all behind it."""
    limit(engine, ["lru"], device=1_500)
    cut = ask(engine, None, prompt(1, 1_400), n=2_000)
    assert cut.finish == "length"
    assert 0 < cut.usage.completion_tokens < 100
    with pytest.raises(BadRequest):
        ask(engine, None, prompt(2, 1_600))
    assert ask(engine, None, prompt(3, 1_000)).usage.completion_tokens == 4
    engine.configure(reset=True)
    assert ask(engine, None, prompt(2, 1_600)).usage.completion_tokens == 4


def test_retired_kv_goes_first_and_the_decision_says_why(small: EmbeddedEngine) -> None:
    prompts = {w: prompt(i, 500) for i, w in enumerate(("old", "live", "ended"))}
    for w, ids in prompts.items():
        ask(small, w, ids)
    ended(small, "ended")  # the most recently used of the three, so recency alone would keep it
    newcomer = ask(small, "new", prompt(9, 700))
    assert newcomer.decisions
    assert {d.reason for d in newcomer.decisions} == {"retired: workflow ended ended"}
    assert all(d.workflows == ("ended",) and d.request == newcomer.request_id for d in newcomer.decisions)
    for w in ("old", "live"):
        assert ask(small, w, prompts[w]).usage.cached_device >= 499
    again = ask(small, "ended", prompts["ended"])
    assert again.usage.cached_device == 0


def test_paused_is_kept_like_running(small: EmbeddedEngine) -> None:
    paused, live = prompt(1, 600), prompt(2, 600)
    ask(small, "paused", paused)
    ask(small, "done", live)
    small.emit(WorkflowPaused(workflow="paused", seq=2, time=time.time()))
    ended(small, "done")
    ask(small, "new", prompt(3, 900))
    assert ask(small, "paused", paused).usage.cached_device >= 599


def test_no_active_node_goes_while_a_retired_one_remains(small: EmbeddedEngine) -> None:
    """Many workflows with shared beginnings come, go on and end at random, under a pool for a few of them."""
    rng = random.Random(7)
    shared = prompt(0, 150)
    live: dict[str, list[int]] = {}
    for i in range(60):
        if len(live) < 9 or rng.random() < 0.3:
            w = f"w{i}"
            small.emit(WorkflowStarted(workflow=w, seq=1, time=time.time()))
            live[w] = shared + prompt(100 + i, rng.randrange(50, 350))
        w = rng.choice(list(live))
        done = ask(small, w, live[w])
        live[w] = live[w] + list(done.token_ids) + prompt(1_000 + i, 30)
        if rng.random() < 0.25 or len(live[w]) > 900:
            ended(small, w)
            del live[w]
    counters = small.stats().counters
    evictions = counters.get("evict", 0) + counters.get("demote", 0)
    assert evictions > 20
    assert counters.get("audited_active_evictions", 0) > 0, "the pool was too large to force a choice"
    assert counters.get("audit_active_before_retired", 0) == 0
    assert counters.get("internal_errors", 0) == 0
    assert small.control("check") == [{"idle": True, "problems": []}]


def run_mix(engine: EmbeddedEngine, policy: str) -> float:
    """Hit rate of one fixed load: long-lived workflows that return, among short ones that end at once."""
    limit(engine, [policy])
    cached = total = 0
    histories = {f"long{i}": prompt(i, 300) for i in range(4)}
    for turn in range(6):
        for w, ids in histories.items():
            done = ask(engine, w, ids)
            cached += done.usage.cached
            total += done.usage.prompt_tokens
            histories[w] = ids + list(done.token_ids) + prompt(turn * 10 + len(ids), 20)
            short = f"{w}-short{turn}"
            one = ask(engine, short, prompt(5_000 + turn * 100 + int(w[-1]), 400))
            cached += one.usage.cached
            total += one.usage.prompt_tokens
            ended(engine, short)
    return cached / total


def test_lifecycle_beats_lru_on_the_same_calls(engine: EmbeddedEngine) -> None:
    lru, lifecycle = run_mix(engine, "lru"), run_mix(engine, "lifecycle")
    engine.control("configure", {"policies": ["lifecycle"], "reset": True})
    assert lifecycle > lru + 0.1, (lifecycle, lru)


def test_policies_order_the_waiting_queue(engine: EmbeddedEngine) -> None:
    """Calls of a program that arrived first go first, although they were sent last (program-level FCFS)."""
    limit(engine, ["ttl"], device=1_200)
    ask(engine, "early", prompt(0, 50))
    blocker = Call(
        token_ids=prompt(1, 800), at=Coordinates(workflow="blocker"), sampling=Sampling(max_tokens=150, ignore_eos=True)
    )
    finished: list[str] = []

    async def send(call: Call) -> None:
        await engine.agenerate(call)
        finished.append(str(call.at.workflow))

    async def run() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(send(blocker))
            await until(lambda: engine.stats().running == 1)
            for i, workflow in enumerate(("late1", "late2", "early")):
                call = Call(
                    token_ids=prompt(10 + i, 700),
                    at=Coordinates(workflow=workflow, agent="a"),
                    sampling=Sampling(max_tokens=2, ignore_eos=True),
                )
                group.create_task(send(call))
                await until(lambda i=i: engine.stats().waiting == i + 1)

    asyncio.run(run())
    assert finished == ["blocker", "early", "late1", "late2"]
    counters = engine.stats().counters
    assert (counters.get("internal_errors", 0), counters.get("policy_errors", 0)) == (0, 0)
    engine.control("configure", {"policies": ["lifecycle"], "reset": True})


def test_what_was_evicted_and_computed_again_is_regretted(small: EmbeddedEngine) -> None:
    ids = prompt(1, 900)
    ask(small, "w", ids)
    ask(small, "v", prompt(2, 900))
    ask(small, "u", prompt(3, 900))
    again = ask(small, "w", ids)
    assert again.usage.cached == 0
    regretted = [d for d in small.decisions() if d.outcome == "regretted"]
    assert sum(d.tokens for d in regretted) >= 900
    assert all("w" in d.workflows for d in regretted)


def test_an_unknown_policy_changes_nothing(small: EmbeddedEngine) -> None:
    ask(small, "w", prompt(1, 100))
    before = small.stats()
    with pytest.raises(EngineFailure, match="unknown policy 'lfru'; known: "):
        small.control("configure", {"policies": ["lfru"], "reset": True})
    with pytest.raises(EngineFailure, match="unknown control method"):
        small.control("reformat")
    after = small.stats()
    assert (after.policy, after.device_cached) == (before.policy, before.device_cached)


def test_unreadable_events_change_only_a_counter(small: EmbeddedEngine) -> None:
    ask(small, "w", prompt(1, 100))
    before = small.stats()
    for batch in ("{", "[]", '[{"kind": "workflow_ended"}]', '[{"kind": "x", "workflow": "w"}]', 7, None, "[" * 9_999):
        small.control("events", {"batch": batch})
    after = small.stats()
    assert after.counters["events_refused"] - before.counters.get("events_refused", 0) == 6
    assert after.workflows_live == before.workflows_live
    assert after.device_cached == before.device_cached


def test_an_event_costs_the_scheduler_little(small: EmbeddedEngine) -> None:
    """Processor time in which the scheduler's thread reads an event of a whole workflow and takes it in; median over
    batches."""
    costs = []
    for batch in range(12):
        before = small.stats().counters
        for i in range(10):
            for event in _story(f"w{batch}-{i}"):
                small.emit(event)
        small.flush()
        after = small.stats().counters
        events = after["events"] - before.get("events", 0)
        assert events == 80
        costs.append((after["events_ns"] - before.get("events_ns", 0)) / events)
    assert statistics.median(costs) < 20_000


def _story(workflow: str) -> list[Event]:
    now = time.time()
    tool = {"agent": "coder", "step": 1, "tool": "run_tests", "call_id": f"call-{workflow}"}
    return [
        WorkflowStarted(workflow=workflow, seq=1, time=now, graph="team", tenant="one"),
        AgentStarted(workflow=workflow, seq=2, time=now, agent="planner", step=0),
        AgentEnded(workflow=workflow, seq=3, time=now, agent="planner", step=0, next=("coder",)),
        AgentStarted(workflow=workflow, seq=4, time=now, agent="coder", step=1),
        ToolStarted(workflow=workflow, seq=5, time=now, **tool),
        ToolEnded(workflow=workflow, seq=6, time=now, duration=0.5, **tool),
        AgentEnded(workflow=workflow, seq=7, time=now, agent="coder", step=1, next=("tester",)),
        WorkflowEnded(workflow=workflow, seq=8, time=now),
    ]
