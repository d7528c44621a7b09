"""Shaping and adapters by hand, who comes before whom, and options that are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from agentflow.cache.policy import HOLD, LoadAdapter
from agentflow.errors import UsageError
from agentflow.runtime import Runtime

if TYPE_CHECKING:
    from tests.runtime.policies.conftest import World

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
