"""Every policy inside the real SGLang, and ttl under a pool that is too small for what it pins."""

import asyncio
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

from agentflow.engine.base import Call, Completion, Coordinates, Sampling
from agentflow.engine.embedded import EmbeddedEngine
from agentflow.events import ToolEnded, ToolStarted, WorkflowEnded

pytestmark = pytest.mark.engine

POOL = 2_000
NAMES = [
    "autellix", "continuum", "continuum-preview", "fifo", "infercept", "kvflow", "kvflow-oracle", "lfu", "lifecycle",
    "lru", "priority", "session", "slru", "ttl",
]  # fmt: skip
#: A pin that outlasts the test whatever the machine does.
PIN: dict[str, Any] = {"name": "continuum-preview", "pin_seconds": 600.0}


@pytest.fixture
def limited(engine: EmbeddedEngine) -> Iterator[EmbeddedEngine]:
    yield engine
    engine.control("configure", {"policies": ["lifecycle"], "reset": True})


def configure(engine: EmbeddedEngine, *policies: Any) -> None:
    engine.flush()
    engine.control("configure", {"policies": list(policies), "reset": True, "device_tokens": POOL, "host_tokens": 1})


def prompt(seed: int, tokens: int = 300) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1_000, 40_000) for _ in range(tokens)]


def ask(engine: EmbeddedEngine, workflow: str, ids: list[int], agent: str = "a") -> Completion:
    at = Coordinates(workflow=workflow, agent=agent)
    return engine.generate(Call(token_ids=ids, at=at, sampling=Sampling(max_tokens=4, ignore_eos=True)))


def tool(engine: EmbeddedEngine, workflow: str, name: str, call_id: str = "t") -> None:
    engine.emit(ToolStarted(workflow=workflow, agent="a", tool=name, call_id=call_id, time=time.time()))
    engine.flush()


def tool_done(engine: EmbeddedEngine, workflow: str, name: str, seconds: float, call_id: str = "t") -> None:
    engine.emit(ToolEnded(workflow=workflow, agent="a", tool=name, call_id=call_id, duration=seconds, time=time.time()))
    engine.flush()


def healthy(engine: EmbeddedEngine) -> None:
    deadline = time.monotonic() + 20.0
    while (report := engine.control("check"))[0]["idle"] is False and time.monotonic() < deadline:
        pass  # the answer is there a moment before the scheduler is at rest
    assert report == [{"idle": True, "problems": []}]
    counters = engine.stats().counters
    assert [counters.get(k, 0) for k in ("policy_errors", "internal_errors", "policies_left_out")] == [0, 0, 0]


@pytest.mark.parametrize("name", NAMES)
def test_every_policy_runs_in_the_scheduler_under_pressure(name: str, limited: EmbeddedEngine) -> None:
    configure(limited, name)
    for turn in range(2):
        for w in range(8):
            ask(limited, f"w{w}", prompt(w) + prompt(100 * turn + w, 50), agent=f"agent{turn}")
            tool(limited, f"w{w}", "ls", f"t{turn}")
            tool_done(limited, f"w{w}", "ls", 0.1, f"t{turn}")
    for w in range(8):
        limited.emit(WorkflowEnded(workflow=f"w{w}", seq=1_000, time=time.time()))
    limited.flush()
    stats = limited.stats()
    assert stats.policy == name
    assert stats.counters["evict"] > 0
    healthy(limited)


@pytest.mark.parametrize(("policy", "kept"), [("lru", False), (PIN, True)])
def test_a_pin_keeps_over_a_tool_call_what_lru_loses(policy: Any, kept: bool, limited: EmbeddedEngine) -> None:
    configure(limited, policy)
    ask(limited, "agent", prompt(1))
    tool(limited, "agent", "ls")
    for other in range(10):  # 3,000 tokens of others pass through a pool of 2,000
        ask(limited, f"other{other}", prompt(50 + other))
    again = ask(limited, "agent", prompt(1))
    assert (again.usage.cached >= 299) is kept
    healthy(limited)


def test_ttl_decides_by_what_it_was_told_of_the_tool_and_says_so(limited: EmbeddedEngine) -> None:
    configure(limited, {"name": "ttl", "enough": 1, "enough_each": 1})
    for name, seconds in (("fast", 1e-5), ("slow", 1e5)):
        for i in range(20):
            tool(limited, "teacher", name, f"{name}{i}")
            tool_done(limited, "teacher", name, seconds, f"{name}{i}")
    for workflow, name in (("v", "fast"), ("w", "slow")):
        ask(limited, workflow, prompt(len(name)))
        tool(limited, workflow, name)
    ask(limited, "x", prompt(3))  # decisions are written between the steps of the scheduler
    pins = {d.workflows[0]: d for d in limited.decisions() if d.kind == "pin"}
    assert list(pins) == ["v"]
    assert pins["v"].terms["tau"] == 1e-5
    assert pins["v"].tokens == 304
    assert [d.workflows for d in limited.decisions() if d.kind == "release"] == [("v",)]
    healthy(limited)


def test_a_load_from_the_host_is_timed_and_makes_a_miss_cheaper(limited: EmbeddedEngine) -> None:
    limited.flush()
    limited.control("configure", {"policies": ["ttl"], "reset": True, "device_tokens": POOL, "host_tokens": 4 * POOL})
    ask(limited, "agent", prompt(1))
    for other in range(8):  # what the agent left goes to the host
        ask(limited, f"other{other}", prompt(50 + other))
    again = ask(limited, "agent", prompt(1))
    assert again.usage.cached_host >= 290
    healthy(limited)
    known = limited.stats().details["policies"]["ttl"]
    assert known["found_on_host"] > 0.9
    assert 0.0 < known["reload_seconds_per_token"] < known["prefill_seconds_per_token"]
    assert known["reload_seconds_per_token"] != 2e-5, "the prior, as if nothing had been measured"


def test_with_every_program_pinned_and_every_tool_hung_all_calls_go_on(limited: EmbeddedEngine) -> None:
    configure(limited, PIN)
    for w in range(12):
        ask(limited, f"w{w}", prompt(w))
        tool(limited, f"w{w}", "hung")
    for w in range(12):
        assert len(ask(limited, f"w{w}", prompt(w)).token_ids) == 4
    # The pool was filled with pins; who arrived first kept its KV longest.
    evicted = [d.workflows[0] for d in limited.decisions() if d.kind == "evict" and d.workflows]
    assert evicted
    assert evicted[0] != "w0"
    healthy(limited)


def policy_stats(engine: EmbeddedEngine) -> dict[str, float]:
    return dict(next(iter(engine.stats().details["policies"].values())))


def until(engine: EmbeddedEngine, name: str, value: float) -> None:
    """Wait until a count of the policy has that value."""
    deadline = time.monotonic() + 20.0
    while (found := policy_stats(engine))[name] != value:
        assert time.monotonic() < deadline, found
        ask(engine, "other", prompt(7, 8))  # the scheduler looks at its policies when it has something to do


def until_running(engine: EmbeddedEngine, something: bool) -> None:
    """Wait until some call runs, or none."""
    deadline = time.monotonic() + 20.0
    while bool(engine.stats().running) is not something:
        assert time.monotonic() < deadline


def test_a_tool_that_returns_after_its_pin_ran_out_is_served_like_any_other(limited: EmbeddedEngine) -> None:
    configure(limited, {"name": "continuum-preview", "pin_seconds": 0.05})
    ask(limited, "agent", prompt(1))
    tool(limited, "agent", "ls")
    until(limited, "pins", 0.0)
    tool_done(limited, "agent", "ls", 0.051)
    assert len(ask(limited, "agent", prompt(1)).token_ids) == 4
    found = policy_stats(limited)
    assert found["expired"] == 1.0
    assert found["returned_to_none"] == 1.0
    healthy(limited)


def test_a_workflow_cancelled_while_its_tool_runs_leaves_no_pin(limited: EmbeddedEngine) -> None:
    configure(limited, PIN)
    for w in range(3):
        ask(limited, f"w{w}", prompt(w))
        tool(limited, f"w{w}", "hung")
    assert policy_stats(limited)["pins"] == 3.0
    for w in range(3):
        limited.emit(WorkflowEnded(workflow=f"w{w}", seq=1_000, time=time.time(), outcome="cancelled"))
        tool_done(limited, f"w{w}", "hung", 1.0)
    found = policy_stats(limited)
    assert [found[n] for n in ("pins", "pinned_tokens", "programs", "tools_running")] == [0.0] * 4
    healthy(limited)


async def test_a_call_cancelled_while_its_pin_is_held_gives_both_back(limited: EmbeddedEngine) -> None:
    configure(limited, PIN)
    ask(limited, "w", prompt(1))
    tool(limited, "w", "ls")
    call = Call(
        token_ids=prompt(1), at=Coordinates(workflow="w", agent="a"), sampling=Sampling(max_tokens=800, ignore_eos=True)
    )
    running = asyncio.ensure_future(limited.agenerate(call))
    await asyncio.to_thread(until_running, limited, True)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    limited.emit(WorkflowEnded(workflow="w", seq=1_000, time=time.time(), outcome="cancelled"))
    limited.flush()
    await asyncio.to_thread(until_running, limited, False)
    assert policy_stats(limited)["pins"] == 0.0
    healthy(limited)


@pytest.mark.slow
def test_ten_thousand_workflows_leave_bounded_state(limited: EmbeddedEngine) -> None:
    configure(limited, "ttl")
    ask(limited, "first", prompt(1))
    for w in range(12_000):
        limited.emit(ToolStarted(workflow=f"w{w}", agent="a", tool=f"tool{w % 700}", call_id="t", time=time.time()))
    limited.flush()
    details = limited.stats().details
    assert details["workflows_known"] <= 10_000
    found = details["policies"]["ttl"]
    assert found["tools_running"] <= 8_192
    assert found["programs"] <= 10_000
    assert len(ask(limited, "w11999", prompt(2)).token_ids) == 4
    healthy(limited)
