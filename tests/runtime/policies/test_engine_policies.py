"""Fairness, shaping and admission by hand: who runs next, who waits, what gives way, and what is remembered."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import pytest

from agentflow.cache.policy import HOLD, CallArrived, Evicted, LoadAdapter, PoolState, WaitingCall
from agentflow.errors import UsageError
from agentflow.events import AgentStarted, StateSuperseded, WorkflowEnded, WorkflowPaused, WorkflowStarted
from agentflow.runtime import Runtime
from agentflow.runtime.policies.admission import Admission

if TYPE_CHECKING:
    from tests.runtime.policies.conftest import World

# -- fairness ---------------------------------------------------------------------------------------------


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


def serve(world: World, waiting: list[WaitingCall], running: dict[str, tuple[float, WaitingCall]]) -> None:
    """One second of an engine on which a call takes 3: what is held waits, unless nothing else would run."""
    world.now += 1.0
    for request in [r for r, (until, _) in running.items() if until <= world.now]:
        world.finish(running.pop(request)[1])
    world.runtime.observe(PoolState(world.pool, 0))
    free = [call for call in waiting if HOLD not in world.score(call)] or waiting[: not running]
    for call in free:
        waiting.remove(call)
        running[call.request] = (world.now + 3.0, call)


def endless(
    world: World, programs: Mapping[str, int], seconds: int, waiting: Sequence[WaitingCall] = ()
) -> Counter[str]:
    """Programs of so many tokens that begin one after another, send a call a second after the last one was done, and
    never end; how many calls of each were done. And calls that wait from the beginning."""
    queue = list(waiting)
    running: dict[str, tuple[float, WaitingCall]] = {}
    done: Counter[str] = Counter()
    for second in range(seconds):
        busy = {c.call.thread.workflow.id for c in (*queue, *(c for _, c in running.values()))}
        before = dict(running)
        for begins, (name, tokens) in enumerate(programs.items()):
            if second >= begins and name not in busy:
                queue.append(world.arrive(f"{name}-{second}", name, tokens=tokens))
        serve(world, queue, running)
        done.update(call.call.thread.workflow.id for r, (_, call) in before.items() if r not in running)
    return done


def test_a_program_larger_than_the_pool_goes_on_beside_others_that_never_end(world: type[World]) -> None:
    made = world(["admission"])
    for name in ("m1", "m2"):
        made.score(first := made.arrive(name, name, tokens=2_000))
        made.finish(first)
    for i in range(10):  # 17,000 in a pool of 10,000
        made.score(call := made.arrive(f"big{i}", "big", agent=f"agent{i}", tokens=1_700))
        made.finish(call)
    late = [made.arrive("big", "big", agent="agent0", tokens=1_700), made.arrive("new", "new")]
    done = endless(made, {"m1": 2_000, "m2": 2_000}, 20, late)
    assert done["big"] == done["new"] == 1


def test_every_held_call_runs_in_the_end(world: type[World]) -> None:
    """Twelve programs that never end, with room for seven: those that wait go on in turn, for a while each."""
    made = world([{"name": "admission", "high": 0.9, "low": 0.6, "patience": 60.0}], pool=1_000)
    done = endless(made, {f"p{i}": 120 for i in range(12)}, 1_800)
    assert len(done) == 12
    assert min(done.values()) >= 60  # a call takes 4 seconds, a turn 60; six had turns
    assert 20 <= made.runtime.policies[0].stats()["total_favoured"] <= 1_800 / 60
    assert load(made) <= 960  # of 900, and the one whose turn it is


def test_a_paused_program_bars_new_ones_for_a_bounded_time(world: type[World]) -> None:
    made = world([{"name": "admission", "high": 0.9, "low": 0.6, "patience": 60.0}], pool=1_000)
    for name, tokens in (("old", 300), ("young", 300), ("old", 700)):
        made.score(call := made.arrive(f"{name}{tokens}", name, tokens=tokens))
        made.finish(call)
    made.arrive("old-again", "old", tokens=700)
    paused, new = made.arrive("young2", "young", tokens=300), made.arrive("new", "new", tokens=10)
    made.now += 59.0
    assert made.score(new) == made.score(paused) == (HOLD,)
    made.now += 1.0
    assert made.score(new) == (0.0,)  # 710 of 900
    assert made.score(paused) == (0.0,)  # 1010 of 600, but none waited longer
    assert made.score(made.arrive("next", "next", tokens=10)) == (HOLD,)


def load(world: World) -> float:
    return world.runtime.policies[0].stats()["load"]


def test_what_ended_children_and_branches_held_counts_no_more(world: type[World]) -> None:
    made = world(["admission"])
    made.begin("root")
    for i in range(40):
        made.event(WorkflowStarted, f"child{i}", parent="root")
        call = made.arrive(f"r{i}", f"child{i}", tokens=1_000)
        made.score(call)
        made.finish(call)
        made.event(WorkflowPaused if i % 2 else WorkflowEnded, f"child{i}", parent="root")
    assert load(made) == 0
    for branch in ("x", "y"):
        made.runtime.observe(CallArrived(branch, made.runtime.call("root", "a", branch, branch), 500))
    assert load(made) == 1_000
    made.event(StateSuperseded, "root", branch="x")
    assert load(made) == 500


def test_a_childs_calls_count_for_its_program_in_whatever_order_they_are_heard_of(world: type[World]) -> None:
    made = world(["admission"])
    made.begin("root")
    early = made.arrive("early", "grandchild", tokens=700)
    assert made.score(early) == (0.0,)
    made.event(AgentStarted, "grandchild", agent="a", parent="child")
    made.event(AgentStarted, "child", agent="a", parent="root")
    made.event(AgentStarted, "root", agent="a", parent="grandchild")  # nonsense, and harmless
    made.score(own := made.arrive("own", "root", tokens=100))
    assert load(made) == 800
    assert made.runtime.policies[0].stats()["admitted"] == 1
    made.event(WorkflowEnded, "grandchild", parent="child")
    assert load(made) == 100
    made.finish(early)  # after the end of its workflow
    made.finish(own)
    made.now += 1_000.0
    made.runtime.observe(PoolState(10_000, 0))
    assert made.runtime.policies[0].stats()["admitted"] == 0


def test_a_waiting_call_goes_with_its_child_to_a_program_that_is_admitted(world: type[World]) -> None:
    made = world([{"name": "admission", "high": 0.9, "low": 0.7}], pool=1_000)
    assert made.score(made.arrive("r1", "root", tokens=800)) == (0.0,)
    held = made.arrive("r2", "child", tokens=800)
    assert made.score(held) == (HOLD,)
    made.event(AgentStarted, "child", agent="a", parent="root")
    assert made.score(held) == (0.0,)


def test_calls_that_end_after_their_workflow_leave_nothing(world: type[World]) -> None:
    made = world(["admission"])
    for i in range(50):
        made.begin(f"w{i}")
        call, waiting = made.arrive(f"r{i}", f"w{i}"), made.arrive(f"s{i}", f"w{i}")
        made.score(call)
        made.end(f"w{i}")
        assert made.score(waiting) == (0.0,)  # nothing to hold it for
        made.finish(call)
        made.finish(waiting)
    late = made.arrive("late", "w0")
    made.finish(late)
    made.now += 1_000.0
    made.runtime.observe(PoolState(10_000, 0))
    admission = made.runtime.policies[0]
    assert isinstance(admission, Admission)
    assert not admission._programs
    assert load(made) == 0


def test_the_nodes_of_a_paused_programs_children_are_ranked_anew(world: type[World]) -> None:
    made = world([{"name": "admission", "high": 0.9, "low": 0.6}], pool=1_000)
    made.score(old := made.arrive("old", "old", tokens=300))
    made.finish(old)
    made.event(WorkflowStarted, "child", parent="young")
    made.score(call := made.arrive("young", "child", tokens=400))
    node = made.touch(call)
    made.finish(call)
    made.finish(made.arrive("old2", "old", tokens=700))
    assert made.runtime.score_record(node) == (0.0,)
    assert set(made.runtime.rescored()) == {"young", "child"}


def test_a_clock_that_is_set_back_makes_nobody_wait(world: type[World]) -> None:
    made = world([{"name": "admission", "high": 0.9, "low": 0.7, "silent": 60.0, "patience": 200.0}], pool=1_000)
    made.now = 1e6
    made.runtime.observe(PoolState(1_000, 0))
    made.score(first := made.arrive("r1", "dead", tokens=800))
    made.finish(first)
    held = made.arrive("r2", "b", tokens=800)
    made.now -= 3_600.0
    made.runtime.observe(PoolState(1_000, 0))
    assert made.score(held) == (HOLD,)
    made.now += 61.0
    made.runtime.observe(PoolState(1_000, 0))
    assert made.score(held) == (0.0,)


def test_the_load_follows_the_pool(world: type[World]) -> None:
    made = world(["admission"], pool=500)
    made.score(made.arrive("r1", "a", tokens=800))
    assert load(made) == 500  # more of it cannot be cached
    made.runtime.observe(PoolState(1_000, 0))
    assert load(made) == 800


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
        {"name": "admission", "patience": -1.0},
        {"name": "cachesage", "threshold": 0.0},
        {"name": "adapters", "threshold": 2.0},
    ],
)
def test_bad_options(spec: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        Runtime([spec])
