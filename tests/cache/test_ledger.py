"""Which nodes are live: by hand-worked cases, and against a plain model under random histories."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentflow.cache.ledger import Ledger, Limits, NodeRecord
from agentflow.events import (
    StateSuperseded,
    ToolEnded,
    ToolStarted,
    WorkflowEnded,
    WorkflowPaused,
    WorkflowResumed,
    WorkflowStarted,
)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ledger(clock: Clock) -> Ledger:
    return Ledger(clock=clock)


def node(n: int = 1) -> NodeRecord:
    return NodeRecord(n, 10, 0.0)


def test_a_node_is_live_until_its_workflow_ends(ledger: Ledger) -> None:
    a = node()
    ledger.observe(WorkflowStarted(workflow="w", seq=1))
    ledger.touch(a, ledger.call("w", "planner", None, "r1"))
    assert ledger.is_live(a)
    ledger.observe(WorkflowEnded(workflow="w", seq=2))
    assert not ledger.is_live(a)
    assert ledger.retired_because(a) == "workflow w ended"


def test_a_shared_node_lives_as_long_as_one_of_its_workflows(ledger: Ledger) -> None:
    a = node()
    for w in ("v", "w"):
        ledger.touch(a, ledger.call(w, "planner", None, f"r-{w}"))
    ledger.observe(WorkflowEnded(workflow="v", seq=2))
    assert ledger.is_live(a)
    ledger.observe(WorkflowEnded(workflow="w", seq=2))
    assert not ledger.is_live(a)


def test_paused_is_not_ended(ledger: Ledger) -> None:
    a = node()
    ledger.touch(a, ledger.call("w", "planner", None, "r"))
    ledger.observe(WorkflowPaused(workflow="w", seq=1))
    assert ledger.is_live(a)
    assert ledger.counts() == (0, 1)
    ledger.observe(WorkflowResumed(workflow="w", seq=2))
    assert ledger.counts() == (1, 0)


def test_a_late_event_does_not_undo_a_newer_one(ledger: Ledger) -> None:
    a = node()
    ledger.touch(a, ledger.call("w", "planner", None, "r"))
    ledger.observe(WorkflowEnded(workflow="w", seq=5, time=10.0))
    ledger.observe(WorkflowStarted(workflow="w", seq=1, time=9.0))
    assert not ledger.is_live(a)


def test_a_new_run_of_an_ended_workflow_starts_again_with_small_numbers(ledger: Ledger) -> None:
    ledger.observe(WorkflowEnded(workflow="w", seq=50, time=10.0))
    ledger.observe(WorkflowStarted(workflow="w", seq=1, time=11.0))
    assert ledger.counts() == (1, 0)


def test_a_call_brings_an_ended_workflow_back(ledger: Ledger) -> None:
    ledger.observe(WorkflowEnded(workflow="w", seq=5, time=10.0))
    a = node()
    ledger.touch(a, ledger.call("w", "planner", None, "r"))
    assert ledger.is_live(a)


def test_superseding_an_agents_state_keeps_what_its_newest_call_used(ledger: Ledger) -> None:
    prefix, old_tail, new_tail = node(1), node(2), node(3)
    first = ledger.call("w", "coder", None, "r1")
    ledger.touch(prefix, first)
    ledger.touch(old_tail, first)
    second = ledger.call("w", "coder", None, "r2")
    ledger.touch(prefix, second)
    ledger.touch(new_tail, second)
    ledger.observe(StateSuperseded(workflow="w", agent="coder", seq=1))
    assert ledger.is_live(prefix)
    assert ledger.is_live(new_tail)
    assert not ledger.is_live(old_tail)
    assert ledger.retired_because(old_tail) == "superseded state of workflow w"


def test_superseding_a_request_or_a_branch(ledger: Ledger) -> None:
    shared, left, right = node(1), node(2), node(3)
    a = ledger.call("w", "worker", "left", "r1")
    b = ledger.call("w", "worker", "right", "r2")
    for call, own in ((a, left), (b, right)):
        ledger.touch(shared, call)
        ledger.touch(own, call)
    ledger.observe(StateSuperseded(workflow="w", branch="left", seq=1))
    assert [ledger.is_live(n) for n in (shared, left, right)] == [True, False, True]
    ledger.observe(StateSuperseded(workflow="w", request="r2", seq=2))
    assert [ledger.is_live(n) for n in (shared, left, right)] == [False, False, False]


def test_nodes_of_unknown_callers_stay_live(ledger: Ledger) -> None:
    a = node()
    ledger.touch(a, ledger.call(None, None, None, "r"))
    assert ledger.is_live(a)


def test_a_silent_workflow_expires_and_a_paused_one_waits_longer(ledger: Ledger, clock: Clock) -> None:
    a, b = node(1), node(2)
    ledger.touch(a, ledger.call("silent", "x", None, "r1"))
    ledger.touch(b, ledger.call("paused", "x", None, "r2"))
    ledger.observe(WorkflowPaused(workflow="paused", seq=1))
    clock.now += ledger.limits.idle_seconds + 1
    assert not ledger.is_live(a)
    assert ledger.is_live(b)
    assert ledger.retired_because(a) == "workflow silent silent for too long"
    clock.now += ledger.limits.paused_seconds
    assert not ledger.is_live(b)


def test_splitting_a_record_keeps_its_owners(ledger: Ledger) -> None:
    tail = NodeRecord(1, 10, 0.0)
    ledger.touch(tail, ledger.call("w", "x", None, "r"))
    head = tail.split(2, 4)
    assert (head.tokens, tail.tokens) == (4, 6)
    assert ledger.is_live(head)
    ledger.touch(head, ledger.call("v", "x", None, "r"))
    ledger.observe(WorkflowEnded(workflow="w", seq=1))
    assert ledger.is_live(head)
    assert not ledger.is_live(tail)


def test_tools_that_are_out_are_known_until_they_return(ledger: Ledger) -> None:
    ledger.observe(ToolStarted(workflow="w", seq=1, agent="a", tool="bash", call_id="c1"))
    assert ledger.workflows["w"].tools == {"c1": ("bash", "a", 1000.0)}
    ledger.observe(ToolEnded(workflow="w", seq=2, agent="a", tool="bash", call_id="c1", duration=1.0))
    assert ledger.workflows["w"].tools == {}


def test_state_is_bounded_under_a_long_run(clock: Clock) -> None:
    limits = Limits(workflows=100, threads_per_workflow=10, tools_per_workflow=10, path_per_workflow=8)
    ledger = Ledger(clock=clock, limits=limits)
    root = node()
    for i in range(5_000):
        clock.now += 0.01
        w = f"w{i}"
        for k in range(3):
            ledger.touch(root, ledger.call(w, f"agent{k}", f"branch{i}", f"r{i}-{k}"))
        ledger.observe(ToolStarted(workflow=w, seq=1, tool="t", call_id=f"c{i}"))
        if i % 2:
            ledger.observe(WorkflowEnded(workflow=w, seq=2, time=clock.now))
    busy = "w-busy"
    for i in range(2_000):
        ledger.call(busy, f"agent{i % 7}", f"branch{i}", f"r{i}")
        ledger.observe(ToolStarted(workflow=busy, seq=i, tool="t", call_id=f"c{i}"))
    assert len(ledger.workflows) <= limits.workflows
    workflow = ledger.workflows[busy]
    assert len(workflow.threads) <= limits.threads_per_workflow
    assert len(workflow.tools) <= limits.tools_per_workflow
    assert len(workflow.path) <= limits.path_per_workflow
    assert len(root.owners) <= 2 * 3 * limits.workflows
    assert ledger.dropped_workflows > 0


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["call", "end", "pause", "supersede"]),
        st.integers(0, 2),  # workflow
        st.integers(0, 1),  # agent
        st.sets(st.integers(0, 5)),  # nodes
    ),
    max_size=40,
)


@given(ACTIONS)
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_liveness_agrees_with_a_plain_model(actions: list[tuple[str, int, int, set[int]]]) -> None:
    """The model keeps every touch, with the run of the workflow that it fell in, and looks through all of them."""
    ledger = Ledger(clock=lambda: 0.0)
    nodes = {i: node(i) for i in range(6)}
    run = dict.fromkeys(range(3), 0)
    ended: set[int] = set()
    calls: dict[tuple[int, int, int], int] = {}
    superseded_below: dict[tuple[int, int, int], int] = {}
    touches: set[tuple[int, tuple[int, int, int], int]] = set()
    for time, (what, w, a, touched) in enumerate(actions, start=1):
        thread = (w, run[w], a)
        if what == "call":
            ended.discard(w)
            ref = ledger.call(f"w{w}", f"a{a}", None, f"r{time}")
            for n in touched:
                ledger.touch(nodes[n], ref)
                touches.add((n, thread, calls.get(thread, 0)))
            calls[thread] = calls.get(thread, 0) + 1
        elif what == "end":
            ended.add(w)
            run[w] += 1
            ledger.observe(WorkflowEnded(workflow=f"w{w}", seq=time, time=float(time)))
        elif what == "pause":
            ended.discard(w)
            ledger.observe(WorkflowPaused(workflow=f"w{w}", seq=time, time=float(time)))
        else:
            superseded_below[thread] = max(superseded_below.get(thread, 0), calls.get(thread, 0) - 1)
            ledger.observe(StateSuperseded(workflow=f"w{w}", agent=f"a{a}", seq=time, time=float(time)))
    for n, record in nodes.items():
        expected = any(
            touched_node == n and thread[0] not in ended and number >= superseded_below.get(thread, 0)
            for touched_node, thread, number in touches
        )
        assert ledger.is_live(record) == expected
