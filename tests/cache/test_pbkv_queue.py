"""PBKV with the waiting queue as step 0, and its order of that queue."""

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from agentflow.cache.ledger import CallRef, NodeRecord
from agentflow.cache.policy import CallArrived, CallFinished, WaitingCall
from agentflow.errors import UsageError
from agentflow.events import WorkflowEnded
from agentflow.runtime import Runtime

Make = Callable[..., Any]


def runtime() -> Runtime:
    ticks = count()
    return Runtime([{"name": "pbkv-queue", "trust": False, "horizon": 1}], clock=lambda: next(ticks) * 1e-3)


def arrive(layer: Runtime, workflow: str, agent: str, request: str) -> CallRef:
    call = layer.call(workflow, agent, None, request)
    layer.observe(CallArrived(request, call, 10))
    return call


def touched(layer: Runtime, node: int, *calls: CallRef) -> NodeRecord:
    record = NodeRecord(node, 10, 0.0)
    for call in calls:
        layer.ledger.touch(record, call)
    return record


def order(layer: Runtime, *nodes: NodeRecord) -> list[int]:
    return [n.id for n in sorted(nodes, key=lambda n: layer.score_node(n, 0.0))]


def test_what_a_waiting_call_reads_stays_and_that_of_the_first_workflow_longest() -> None:
    layer = runtime()
    nodes = []
    for i, w in enumerate(("a", "b", "idle")):
        first = arrive(layer, w, "solver", f"{w}1")
        nodes.append(touched(layer, i, first))
        layer.observe(CallFinished(f"{w}1", first))
    arrive(layer, "b", "solver", "b2")
    arrive(layer, "a", "solver", "a2")
    assert order(layer, *nodes) == [2, 1, 0], "a began before b, and so it runs first"


def test_a_finished_call_waits_no_longer() -> None:
    layer = runtime()
    first = arrive(layer, "a", "solver", "a1")
    node = touched(layer, 1, first)
    waiting = layer.score_node(node, 0.0)
    layer.observe(CallFinished("a1", first))
    layer.observe(CallFinished("a1", first))
    assert layer.score_node(node, 0.0) < waiting


def test_retired_before_active_and_private_before_shared() -> None:
    layer = runtime()
    private = touched(layer, 1, arrive(layer, "a", "solver", "a1"))
    shared = touched(layer, 2, arrive(layer, "a", "solver", "a2"), arrive(layer, "b", "solver", "b1"))
    live = touched(layer, 3, arrive(layer, "c", "solver", "c1"))
    for w in ("a", "b"):
        layer.observe(WorkflowEnded(workflow=w, seq=1))
    assert order(layer, live, shared, private) == [1, 2, 3]


def test_a_node_of_two_waiting_workflows_is_worth_both() -> None:
    layer = runtime()
    a, b = arrive(layer, "a", "solver", "a1"), arrive(layer, "b", "solver", "b1")
    both, one = touched(layer, 1, a, b), touched(layer, 2, b)
    assert order(layer, both, one) == [2, 1]


def test_calls_run_by_the_beginning_of_their_workflow_and_preempted_ones_first(drive: Make) -> None:
    d = drive("pbkv-queue")
    d.run("first")
    d.now += 1.0
    d.run("second")
    d.now += 1.0
    late, stranger = d.arrive("second"), d.arrive(None)
    d.now += 1.0
    early, fresh = d.arrive("first"), d.arrive("third")
    assert d.queue(late, stranger, early, fresh) == [early.id, late.id, stranger.id, fresh.id]
    assert d.queue(late, early, fresh, preempted=[fresh]) == [fresh.id, early.id, late.id]


def test_no_call_starves_behind_older_workflows(drive: Make) -> None:
    d = drive({"name": "pbkv-queue", "patience": 60.0})
    d.run("old")
    d.now += 1.0
    poor = d.arrive("young")
    d.now += 61.0
    assert d.queue(d.arrive("old"), poor)[0] == poor.id


def test_the_queue_can_be_left_as_it_is(drive: Make) -> None:
    d = drive({"name": "pbkv-queue", "order_calls": False})
    r = d.arrive("w")
    assert d.runtime.score_call(WaitingCall(r.id, r.call, r.tokens, 0, r.arrived)) == ()
    with pytest.raises(UsageError):
        drive({"name": "pbkv-queue", "patience": -1.0})
