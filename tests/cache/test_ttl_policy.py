"""The ttl policy by hand: pins, deadlines, release under pressure, budget, order of calls, what it learns."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentflow.cache.policy import PoolState
from agentflow.events import StateSuperseded, ToolStarted, WorkflowPaused, WorkflowResumed

Make = Callable[..., Any]


def ttl(**options: Any) -> dict[str, Any]:
    """Without what would blur hand-worked cases: 1 s benefit for 100 tokens, cost of 1 s a second."""
    plain = {"enough": 1, "enough_each": 1, "prefill": 0.1, "normalise": False, "grace": 0.0, "gaps": False}
    return {"name": "ttl", **plain, "hold_waiting": False, **options}


def test_kv_is_kept_while_a_fast_tool_runs_and_not_longer(drive: Make) -> None:
    d = drive(ttl())
    d.learn("ls", [2.0] * 4)
    d.run("w", nodes="a")  # 100 tokens: 10 s to prefill again
    d.run("v", nodes="b")
    assert d.order() == "ab"
    d.tool("w", "ls")
    assert d.order() == "ba"  # kept, although it is older
    d.now += 2.0
    assert d.order() == "ba"
    d.now += 0.1
    assert d.order() == "ab"  # over: seen when it is scored, without any event
    d.runtime.act()
    assert d.policy.pins == 0


def test_kv_is_dropped_at_once_for_a_slow_tool(drive: Make) -> None:
    d = drive(ttl())
    d.learn("train", [600.0] * 4)
    d.run("w", nodes="a")
    d.run("v", nodes="b")
    d.tool("w", "train")
    assert d.order() == "ab"
    why = d.why("a")
    assert why.reason == "not pinned: waits for train: keeping it costs more than it saves"
    assert why.terms["benefit"] == pytest.approx(10.0)
    assert why.terms["tau"] == 0.0


def test_a_decision_has_its_terms_and_is_in_the_log(drive: Make) -> None:
    d = drive(ttl())
    d.learn("ls", [2.0, 2.0, 2.0, 50.0])
    d.run("w", "coder", "a", told_output_tokens=20)
    d.tool("w", "ls", agent="coder")
    d.now += 0.5
    why = d.why("a")
    assert why.reason.startswith("pinned")
    expected = {"tau": 2.0, "p": 0.75, "gain": 7.0, "benefit": 12.0, "miss": 12.0, "cost_per_second": 1.0}
    assert {k: why.terms[k] for k in expected} == pytest.approx(expected)
    assert why.terms["seconds_left"] == pytest.approx(1.5)
    assert d.runtime.act() == []
    (pin,) = d.runtime.log.since(0)
    assert (pin.kind, pin.tokens, pin.workflows, pin.agents) == ("pin", 120, ("w",), ("coder",))
    assert pin.terms["eta"] == 1.0
    d.now += 2.0
    d.runtime.act()
    assert [x.kind for x in d.runtime.log.since(pin.seq)] == ["release"]
    assert d.policy.stats()["expired"] == 1.0


def test_only_what_the_last_call_of_the_waiting_agent_touched_is_kept(drive: Make) -> None:
    d = drive(ttl())
    d.learn("ls", [2.0])
    d.run("w", "coder", "ax")
    d.run("w", "coder", "ab")  # x is the state before, superseded by b
    d.run("w", "tester", "t")
    d.tool("w", "ls", agent="coder")
    assert d.order() == "xtab" or d.order() == "xtba"
    assert d.policy.pin_of(d.nodes["x"]) is None
    assert d.policy.pin_of(d.nodes["t"]) is None


def test_under_pressure_the_program_that_arrived_last_goes_first(drive: Make) -> None:
    d = drive(ttl())
    d.learn("ls", [100.0])
    d.policy.miss.prior_prefill = 100.0
    for workflow, node in (("first", "a"), ("second", "b"), ("third", "c")):
        d.now += 1.0
        d.run(workflow, nodes=node)
    for workflow in ("third", "first", "second"):
        d.tool(workflow, "ls")
    d.run("fourth", nodes="d")
    assert d.order() == "dcba"
    d.touch(d.arrive("third"), "a")  # what a later program shares stays as long as the first one's
    assert d.order() == "dcba"


def test_a_pin_outlives_its_deadline_while_the_request_waits_and_goes_when_it_is_done(drive: Make) -> None:
    d = drive(ttl())
    d.learn("ls", [2.0])
    d.run("w", nodes="a")
    d.run("v", nodes="b")
    d.tool("w", "ls")
    d.now += 1.9
    d.tool_done("w", "ls", 1.9)
    request = d.arrive("w")
    d.now += 50.0
    d.runtime.act()
    assert d.order() == "ba"
    d.finish(request)
    assert d.order() == "ab"
    assert d.policy.pins == 0
    assert d.policy.stats()["returned_to_pin"] == 1.0


def test_a_tool_that_returns_a_millisecond_after_the_deadline_finds_no_pin(drive: Make) -> None:
    d = drive(ttl())
    d.learn("ls", [2.0])
    d.run("w", nodes="a")
    d.run("v", nodes="b")
    d.tool("w", "ls")
    d.now += 2.001
    d.tool_done("w", "ls", 2.001)
    d.finish(d.arrive("w"))
    assert d.order() == "ab"
    assert d.policy.stats()["returned_to_none"] == 1.0
    assert d.policy.pins == d.policy.pinned_tokens == 0


def test_grace_prolongs_a_pin_for_the_request_that_is_about_to_come(drive: Make) -> None:
    d = drive(ttl(grace=1.0))
    d.learn("ls", [2.0])
    d.run("w", nodes="a")
    d.run("v", nodes="b")
    d.tool("w", "ls")
    d.now += 1.9
    d.tool_done("w", "ls", 1.9)
    d.now += 0.9
    assert d.order() == "ba"  # 2.8 s after the start of a pin of 2 s
    d.now += 0.2
    assert d.order() == "ab"


def test_grace_never_cuts_a_pin_short_and_wakes_none_that_is_over(drive: Make) -> None:
    d = drive(ttl(grace=1.0))
    d.learn("ls", [5.0])
    d.run("w", nodes="a")
    d.tool("w", "ls")
    d.tool_done("w", "ls", 0.1)
    d.now += 4.9
    assert d.policy.pin_of(d.nodes["a"]) is not None
    d.now += 0.2
    assert d.policy.pin_of(d.nodes["a"]) is None
    d.run("w", nodes="a")
    d.tool("w", "ls", "t2")
    d.now += 5.1
    d.tool_done("w", "ls", 5.1, "t2")
    assert d.policy.pin_of(d.nodes["a"]) is None


def test_several_tools_at_once_hold_until_the_last(drive: Make) -> None:
    d = drive(ttl(grace=0.5))
    d.learn("ls", [1.0] * 3)
    d.learn("test", [4.0] * 3)
    d.run("w", nodes="a")
    d.tool("w", "ls", "t1")
    assert d.why("a").terms["tau"] == 1.0
    d.tool("w", "test", "t2")
    assert d.why("a").terms["tau"] == 4.0
    d.now += 1.0
    d.tool_done("w", "ls", 1.0, "t1")
    d.now += 2.9
    assert d.policy.pin_of(d.nodes["a"]) is not None


def test_a_budget_releases_the_program_that_arrived_last(drive: Make) -> None:
    d = drive(ttl(budget=0.5))
    d.learn("ls", [2.0])
    d.runtime.observe(PoolState(total=500, free=0))
    for i, node in enumerate("abc"):
        d.now += 0.1
        d.run(f"w{i}", nodes=node)
    d.tool("w2", "ls")
    d.tool("w0", "ls")
    assert d.policy.pinned_tokens == 200
    d.tool("w1", "ls")  # 300 tokens, over 250
    assert d.policy.pinned_tokens == 200
    assert d.order() == "cba"
    assert "over the budget" in d.why("c").reason
    assert d.policy.stats()["over_budget"] == 1.0


def test_pins_end_with_the_workflow_and_while_it_waits_for_a_person(drive: Make) -> None:
    d = drive(ttl())
    d.learn("ls", [2.0])
    for workflow, node in (("v", "a"), ("w", "b")):
        d.run(workflow, nodes=node)
        d.tool(workflow, "ls")
    assert d.policy.pins == 2
    d.end("v")
    assert d.policy.pins == 1
    d.event(WorkflowPaused(workflow="w", seq=1))
    assert d.policy.pins == d.policy.pinned_tokens == 0
    d.event(WorkflowResumed(workflow="w", seq=2))
    d.finish(d.arrive("w"))
    d.tool("w", "ls", "t2")
    assert d.policy.pins == 1


def test_kv_is_held_for_a_request_that_waits_also_without_a_pin(drive: Make) -> None:
    d = drive(ttl(hold_waiting=True))
    d.run("w", nodes="a")
    d.run("v", nodes="b")
    request = d.arrive("w")
    d.now += 100.0
    d.runtime.act()
    assert d.order() == "ba"
    d.finish(request)
    assert d.order() == "ab"
    assert d.policy.pins == 0


def test_the_memory_of_active_requests_makes_a_second_dear_or_cheap(drive: Make) -> None:
    d = drive(ttl(normalise=True))
    d.learn("ls", [2.0])
    d.run("w", nodes="a")
    d.runtime.observe(PoolState(total=10_000, free=0, held=5_000, running=10))
    d.tool("w", "ls")
    assert d.why("a").terms["cost_per_second"] == pytest.approx(100 / 500)
    d.run("w", nodes="a")
    d.runtime.observe(PoolState(total=10_000, free=10_000))
    d.arrive("v", tokens=400)
    d.tool("w", "ls", "t2")
    assert d.why("a").terms["cost_per_second"] == pytest.approx(100 / 400)  # by the prompts of active calls


def test_queueing_after_an_eviction_raises_the_benefit_by_what_eta_lets_through(drive: Make) -> None:
    d = drive(ttl())
    d.learn("ls", [2.0])
    d.run("w", nodes="a")
    d.run("w", nodes="a", told_cached_tokens=100, told_queue_seconds=50.0)  # found all: says nothing
    d.tool("w", "ls")
    assert d.why("a").terms["queueing_delay"] == 0.0
    d.run("w", nodes="a", told_cached_tokens=10, told_queue_seconds=6.0)
    d.tool("w", "ls", "t2")
    terms = d.why("a").terms
    assert (terms["queueing_delay"], terms["benefit"]) == (6.0, pytest.approx(16.0))
    for i, steps in enumerate([1, 2] * 5):
        for _ in range(steps):
            d.run(f"p{i}", told_cached_tokens=100)
        d.end(f"p{i}")
    d.policy.memorability._enough = 1
    d.run("w", nodes="a", told_cached_tokens=100)
    d.tool("w", "ls", "t3")
    terms = d.why("a").terms
    assert terms["eta"] == pytest.approx(0.5)
    assert terms["benefit"] == pytest.approx(10.0 + 6.0 * 0.5)


def test_a_reload_from_the_host_is_worth_less_than_a_prefill(drive: Make) -> None:
    d = drive(ttl(reload=0.001))
    d.learn("ls", [2.0])
    d.run("w", nodes="a")
    d.tool("w", "ls")
    assert d.why("a").terms["tau"] == 2.0
    for _ in range(3):
        d.run("w", nodes="a", told_cached_tokens=100, told_host_tokens=100)
    d.tool("w", "ls", "t2")
    why = d.why("a")
    assert why.reason.startswith("not pinned")
    assert why.terms["miss"] == pytest.approx(0.1)


def test_turns_without_a_tool_are_kept_by_the_time_to_the_agents_next_turn(drive: Make) -> None:
    d = drive(ttl(gaps=True))
    for i in range(30):  # planner and coder take turns; the planner is back after 2 s
        d.run(f"w{i}", "planner")
        d.now += 2.0
        d.run(f"w{i}", "planner")
        d.end(f"w{i}")
    d.run("w", "planner", "a")
    d.run("v", "stranger", "b")
    assert d.order() == "ba"
    terms = d.why("a").terms
    assert terms["tau"] == pytest.approx(2.0)
    assert terms["p"] == pytest.approx(0.5, abs=0.02)  # every other turn was the last: never back
    d.now += 2.1
    assert d.order() == "ab"


def test_clients_without_events_have_gaps_measured_under_the_tool_of_their_answer(drive: Make) -> None:
    d = drive(ttl())
    for i in range(5):
        d.run(f"w{i}", told_tool="bash", told_variant="pytest")
        d.now += 3.0
        d.run(f"w{i}")
    assert d.policy.durations.known() == {"bash": 5}
    d.run("w", nodes="a", told_tool="bash", told_variant="pytest")
    d.run("v", nodes="b")
    assert d.order() == "ba"
    assert (d.why("a").terms["tau"], d.why("a").terms["known"]) == (3.0, 3.0)
    # With an event the guess is set aside, and nothing is counted twice.
    d.tool("w", "bash", variant="pytest")
    d.tool_done("w", "bash", 4.0)
    d.arrive("w")
    assert d.policy.durations.known() == {"bash": 6}


def test_variants_of_a_tool_have_times_of_their_own(drive: Make) -> None:
    d = drive(ttl(enough_each=2))
    for i, (variant, seconds) in enumerate([("ls", 1.0), ("pytest", 300.0)] * 3):
        d.tool("t", "bash", f"c{i}", variant=variant)
        d.tool_done("t", "bash", seconds, f"c{i}")
    d.run("w", nodes="a")
    d.tool("w", "bash", variant="ls")
    assert d.policy.pins == 1
    d.run("w", nodes="a")
    d.tool("w", "bash", "t2", variant="pytest")
    assert d.policy.pins == 0


def test_calls_run_preempted_first_then_pinned_then_by_the_arrival_of_their_program(drive: Make) -> None:
    d = drive(ttl(patience=30.0))
    d.learn("ls", [200.0])
    d.policy.miss.prior_prefill = 100.0
    d.run("old")
    d.now += 1.0
    d.run("pinned")
    d.now += 1.0
    d.run("young")
    d.tool("pinned", "ls")
    d.now += 1.0
    young, pinned, new, old = d.arrive("young"), d.arrive("pinned"), d.arrive("new"), d.arrive("old")
    later = d.arrive("old")
    later.arrived += 0.5
    anonymous = d.arrive(None)
    asked = [young, later, new, pinned, old, anonymous]
    assert d.queue(*asked) == [r.id for r in (pinned, old, later, young, new, anonymous)]
    assert d.queue(*asked, preempted=[new]) == [r.id for r in (new, pinned, old, later, young, anonymous)]
    d.now += 31.0  # patience is over for all of them: by program among themselves
    assert d.queue(*asked) == [r.id for r in (old, later, pinned, young, new, anonymous)]


def test_no_call_starves_behind_a_stream_of_pinned_programs(drive: Make) -> None:
    d = drive(ttl(patience=30.0))
    d.learn("ls", [200.0])
    d.policy.miss.prior_prefill = 100.0
    starving = d.arrive("plain")
    ran_at = None
    for round_ in range(100):
        d.now += 1.0
        d.run(f"p{round_}")
        d.tool(f"p{round_}", "ls", f"t{round_}")
        rival = d.arrive(f"p{round_}")
        if d.queue(starving, rival)[0] == starving.id:
            ran_at = round_
            break
        d.finish(rival)
    assert ran_at == 30


def test_the_order_of_calls_can_be_left_to_the_engine(drive: Make) -> None:
    d = drive(ttl(order_calls=False))
    from agentflow.cache.policy import WaitingCall

    r = d.arrive("w")
    assert d.runtime.score_call(WaitingCall(r.id, r.call, 1, 0, r.arrived)) == ()


def test_composed_with_lifecycle_retired_goes_first_and_pins_last(drive: Make) -> None:
    d = drive("lifecycle", ttl())
    d.learn("ls", [2.0])
    d.run("w", "coder", "sp")
    d.tool("w", "ls", agent="coder")
    d.run("v", nodes="a")
    d.run("u", nodes="r")
    d.end("u")
    assert d.order() in ("rasp", "raps")
    # Superseded state of a pinned call is retired all the same.
    d.event(StateSuperseded(workflow="w", agent="coder"))
    d.run("w", "coder", "s")
    d.event(StateSuperseded(workflow="w", agent="coder"))
    assert d.order("pas") == "pas"
    reversed_order = drive(ttl(), "lifecycle")
    reversed_order.run("u", nodes="r")
    reversed_order.run("v", nodes="a")
    reversed_order.end("u")
    assert reversed_order.order() == "ra"  # with ttl in front, retired first among what is not pinned


def test_what_was_learned_is_saved_now_and_then_and_read_again(drive: Make, tmp_path: Path) -> None:
    path = tmp_path / "durations.json"
    d = drive(ttl(path=str(path), save_every=10.0))
    d.learn("ls", [2.0] * 3)
    d.runtime.act()
    assert not path.exists()
    d.now += 10.0
    d.runtime.act()
    assert path.exists()
    stamp = path.stat().st_mtime_ns
    d.now += 100.0
    d.runtime.act()
    assert path.stat().st_mtime_ns == stamp  # nothing new
    again = drive(ttl(path=str(path)))
    assert again.policy.durations.known() == {"ls": 3}
    seeded = drive(ttl(seed=d.policy.durations.to_json(), seed_durations=[["cat", 0.1]]))
    assert seeded.policy.durations.known() == {"ls": 3, "cat": 1}


def test_a_folder_that_cannot_be_written_costs_nothing_but_a_counter(drive: Make, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    d = drive(ttl(path=None, save_every=1.0))
    d.policy._path = str(blocked / "durations.json")
    d.learn("ls", [2.0])
    d.now += 5.0
    d.runtime.act()
    assert d.policy.stats()["save_failed"] == 1.0
    assert d.runtime.counters["policy_errors"] == 0


def test_timeouts_are_censored_or_returns_as_asked(drive: Make) -> None:
    for how, known in (("censored", 0), ("returned", 1)):
        d = drive(ttl(timeouts=how))
        d.tool("w", "hang")
        d.tool_done("w", "hang", 60.0, outcome="timeout")
        d.tool("w", "hang", "t2")
        d.tool_done("w", "hang", 60.0, "t2", outcome="cancelled")
        assert d.policy.durations.known() == {"hang": known}


def test_tool_events_of_unknown_workflows_and_agents_are_harmless(drive: Make) -> None:
    d = drive(ttl())
    d.tool("nobody", "ls")
    d.tool_done("nobody", "ls", 1.0)
    d.tool_done("nobody", "ls", 1.0)
    d.run("w", "coder", "a")
    d.tool("w", "ls", agent="stranger")
    d.event(ToolStarted(workflow="w"))
    assert d.runtime.counters["policy_errors"] == 0
    assert d.policy.durations.known()["ls"] == 2
