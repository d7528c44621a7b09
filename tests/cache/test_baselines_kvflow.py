"""KVFlow: distances, hold values, ties, prefetch, and the oracle's distances, on hand-worked graphs."""

from collections.abc import Callable
from typing import Any

from agentflow.cache.policy import Evicted, Prefetch
from agentflow.events import AgentEnded, AgentStarted

Make = Callable[..., Any]

#: plan -> search -> read -> plan or answer
LOOP = {"__start__": ["plan"], "plan": ["search"], "search": ["read"], "read": ["plan", "answer"]}


def kvflow(**options: Any) -> dict[str, Any]:
    return {"name": "kvflow", "edges": LOOP, **options}


def test_steps_are_the_shortest_way_from_the_agent_that_ran_last(drive: Make) -> None:
    d = drive(kvflow())
    for agent, node in (("plan", "p"), ("search", "s"), ("read", "r"), ("answer", "x")):
        d.run("w", agent, node)
    d.run("w", "search", "s")
    # From search: read 1, plan and answer 2, search itself 3.
    assert [d.policy.hold(d.nodes[n]) for n in "rpxs"] == [1, 2, 2, 3]
    assert d.order() == "spxr"  # the farthest first, of equals the least recent
    assert d.why("p").terms == {"steps": 2.0}


def test_the_agent_that_runs_now_is_zero_steps_away(drive: Make) -> None:
    d = drive(kvflow())
    d.run("w", "plan", "p")
    waiting = d.arrive("w", "plan")
    assert d.policy.hold(d.nodes["p"]) == 0
    d.finish(waiting)
    assert d.policy.hold(d.nodes["p"]) == 3
    # With the framework's events an agent runs until they say that it ended, tools between its calls included.
    d.event(AgentStarted(workflow="w", agent="plan"))
    d.run("w", "plan", "p")
    assert d.policy.hold(d.nodes["p"]) == 0
    d.event(AgentEnded(workflow="w", agent="plan"))
    assert d.policy.hold(d.nodes["p"]) == 3


def test_a_node_has_the_minimum_of_its_agents_over_all_workflows(drive: Make) -> None:
    d = drive(kvflow())
    d.run("v", "read", "a")
    d.run("w", "read", "a")
    d.run("v", "plan", "b")  # v is at plan: read in 2
    d.run("w", "search", "c")  # w is at search: read in 1
    assert d.policy.hold(d.nodes["a"]) == 1
    d.end("w")
    assert d.policy.hold(d.nodes["a"]) == 2
    d.end("v")
    assert d.policy.hold(d.nodes["a"]) == 9


def test_unknown_unreachable_and_far_agents_count_as_one_beyond_the_limit(drive: Make) -> None:
    d = drive(kvflow(limit=2))
    d.run("w", "answer", "x")
    d.run("w", "stranger", "y")
    d.run("w", "search", "s")
    d.run("w", "plan", "p")
    assert d.policy.hold(d.nodes["x"]) == 3  # 3 steps from plan, over the limit of 2
    assert d.policy.hold(d.nodes["y"]) == 3
    d.run(None, nodes="z")
    assert d.policy.hold(d.nodes["z"]) == 3
    assert d.order() == "xypzs"
    assert "over 2 steps" in d.why("x").reason


def test_released_code_breaks_ties_by_creation_and_the_paper_by_recency(drive: Make) -> None:
    for ties, expected in (("recency", "ba"), ("none", "ab")):
        d = drive(kvflow(ties=ties))
        d.run("w", "plan", "a")
        d.run("w", "plan", "b")
        d.run("w", "plan", "a")
        assert d.order() == expected


def test_without_a_graph_it_is_recency(drive: Make) -> None:
    d = drive("kvflow")
    d.run("w", "x", "ab")
    d.run("w", "y", "a")
    assert d.order() == "ba"


def test_host_kv_of_agents_one_step_away_is_prefetched_once(drive: Make) -> None:
    d = drive(kvflow())
    d.run("w", "search", "s")
    d.run("w", "read", "r")
    d.runtime.act()
    for name in "sr":
        d.runtime.observe(Evicted(d.nodes[name], "device"))
    assert d.runtime.act() == []  # nobody made a step
    d.arrive("w", "plan")  # search is next, read two away
    assert d.runtime.act() == [Prefetch(d.nodes["s"].id, "an agent one step away", value=10.0)]
    assert d.runtime.act() == []
    d.run("w", "search", "s")  # s is back on the device; read is next
    assert [e.node for e in d.runtime.act()] == [d.nodes["r"].id]


def test_nothing_is_prefetched_that_left_the_host_or_whose_workflow_ended(drive: Make) -> None:
    d = drive(kvflow())
    d.run("v", "search", "a")
    d.run("w", "search", "b")
    for name in "ab":
        d.runtime.observe(Evicted(d.nodes[name], "device"))
    d.runtime.observe(Evicted(d.nodes["a"], "host"))
    d.arrive("v", "plan")
    d.arrive("w", "plan")
    d.end("w")
    assert d.runtime.act() == []


def test_what_is_remembered_of_the_host_is_bounded_and_forgotten(drive: Make) -> None:
    d = drive(kvflow())
    for i in range(40):
        d.run(f"w{i}", "plan", "a")
        d.run(f"w{i}", "plan", chr(1000 + i))
        d.runtime.observe(Evicted(d.nodes[chr(1000 + i)], "device"))
    d.runtime.observe(Evicted(d.nodes["a"], "device"))
    for i in range(40):
        d.end(f"w{i}")
    # The shared node is known to eight workflows at most, and goes with the host's copy.
    d.runtime.observe(Evicted(d.nodes["a"], "host"))
    assert len(d.policy._host) == 0
    assert not d.policy._host._by_workflow
    assert not d.policy._running


def test_the_oracle_knows_the_true_steps_of_a_dynamic_workflow(drive: Make) -> None:
    d = drive({"name": "kvflow-oracle", "futures": {"w": ["plan", "search", "search", "plan", "answer"]}})
    d.run("w", "plan", "p")
    d.run("w", "search", "s")
    # Two of five calls are over: search comes next, plan after it, answer last.
    d.touch(d.arrive("v", "answer"), "x")
    assert [d.policy._steps(d.runtime.ledger.workflows["w"], a) for a in ("search", "plan", "answer")] == [1, 2, 3]
    assert [d.policy.hold(d.nodes[n]) for n in "sp"] == [1, 2]
    d.run("w", "search", "s")
    assert d.policy.hold(d.nodes["s"]) == 9  # never again
    assert d.policy.hold(d.nodes["p"]) == 1
    assert d.order("sp") == "sp"


def test_the_oracle_can_be_told_while_it_runs(drive: Make) -> None:
    d = drive("kvflow-oracle")
    d.policy.tell("w", ["a", "b", "a"])
    d.run("w", "a", "n")
    assert d.policy.hold(d.nodes["n"]) == 2
    d.end("w")
    assert d.policy.hold(d.nodes["n"]) == 9
    assert not d.policy._futures
