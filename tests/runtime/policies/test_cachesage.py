"""CacheSage by hand: what it learns, how it ranks, what it has computed ahead, and how little it keeps."""

from __future__ import annotations

import random
import sys
from typing import TYPE_CHECKING, Any

import pytest

from agentflow.cache.ledger import NodeRecord
from agentflow.cache.policy import Evicted, WarmUp
from agentflow.cache.survival import OUTSIDE, Transitions
from agentflow.events import WorkflowPaused, WorkflowResumed

if TYPE_CHECKING:
    from tests.runtime.policies.conftest import World


def taught(world: type[World], *, workflows: int = 6, agents: str = "abcd", **options: Any) -> World:
    """A world in which workflows went round the agents one after another; each has an anchor."""
    made = world([{"name": "cachesage", **options}])
    for i in range(workflows):
        made.begin(f"w{i}")
        for n, agent in enumerate(agents):
            made.step(f"w{i}", agent)
            made.finish(made.arrive(f"w{i}{agent}", f"w{i}", agent, anchor=n + 1))
            made.now += 1.0
        made.end(f"w{i}")
    return made


def anchor_node(world: World, agent: str, key: int, workflow: str = "w") -> NodeRecord:
    node = world.touch(world.arrive(f"touch{agent}", workflow, agent, anchor=key), tokens=50)
    node.anchor = key
    return node


# -- transitions ------------------------------------------------------------------------------------------


def test_shares_and_hops() -> None:
    seen = Transitions(threshold=0.2)
    a, b, c = (seen.number(n) for n in "abc")
    for _ in range(9):
        seen.learn(a, b)
        seen.learn(b, c)
    seen.learn(a, c)  # a tenth: no edge
    assert seen.probability(a, b) == 0.9
    assert seen.following(a) == [(b, 0.9)]
    assert [seen.hops(a, n) for n in (a, b, c)] == [0, 1, 2]
    assert seen.hops(c, a) == 255
    assert list(seen.nearest([b, c]))[a : c + 1] == [255, 0, 0]


def test_the_window_forgets() -> None:
    seen = Transitions(window=10)
    a, b, c = (seen.number(n) for n in "abc")
    for _ in range(10):
        seen.learn(a, b)
    for _ in range(10):
        seen.learn(a, c)
    assert seen.following(a) == [(c, 1.0)]
    assert seen.hops(a, b) == 255
    assert seen.hops(a, c) == 1


def test_hops_agree_with_a_search_by_hand_after_any_history() -> None:
    rng = random.Random(11)
    for _ in range(30):
        seen = Transitions(agents=6, window=40, threshold=rng.choice([0.05, 0.2, 0.4]))
        numbers = [OUTSIDE, *(seen.number(n) for n in "abcdef")]
        for _ in range(rng.randrange(1, 200)):
            seen.learn(rng.choice(numbers), rng.choice(numbers))
        seen._stale = True
        for source in numbers:
            reached, ring, distance = {source: 0}, [source], 0
            while ring:
                distance += 1
                ring = [
                    n for m in ring for n in numbers if n not in reached and seen.probability(m, n) >= seen.threshold
                ]
                reached.update(dict.fromkeys(ring, distance))
            assert [seen.hops(source, n) for n in numbers] == [reached.get(n, 255) for n in numbers]


# -- score ------------------------------------------------------------------------------------------------


def test_plain_recency_while_nothing_is_known(world: type[World]) -> None:
    made = world(["cachesage"])
    nodes = [NodeRecord(i, 10, made.now) for i in range(3)]
    assert {made.runtime.score_record(n) for n in nodes} == {(0.0,)}


def test_the_next_agents_anchor_outranks_what_was_used_after_it(world: type[World]) -> None:
    made = taught(world)
    made.begin("w")
    nodes = {agent: anchor_node(made, agent, n + 1) for n, agent in enumerate("abcd")}
    made.end("w")
    made.begin("x")
    made.step("x", "b")
    scores = {agent: made.runtime.score_record(node) for agent, node in nodes.items()}
    assert scores["b"] > scores["c"] > scores["d"]  # 0, 1 and 2 hops away
    made.now += 0.5
    recent = made.touch(made.arrive("late", "old", "nobody"), tokens=50)
    made.end("old")
    assert made.runtime.score_record(recent) < scores["c"]


def test_text_of_a_session_is_worth_what_its_own_place_says(world: type[World]) -> None:
    made = taught(world)
    made.begin("x")
    made.begin("y")
    for workflow in "xy":
        made.step(workflow, "a")
    mine = made.touch(made.arrive("rx", "x", "a"))
    theirs = made.touch(made.arrive("ry", "y", "a"))
    made.step("y", "d")  # y is at its last agent: a is far away for it
    assert made.runtime.score_record(theirs) < made.runtime.score_record(mine)
    made.end("x")
    assert made.runtime.score_record(mine) == (mine.last_access,)


def long_ago_and_now(world: World) -> tuple[float, float]:
    """Ranks of text of the agent that is next, used two hours ago, and of text of nobody, used now."""
    world.begin("x")
    world.step("x", "a")
    near = world.touch(world.arrive("long ago", "x", "b"))
    world.step("x", "a")
    world.now += 7_200.0
    other = world.touch(world.arrive("now", None))
    return world.runtime.score_record(near)[0], world.runtime.score_record(other)[0]


def test_the_time_that_a_workflow_is_paused_is_no_step(world: type[World]) -> None:
    made = taught(world, workflows=30)
    for workflow in "pq":
        made.begin(workflow)
        made.step(workflow, "a")
        made.event(WorkflowPaused, workflow)
    made.now += 86_400.0
    for workflow in "pq":
        made.event(WorkflowResumed, workflow)
        made.step(workflow, "b")
    made.now += 1.0
    made.step("p", "c")  # this step is one again
    long_ago, now = long_ago_and_now(made)
    assert long_ago < now


def test_a_step_that_takes_hours_says_little_of_the_others(world: type[World]) -> None:
    made = taught(world, workflows=30)
    for workflow in "pqrs":
        made.begin(workflow)
        made.step(workflow, "a")
    made.now += 86_400.0
    for workflow in "pqrs":
        made.step(workflow, "b")
    long_ago, now = long_ago_and_now(made)
    assert long_ago < now


def test_steps_that_became_long_are_learned(world: type[World]) -> None:
    made = taught(world, workflows=10)
    for i in range(30):
        made.begin(f"slow{i}")
        for agent in "abcd":
            made.step(f"slow{i}", agent)
            made.now += 3_600.0
        made.end(f"slow{i}")
    long_ago, now = long_ago_and_now(made)
    assert long_ago > now


def test_a_clock_that_is_set_back_makes_nothing_worth_less(world: type[World]) -> None:
    made = taught(world, workflows=30)
    made.now += 10_000.0
    for workflow in "pqrs":
        made.begin(workflow)
        made.step(workflow, "a")
    made.now -= 3_600.0
    for workflow in "pqrs":
        made.step(workflow, "b")
    made.begin("x")
    made.step("x", "a")
    node = made.touch(made.arrive("r", "x", "a"))
    assert made.runtime.score_record(node)[0] == pytest.approx(node.last_access + 12.0, abs=1.0)  # 3 x 4 steps of 1 s


# -- predict, act -----------------------------------------------------------------------------------------


def test_forecasts_follow_the_learned_order(world: type[World]) -> None:
    made = taught(world)
    made.begin("x")
    made.step("x", "b")
    forecast = next(f for f in made.runtime.predict(3) if f.workflow == "x")
    assert [dict(s) for s in forecast.steps] == [{"c": 1.0}, {"d": 1.0}, {}]


def test_an_anchor_that_left_is_computed_ahead_when_its_agent_is_next(world: type[World]) -> None:
    made = taught(world)
    made.begin("w")
    for agent in "abc":
        made.step("w", agent)
    node = anchor_node(made, "c", 3)
    made.end("w")
    made.runtime.observe(Evicted(node, "device"))
    assert made.runtime.act() == []
    made.begin("x")
    made.step("x", "a")
    assert made.runtime.act() == []  # two hops away
    made.step("x", "b")
    (effect,) = made.runtime.act()
    assert isinstance(effect, WarmUp)
    assert effect.anchor == 3
    assert made.runtime.act() == []  # once


def test_an_anchor_of_one_workflow_alone_is_never_computed_ahead(world: type[World]) -> None:
    made = taught(world)
    made.begin("w")
    made.step("w", "c")
    private = made.touch(made.arrive("p", "w", "c", anchor=77))
    private.anchor = 77
    made.runtime.observe(Evicted(private, "device"))
    made.step("w", "b")
    assert made.runtime.act() == []


def test_warm_ups_stay_within_their_budget(world: type[World]) -> None:
    made = taught(world, budget=0.0)
    made.begin("w")
    for turn in range(5):
        node = anchor_node(made, "c", 3)
        made.step("w", "b")
        made.runtime.observe(Evicted(node, "device"))
        made.runtime.act()
        made.now += turn
    assert made.runtime.policies[0].stats()["warm_tokens"] <= 50  # the first is asked for before the budget is known


# -- state ------------------------------------------------------------------------------------------------


def size_of(thing: object, seen: set[int]) -> int:
    """Bytes of a thing and all that it holds."""
    if id(thing) in seen:
        return 0
    seen.add(id(thing))
    size = sys.getsizeof(thing)
    if isinstance(thing, dict):
        size += sum(size_of(k, seen) + size_of(v, seen) for k, v in thing.items())
    elif isinstance(thing, list | tuple | set | frozenset):
        size += sum(size_of(x, seen) for x in thing)
    for slot in getattr(type(thing), "__slots__", ()):
        if hasattr(thing, slot):
            size += size_of(getattr(thing, slot), seen)
    return size


def test_a_workload_takes_at_most_20_kilobytes_whatever_comes(world: type[World]) -> None:
    rng = random.Random(5)
    made = world(["cachesage"])
    for i in range(3_000):
        made.begin(f"w{i}")
        for _ in range(4):
            agent = f"agent-with-a-rather-long-name-{rng.randrange(200)}"
            made.step(f"w{i}", agent)
            made.finish(made.arrive(f"{i}", f"w{i}", agent, anchor=rng.randrange(1, 2**50)))
        made.end(f"w{i}")
    workload = next(iter(made.runtime.policies[0]._workloads.values()))
    assert size_of(workload, set()) <= 20_000
    assert made.runtime.live_names == ("cachesage",)
