"""SGLang's own strategies, sessions included, on hand-worked cases and against SGLang's classes."""

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from agentflow.cache.ledger import Ledger, NodeRecord
from agentflow.cache.policy import make_policies, policy_names
from agentflow.errors import UsageError
from agentflow.events import WorkflowStarted

Make = Callable[..., Any]


def test_lru_evicts_in_the_order_of_last_use(drive: Make) -> None:
    d = drive("lru")
    d.run("w", nodes="abc")
    d.run("w", nodes="a")
    assert d.order() == "bca"


def test_lfu_counts_each_request_once_and_the_maker_of_a_node_too(drive: Make) -> None:
    d = drive("lfu")
    d.run("w", nodes="abc")
    d.run("w", nodes="b")
    long = d.arrive("v")
    for _ in range(5):  # chunks of one prefill
        d.touch(long, "c")
    d.run(None, nodes="c")
    assert [d.nodes[n].hits for n in "abc"] == [1, 2, 3]
    assert d.order() == "abc"
    assert d.why("c").terms == {"hits": 3.0}


def test_lfu_breaks_ties_by_recency_and_both_halves_of_a_split_keep_the_count(drive: Make) -> None:
    d = drive("lfu")
    d.run("w", nodes="ab")
    d.run("w", nodes="ba")
    assert d.order() == "ba"
    head = d.nodes["a"].split(99, 4)
    assert (head.hits, d.nodes["a"].hits) == (2, 2)


def test_calls_without_a_workflow_count_once_each(drive: Make) -> None:
    d = drive("lfu")
    request = d.arrive(None)
    d.touch(request, "a")
    d.touch(request, "a")
    d.run(None, nodes="a")
    assert d.nodes["a"].hits == 2


def test_slru_protects_from_the_second_request_on(drive: Make) -> None:
    d = drive("slru")
    d.run("w", nodes="a")
    d.run("w", nodes="a")
    d.run("w", nodes="b")
    d.run("w", nodes="c")
    assert d.order() == "bca"  # a is older than both but protected
    assert d.why("a").reason.startswith("protected")
    strict = drive({"name": "slru", "protected_threshold": 3})
    for nodes in ("a", "a", "b"):
        strict.run("w", nodes=nodes)
    assert strict.order() == "ab"


def test_fifo_goes_by_creation_whatever_was_used_since(drive: Make) -> None:
    d = drive("fifo")
    for name in "abc":
        d.now += 1.0
        d.run("w", nodes=name)
    d.run("w", nodes="a")
    assert d.order() == "abc"
    d.nodes["h"], d.recency["h"] = d.nodes["c"].split(10_000, 4), 0.0
    assert d.order() == "abch"


def test_priority_is_the_highest_of_the_requests_that_used_a_node(drive: Make) -> None:
    d = drive("priority")
    d.run("w", nodes="ab", priority=1)
    d.run("w", nodes="a", priority=5)
    d.run("w", nodes="a", priority=0)
    d.run("w", nodes="c", priority=-3)
    d.run("w", nodes="d")
    assert d.order() == "cdba"
    assert d.score("a")[0] == 5.0


def test_priority_of_tenants_graphs_and_agents(drive: Make) -> None:
    d = drive({"name": "priority", "tenants": {"gold": 10}, "graphs": {"batch": -5}, "agents": {"planner": 1}})
    d.event(WorkflowStarted(workflow="g", seq=1, tenant="gold"))
    d.event(WorkflowStarted(workflow="b", seq=1, graph="batch"))
    d.run("g", "coder", "a")
    d.run("b", "planner", "b")
    d.run("x", "planner", "c")
    d.run("x", "coder", "d")
    assert d.order() == "bdca"
    d.run("g", "planner", "b")  # shared with the gold tenant's planner
    assert d.score("b")[0] == 11.0


def test_kv_of_closed_sessions_goes_first_then_what_fewest_open_ones_use(drive: Make) -> None:
    d = drive("session")
    d.run("v", nodes="ab")
    d.run("w", nodes="a")
    d.run("u", nodes="c")
    d.run(None, nodes="d")
    d.end("u")
    assert d.order() == "cdba"
    assert d.score("a")[:2] == (1.0, 2.0)
    d.end("v")
    assert d.order() == "bcda"  # b is now unreferenced and the oldest of those
    assert d.why("b").reason.startswith("used by no open session")


STRATEGIES = {
    "lru": "LRUStrategy",
    "lfu": "LFUStrategy",
    "slru": "SLRUStrategy",
    "fifo": "FIFOStrategy",
    "priority": "PriorityStrategy",
}


@pytest.mark.engine
@pytest.mark.parametrize("name", STRATEGIES)
def test_random_histories_are_ordered_as_sglangs_own_strategy_orders_them(name: str, drive: Make) -> None:
    evict_policy = pytest.importorskip("sglang.srt.mem_cache.evict_policy")
    strategy = getattr(evict_policy, STRATEGIES[name])()
    for seed in range(20):
        rng = random.Random(seed)
        d = drive(name)
        theirs: dict[str, Any] = {}
        for step in range(60):
            d.now += 1.0
            chosen = rng.sample("abcdefgh", rng.randint(1, 3))
            priority = rng.randint(0, 3)
            d.run(rng.choice(["v", "w", None]), nodes="".join(chosen), priority=priority)
            for n in chosen:
                node = theirs.setdefault(n, SimpleNamespace(hit_count=0, creation_time=step, priority=priority))
                node.hit_count += 1
                node.last_access_time = d.recency[n]
                node.priority = max(node.priority, priority)
        if name == "fifo":  # nodes made by one call come one after the other
            theirs = {n: SimpleNamespace(creation_time=d.nodes[n].id) for n in theirs}
        assert list(d.order()) == sorted(theirs, key=lambda n: strategy.get_priority(theirs[n]))


NAMES = [
    "autellix", "continuum", "continuum-preview", "fifo", "infercept", "kvflow", "kvflow-oracle", "lfu", "lifecycle",
    "lru", "priority", "session", "slru", "ttl",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_each_is_made_by_name_and_refuses_unknown_options(name: str) -> None:
    ledger = Ledger(clock=lambda: 0.0)
    assert name in policy_names()
    (made,) = make_policies([name], ledger, lambda: 0.0)
    assert made.name == name
    with pytest.raises(UsageError, match=name):
        make_policies([{"name": name, "no_such_option": 1}], ledger, lambda: 0.0)


@pytest.mark.parametrize(
    "spec",
    [
        {"name": "slru", "protected_threshold": 0},
        {"name": "kvflow", "ties": "sometimes"},
        {"name": "kvflow", "limit": 0},
        {"name": "kvflow", "distances": "oracle"},
        {"name": "continuum-preview", "pin_seconds": 0},
        {"name": "autellix", "thresholds": []},
        {"name": "ttl", "budget": 0},
        {"name": "ttl", "budget": 1.5},
        {"name": "ttl", "patience": -1},
        {"name": "ttl", "timeouts": "ignored"},
        {"name": "ttl", "grace": -1},
        {"name": "ttl", "seed": {"format": "else"}},
    ],
)
def test_options_out_of_range_are_refused(spec: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=spec["name"]):
        make_policies([spec], Ledger(clock=lambda: 0.0), lambda: 0.0)


def test_a_node_that_nobody_used_yet_can_be_scored(drive: Make) -> None:
    for name in ("lfu", "slru", "fifo", "priority", "session", "kvflow", "ttl", "continuum", "infercept"):
        d = drive(name)
        score = d.runtime.score_node(NodeRecord(1, 10, 0.0), 0.0)
        assert len(d.runtime.policies) == 1
        assert score == tuple(map(float, score))
