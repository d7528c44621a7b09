"""Fairness by hand: whose turn it is, between tenants and between workflows, and whose KV gives way."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

import pytest

from agentflow.cache.policy import Evicted, PoolState, WaitingCall
from agentflow.events import WorkflowPaused

if TYPE_CHECKING:
    from tests.runtime.policies.conftest import World


def backlog(
    world: World, shares: dict[str, int], *, rounds: int, tenants: Mapping[str, str] | None = None, slots: int = 1
) -> Counter[str]:
    """Workflows that always have as many calls waiting as ``shares`` says, each of a tenant of its own or of the one in
    ``tenants``, and as many calls at once as ``slots``; how many of each were served."""
    waiting: list[WaitingCall] = []
    running: list[WaitingCall] = []
    count = 0
    for workflow in shares:
        world.begin(workflow, tenant=(tenants or {}).get(workflow, workflow))
    served: Counter[str] = Counter()
    while served.total() < rounds:
        for workflow, most in shares.items():
            while sum(c.call.thread.workflow.id == workflow for c in waiting) < most:
                count += 1
                waiting.append(world.arrive(f"r{count}", workflow))
        for first in world.order(waiting)[: slots - len(running)]:
            running.append(next(c for c in waiting if c.request == first))
            waiting.remove(running[-1])
        world.finish(running[0])
        served[running.pop(0).call.thread.workflow.id] += 1
    return served


def test_a_tenant_with_a_hundred_calls_waiting_gets_no_more_than_one_with_two(world: type[World]) -> None:
    served = backlog(world([{"name": "fairness", "quantum": 1}]), {"greedy": 100, "modest": 2}, rounds=400)
    assert abs(served["greedy"] - served["modest"]) <= 20  # of 400, while lengths of answers are being learned


def test_service_follows_weights(world: type[World]) -> None:
    made = world([{"name": "fairness", "quantum": 1, "weights": {"gold": 3.0}}])
    served = backlog(made, {"gold": 10, "base": 10}, rounds=400)
    assert 2.7 <= served["gold"] / served["base"] <= 3.3


@pytest.mark.parametrize("slots", [1, 4])
def test_workflows_of_one_tenant_have_equal_parts_however_many_calls_they_send(world: type[World], slots: int) -> None:
    of = {"a": "t", "b": "t", "c": "u"}
    served = backlog(world([{"name": "fairness", "quantum": 1}]), {"a": 30, "b": 1}, rounds=600, tenants=of)
    assert abs(served["a"] - served["b"]) <= 20
    beside = world([{"name": "fairness", "quantum": 1, "weights": {"u": 2.0}}])
    served = backlog(beside, {"a": 30, "b": 5, "c": 5}, rounds=900, tenants=of, slots=slots)
    assert abs(served["a"] - served["b"]) <= 30  # while the calls that came first run in the order of their tags
    assert 1.9 <= served["c"] / (served["a"] + served["b"]) <= 2.1


@pytest.mark.parametrize("level", ["tenants", "workflows"])
def test_a_stream_of_newcomers_passes_nobody_for_ever(world: type[World], level: str) -> None:
    """Each newcomer had nothing yet, and there is always another one."""
    made = world([{"name": "fairness", "quantum": 1}])
    made.begin("long", tenant="t")
    waiting = [made.arrive(f"long{i}", "long") for i in range(10)]
    for i in range(2_000):
        made.begin(f"w{i}", tenant=f"t{i}" if level == "tenants" else "t")
        waiting.append(made.arrive(f"r{i}", f"w{i}"))
        first = made.order(waiting)[0]
        call = next(c for c in waiting if c.request == first)
        waiting.remove(call)
        made.finish(call)
        if call.request == "long9":
            return
    raise AssertionError("the last call of the long workflow never ran")


def test_calls_that_are_aborted_leave_the_order_as_it_was(world: type[World]) -> None:
    made = world([{"name": "fairness", "quantum": 1}])
    for name in "ab":
        made.begin(name, tenant=name)
    many = [made.arrive(f"a{i}", "a", tokens=1_000) for i in range(20)]
    made.finish(many.pop(), output=0)  # it was far behind: time does not go on to it
    many.append(made.arrive("a0", "a", tokens=1_000))  # one that comes again has one turn
    late = made.arrive("b0", "b")
    assert made.order([*many, late])[0] == "b0"
    for call in (*many, late):
        made.finish(call)
    made.finish(late)
    assert made.runtime.counters["policy_errors"] == 0
    assert made.runtime.policies[0].stats()["calls"] == 21


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


def test_what_a_tenant_left_goes_before_what_others_use(world: type[World]) -> None:
    made = world(["fairness"], pool=1_000)
    nodes = {}
    for name, tokens in (("gone", 200), ("silent", 50), ("big", 600), ("small", 100)):
        made.begin(name, tenant=name)
        call = made.arrive(name, name, tokens=tokens)
        nodes[name] = made.touch(call, tokens=tokens)
        made.finish(call)
    common = made.touch(made.arrive("s2", "small"), made.touch(made.arrive("g2", "gone"), tokens=10))
    anonymous = made.touch(made.arrive("x", None), made.touch(made.arrive("g3", "gone"), tokens=10))
    for request, workflow in (("g2", "gone"), ("g3", "gone"), ("s2", "small"), ("x", None)):
        made.finish(WaitingCall(request, made.runtime.call(workflow, "a", None, "end"), 10, 0, made.now))
    made.end("gone")
    made.event(WorkflowPaused, "small")
    made.now += 10 * 3_600.0
    made.arrive("b2", "big")
    made.runtime.observe(PoolState(1_000, 40))
    assert set(made.runtime.rescored()) == {"gone", "silent", "big"}
    score = made.runtime.score_record
    assert score(nodes["gone"]) == score(nodes["silent"]) < score(nodes["big"]) < score(nodes["small"])
    assert score(common) == score(anonymous) == score(nodes["small"])
    assert made.runtime.evicted(nodes["gone"], "evict", request=None).reason == "tenant gone has nothing to run"
    assert made.runtime.evicted(nodes["big"], "evict", request=None).terms["share"] == 500.0


def test_a_tenant_that_comes_back_is_protected_again(world: type[World]) -> None:
    made = world(["fairness"], pool=1_000)
    for name in ("back", "other"):
        made.begin(name, tenant=name)
    call = made.arrive("r1", "back")
    node = made.touch(call, tokens=100)
    made.finish(call)
    made.end("back")
    made.now += 10.0
    made.runtime.observe(PoolState(1_000, 900))
    made.runtime.rescored()
    low = made.runtime.score_record(node)
    made.begin("again", tenant="back")
    made.arrive("r2", "again")
    made.runtime.observe(PoolState(1_000, 900))
    assert low < made.runtime.score_record(node)
    assert set(made.runtime.rescored()) == {"back", "again"}


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
