"""Fairness, shaping and admission by hand: who runs next, who waits, what gives way, and what is remembered."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from agentflow.cache.policy import HOLD, Evicted, LoadAdapter, PoolState
from agentflow.errors import UsageError
from agentflow.events import AgentStarted
from agentflow.runtime import Runtime

if TYPE_CHECKING:
    from tests.runtime.policies.conftest import World

# -- fairness ---------------------------------------------------------------------------------------------


def backlog(world: World, shares: dict[str, int], *, rounds: int) -> Counter[str]:
    """Tenants that always have as many calls waiting as ``shares`` says; how many of each were served."""
    waiting = []
    count = 0
    for tenant in shares:
        world.begin(tenant, tenant=tenant)
    served: Counter[str] = Counter()
    for _ in range(rounds):
        for tenant, most in shares.items():
            while sum(c.call.thread.workflow.tenant == tenant for c in waiting) < most:
                count += 1
                waiting.append(world.arrive(f"r{count}", tenant))
        first = world.order(waiting)[0]
        call = next(c for c in waiting if c.request == first)
        waiting.remove(call)
        served[call.call.thread.workflow.tenant] += 1
        world.finish(call)
    return served


def test_a_tenant_with_a_hundred_calls_waiting_gets_no_more_than_one_with_two(world: type[World]) -> None:
    served = backlog(world([{"name": "fairness", "quantum": 1}]), {"greedy": 100, "modest": 2}, rounds=400)
    assert abs(served["greedy"] - served["modest"]) <= 20  # of 400, while lengths of answers are being learned


def test_service_follows_weights(world: type[World]) -> None:
    made = world([{"name": "fairness", "quantum": 1, "weights": {"gold": 3.0}}])
    served = backlog(made, {"gold": 10, "base": 10}, rounds=400)
    assert 2.7 <= served["gold"] / served["base"] <= 3.3


def test_nobody_starves_whatever_comes(world: type[World]) -> None:
    """A call that waits is passed only by a bounded amount of others' service."""
    rng = random.Random(3)
    made = world([{"name": "fairness", "quantum": 1}])
    for n in range(5):
        made.begin(f"t{n}", tenant=f"t{n}")
    lonely = made.arrive("lonely", "t4", tokens=2_000)
    waiting = [lonely]
    for i in range(600):
        waiting.append(made.arrive(f"r{i}", f"t{rng.randrange(4)}", tokens=rng.randrange(10, 500)))
        first = made.order(waiting)[0]
        call = next(c for c in waiting if c.request == first)
        waiting.remove(call)
        made.finish(call, output=rng.randrange(1, 100))
        if call is lonely:
            return
    raise AssertionError("the lonely call never ran")


def test_a_tenant_over_its_share_of_the_cache_loses_first(world: type[World]) -> None:
    made = world([{"name": "fairness"}], pool=1_000)
    made.begin("a", tenant="a")
    made.begin("b", tenant="b")
    call_a, call_b = made.arrive("r1", "a"), made.arrive("r2", "b")
    big, small = made.touch(call_a, tokens=800), made.touch(call_b, tokens=100)
    common = made.touch(call_a, made.touch(call_b, tokens=10))
    made.runtime.observe(PoolState(1_000, 0))
    assert set(made.runtime.rescored()) == {"a"}
    assert made.runtime.score_record(big) < made.runtime.score_record(small)
    assert made.runtime.score_record(common) == made.runtime.score_record(small)
    why = made.runtime.evicted(big, "evict", request=None)
    assert "more than its share" in why.reason
    made.runtime.observe(PoolState(1_000, 800))
    assert made.runtime.score_record(big) == made.runtime.score_record(small)


def test_the_cache_bill_survives_splits(world: type[World]) -> None:
    made = world([{"name": "fairness"}], pool=1_000)
    made.begin("a", tenant="a")
    call = made.arrive("r1", "a")
    node = made.touch(call, tokens=100)
    head = node.split(99, 40)
    made.touch(call, head)
    made.touch(call, node)
    held = made.runtime.policies[0].stats()["held:a"]
    assert held == 100
    for each in (head, node):
        made.runtime.observe(Evicted(each, "device"))
    assert "held:a" not in made.runtime.policies[0].stats()


# -- shaping ----------------------------------------------------------------------------------------------


def test_calls_of_one_anchor_run_together(world: type[World]) -> None:
    made = world(["shaping"])
    calls = []
    for i in range(6):
        made.begin(f"w{i}")
        calls.append(made.arrive(f"r{i}", f"w{i}", "ab"[i % 2], anchor=1 + i % 2))
        made.now += 0.01
    assert made.order(calls) == ["r0", "r2", "r4", "r1", "r3", "r5"]


def test_a_late_call_joins_its_group(world: type[World]) -> None:
    made = world(["shaping"])
    for name in "xyz":
        made.begin(name)
    first = made.arrive("r0", "x", "b")
    made.now += 0.1
    calls = [first, made.arrive("r1", "y", "a")]
    made.now += 0.1
    calls.append(made.arrive("r2", "z", "b"))
    assert made.order(calls) == ["r0", "r2", "r1"]
    made.touch(first)
    made.touch(calls[2])
    made.now += 0.1
    assert made.order([made.arrive("r3", "x", "b"), calls[1]]) == ["r1", "r3"]  # a new group of the same agent


def test_nobody_waits_longer_than_the_bound(world: type[World]) -> None:
    made = world([{"name": "shaping", "max_delay": 1.0}])
    made.begin("x")
    made.begin("y")
    first = made.arrive("r0", "x", "b")
    made.now += 0.1
    old = made.arrive("old", "y", "a")
    made.touch(first)
    made.now += 0.1
    waiting = made.arrive("r1", "x", "b")
    made.now += 0.9
    late = [made.arrive("r2", "x", "b"), waiting, old]
    assert made.order(late) == ["old", "r2", "r1"]
    made.now += 0.1  # now both have waited too long
    assert made.order(late)[:2] == ["old", "r1"]


# -- admission --------------------------------------------------------------------------------------------


def test_programs_beyond_the_room_wait_and_come_in_when_others_end(world: type[World]) -> None:
    made = world([{"name": "admission", "high": 0.9, "low": 0.7}], pool=1_000)
    for name in "abc":
        made.begin(name)
    first, second = made.arrive("r1", "a", tokens=500), made.arrive("r2", "b", tokens=500)
    assert made.score(first) == (0.0,)
    assert made.score(second) == (HOLD,)
    made.finish(first)
    assert made.score(second) == (HOLD,)  # between two calls the program still holds its KV
    made.end("a")
    assert made.score(second) == (0.0,)


def test_one_program_is_always_admitted_however_large(world: type[World]) -> None:
    made = world([{"name": "admission", "high": 0.9, "low": 0.7}], pool=100)
    made.begin("a")
    assert made.score(made.arrive("r1", "a", tokens=5_000)) == (0.0,)


def test_pause_at_a_tool_boundary_and_resume_with_hysteresis(world: type[World]) -> None:
    made = world([{"name": "admission", "high": 0.9, "low": 0.6}], pool=1_000)
    made.begin("old")
    made.begin("young")
    calls = {}
    for name in ("old", "young"):
        calls[name] = made.arrive(f"{name}1", name, tokens=300)
        assert made.score(calls[name]) == (0.0,)
        made.touch(calls[name])
        made.finish(calls[name])
    node = made.touch(calls["young"])
    grown = made.arrive("old2", "old", tokens=700)  # 1000 of 900: the young one is between two calls
    assert made.score(grown) == (0.0,)
    made.finish(grown)
    assert made.runtime.policies[0].stats()["paused"] == 1
    assert made.runtime.score_record(node) == (0.0,)
    assert "young" in made.runtime.rescored()
    made.runtime.act()
    assert next(d.reason for d in made.runtime.log.since(0)).startswith("paused at a tool boundary")
    again = made.arrive("young2", "young", tokens=310)
    assert made.score(again) == (HOLD,)
    made.finish(made.arrive("old3", "old", tokens=500))  # 810 with both: below high, not below low
    assert made.score(again) == (HOLD,)
    made.begin("new")
    assert made.score(made.arrive("n1", "new", tokens=10)) == (HOLD,)  # those that were interrupted go on first
    made.end("old")
    assert made.score(again) == (0.0,)


def test_a_workflow_that_another_started_is_one_program_with_it(world: type[World]) -> None:
    made = world([{"name": "admission", "high": 0.9, "low": 0.7}], pool=1_000)
    made.begin("a")
    assert made.score(made.arrive("r1", "a", tokens=800)) == (0.0,)
    made.event(AgentStarted, "child", agent="x", parent="a")
    assert made.score(made.arrive("r2", "child", "x", tokens=800)) == (0.0,)


def test_a_silent_program_does_not_block_others_for_ever(world: type[World]) -> None:
    made = world([{"name": "admission", "high": 0.9, "low": 0.7, "silent": 60.0}], pool=1_000)
    made.begin("dead")
    first = made.arrive("r1", "dead", tokens=800)
    assert made.score(first) == (0.0,)
    made.finish(first)
    made.begin("b")
    second = made.arrive("r2", "b", tokens=800)
    assert made.score(second) == (HOLD,)
    made.now += 61.0
    made.runtime.observe(PoolState(1_000, 0))
    assert made.score(second) == (0.0,)


# -- adapters ---------------------------------------------------------------------------------------------


def test_the_adapter_of_the_agent_that_follows_is_asked_for(world: type[World]) -> None:
    made = world(["adapters"])
    for i in range(3):
        made.begin(f"w{i}")
        for agent in "ab":
            made.step(f"w{i}", agent)
            made.finish(made.arrive(f"r{i}{agent}", f"w{i}", agent, adapter=f"lora-{agent}"))
            made.runtime.act()
        made.end(f"w{i}")
    made.begin("next")
    made.step("next", "a")
    assert made.runtime.act() == []  # the agent's own adapter goes first
    made.arrive("first", "next", "a", adapter="lora-a")
    assert [type(e) for e in made.runtime.act()] == [LoadAdapter]
    assert made.runtime.act() == []  # once a call


# -- precedence -------------------------------------------------------------------------------------------


def test_precedence_is_fixed_whatever_the_order_chosen() -> None:
    runtime = Runtime(["lifecycle", "shaping", "cachesage", "fairness", "admission"])
    assert runtime.live_names == ("admission", "fairness", "shaping", "lifecycle", "cachesage")


def test_a_hold_is_stronger_than_fairness_and_fairness_than_shaping(world: type[World]) -> None:
    made = world(
        ["shaping", {"name": "fairness", "quantum": 1}, {"name": "admission", "high": 0.9, "low": 0.7}], pool=1_000
    )
    for name, tenant in (("w1", "busy"), ("w2", "busy"), ("w3", "idle"), ("w4", "idle")):
        made.begin(name, tenant=tenant)
    running = made.arrive("r1", "w1", "a", tokens=300)
    made.score(running)
    made.touch(running)
    same_agent = made.arrive("r2", "w2", "a", tokens=300)  # it came first: shaping would run it first
    other_tenant = made.arrive("r3", "w3", "b", tokens=200)  # fairness prefers it: its tenant had nothing yet
    too_large = made.arrive("r4", "w4", "a", tokens=2_000)  # admission holds it
    calls = [too_large, same_agent, other_tenant]
    assert made.order(calls) == ["r3", "r2", "r4"]
    assert HOLD in made.score(too_large)


# -- bounds -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec",
    [
        {"name": "fairness", "weights": {"a": 0.0}},
        {"name": "shaping", "max_delay": -1.0},
        {"name": "admission", "low": 0.9, "high": 0.8},
        {"name": "cachesage", "threshold": 0.0},
        {"name": "adapters", "threshold": 2.0},
    ],
)
def test_bad_options(spec: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        Runtime([spec])
