"""Admission by hand: who waits, who is paused and goes on, and what is remembered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from agentflow.cache.policy import HOLD, CallArrived, PoolState, WaitingCall
from agentflow.events import AgentStarted, StateSuperseded, WorkflowEnded, WorkflowPaused, WorkflowStarted
from agentflow.runtime.policies.admission import Admission

if TYPE_CHECKING:
    from tests.runtime.policies.conftest import World


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
