"""Continuum as released and as in the paper, and InferCept, by hand: where they agree and where they differ."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from agentflow.cache.policy import PoolState

Make = Callable[..., Any]


def kept(d: Any, name: str) -> bool:
    return d.policy.pin_of(d.nodes[name]) is not None


# -- the released preview ------------------------------------------------------------------------------------


def test_preview_pins_two_seconds_for_unknown_and_for_fast_tools(drive: Make) -> None:
    d = drive("continuum-preview")
    d.run("w", nodes="a")
    assert not kept(d, "a")  # a turn without a tool is the last
    d.tool("w", "unknown")
    d.now += 2.0
    assert kept(d, "a")
    d.now += 0.01
    assert not kept(d, "a")
    d.learn("edge", [1.0, 3.0])  # a mean of exactly 2 s
    d.run("w", nodes="a")
    d.tool("w", "edge", "t2")
    assert kept(d, "a")


def test_preview_does_not_pin_for_tools_slower_than_the_pin_on_average(drive: Make) -> None:
    d = drive("continuum-preview")
    d.learn("slow", [0.1] * 9 + [30.0])  # mostly fast, 3.1 s on average
    d.run("w", nodes="a")
    d.tool("w", "slow")
    assert not kept(d, "a")
    assert "too slow" in d.why("a").reason
    d.tool("w", "unknown", "t2")  # of several the slowest counts
    assert not kept(d, "a")
    paper = drive({"name": "continuum", "enough": 5, "prefill": 0.1})
    paper.learn("slow", [0.1] * 9 + [30.0])
    paper.run("w", nodes="a")
    paper.tool("w", "slow")
    assert paper.why("a").terms["tau"] == 0.1  # the paper waits for the fast nine of ten


def test_preview_holds_the_pin_while_the_programs_request_waits(drive: Make) -> None:
    d = drive("continuum-preview")
    d.run("w", nodes="a")
    d.tool("w", "ls")
    d.now += 1.0
    request = d.arrive("w")
    d.now += 100.0
    assert kept(d, "a")
    d.finish(request)
    assert not kept(d, "a")


def test_preview_runs_pinned_programs_first_and_knows_no_preemption(drive: Make) -> None:
    d = drive("continuum-preview")
    d.run("old")
    d.now += 1.0
    d.run("pinned")
    d.tool("pinned", "ls")
    old, pinned = d.arrive("old"), d.arrive("pinned")
    assert d.queue(old, pinned, preempted=[old]) == [pinned.id, old.id]
    paper = drive("continuum")
    old = paper.arrive("old")
    paper.now += 1.0
    pinned = paper.arrive("pinned")
    assert paper.queue(pinned, old, preempted=[pinned]) == [pinned.id, old.id]
    assert paper.queue(pinned, old) == [old.id, pinned.id]


# -- the paper -----------------------------------------------------------------------------------------------


def test_paper_starts_from_an_exponential_of_one_second_and_eta_one(drive: Make) -> None:
    d = drive({"name": "continuum", "prefill": 0.1})
    d.learn("ls", [50.0] * 99)
    d.run("w", nodes="a")
    d.tool("w", "ls")
    terms = d.why("a").terms
    assert terms["tau"] == pytest.approx(math.log(10.0))  # benefit 10 s, mean 1 s, cost 1
    assert (terms["eta"], terms["known"]) == (1.0, 0.0)


def test_paper_goes_from_the_prior_to_all_tools_to_the_tool_at_a_hundred(drive: Make) -> None:
    d = drive({"name": "continuum", "prefill": 0.1})
    d.learn("ls", [1.0] * 100)
    d.learn("cat", [3.0] * 99)

    def tau(tool: str, call_id: str) -> tuple[float, float]:
        d.run("w", nodes="a")
        d.tool("w", tool, call_id)
        terms = d.why("a").terms
        d.tool_done("w", tool, 3.0, call_id)
        return terms["tau"], terms["known"]

    assert tau("cat", "t1") == (3.0, 1.0)  # over all: 10 - 3 against 0.5 * 10 - 1
    assert tau("ls", "t2") == (1.0, 2.0)
    assert tau("cat", "t3") == (3.0, 2.0)  # its hundredth was t1's


def test_paper_cost_is_tau_and_benefit_is_prefill_plus_queueing_times_eta(drive: Make) -> None:
    d = drive({"name": "continuum", "enough": 1, "prefill": 0.01})
    d.learn("ls", [5.0])
    d.runtime.observe(PoolState(total=10_000, free=0, held=10, running=10))  # sizes do not matter to it
    d.run("w", nodes="a")
    d.tool("w", "ls")
    assert d.why("a").terms["tau"] == 0.0  # 1 s of prefill against 5 s
    d.run("w", nodes="a", told_queue_seconds=5.5)
    d.tool("w", "ls", "t2")
    terms = d.why("a").terms
    assert (terms["benefit"], terms["cost_per_second"], terms["tau"]) == (pytest.approx(6.5), 1.0, 5.0)


def test_paper_counts_a_timeout_as_a_return_and_no_tool_that_still_runs(drive: Make) -> None:
    d = drive({"name": "continuum", "enough": 1, "prefill": 1.0})
    d.tool("v", "ls", "hung")
    d.tool_done("v", "ls", 30.0, "hung", outcome="timeout")
    for i in range(50):
        d.tool("v", "ls", f"running{i}")
    d.now += 1000.0
    d.run("w", nodes="a")
    d.tool("w", "ls")
    assert (d.why("a").terms["tau"], d.why("a").terms["p"]) == (30.0, 1.0)


# -- InferCept -----------------------------------------------------------------------------------------------


def test_infercept_keeps_for_as_long_as_discarding_would_waste(drive: Make) -> None:
    d = drive({"name": "infercept", "prefill": 0.01})
    d.run("w", nodes="a")  # C = 100, T_fwd = 1 s
    d.runtime.observe(PoolState(total=10_000, free=0, held=700, running=3))
    d.tool("w", "any")
    # 1 s * (100 + 700) / 2 / 100 = 4 s, whatever is known of the tool.
    terms = d.why("a").terms
    assert (terms["tau"], terms["discard_waste"], terms["forward"]) == pytest.approx((4.0, 400.0, 1.0))
    d.now += 4.0
    assert kept(d, "a")
    d.now += 0.01
    assert not kept(d, "a")


def test_infercept_with_nothing_else_running_and_with_the_measured_prefill(drive: Make) -> None:
    d = drive("infercept")
    d.run("w", nodes="a", told_prefill_seconds=2.0)
    d.tool("w", "any")
    assert d.why("a").terms["tau"] == pytest.approx(1.0)  # 2 s * (100 + 0) / 2 / 100
    d.run("v", nodes="b", tokens=0)
    d.tool("v", "any")
    assert not kept(d, "b")


def test_infercept_serves_by_the_programs_arrival_whatever_is_pinned(drive: Make) -> None:
    d = drive({"name": "infercept", "prefill": 1.0})
    d.run("old")
    d.now += 1.0
    d.run("pinned")
    d.tool("pinned", "ls")
    pinned, old = d.arrive("pinned"), d.arrive("old")
    assert d.queue(pinned, old) == [old.id, pinned.id]
    assert d.queue(pinned, old, preempted=[pinned]) == [pinned.id, old.id]
