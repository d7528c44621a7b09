"""Autellix: levels by attained service, first come first served within one, promotion of the starved."""

from collections.abc import Callable
from typing import Any

import pytest

Make = Callable[..., Any]


def test_a_program_sinks_with_the_steps_that_it_got(drive: Make) -> None:
    d = drive("autellix")
    levels = []
    for steps in (0, 1, 1, 2, 4, 8, 16, 32, 1000):  # in all 0, 1, 2, 4, 8, 16, 32, 64, 1064
        d.run("w", takes=1.0, told_output_tokens=steps)
        waiting = d.arrive("w")
        levels.append(d.runtime.score_call(waiting_call(waiting))[0])
        d.finish(waiting)
    assert levels == [0, 0, 1, 2, 3, 4, 5, 6, 6]


def test_the_program_served_least_runs_first_and_equals_in_order_of_arrival(drive: Make) -> None:
    d = drive("autellix")
    d.run("served", takes=1.0, told_output_tokens=50)
    first = d.arrive("served")
    d.now += 1.0
    second = d.arrive("fresh")
    d.now += 1.0
    third = d.arrive("other")
    assert d.queue(third, second, first) == [second.id, third.id, first.id]
    anonymous = d.arrive(None)
    assert d.queue(anonymous, first, second) == [second.id, anonymous.id, first.id]


def test_a_starved_program_returns_to_the_first_level_and_is_counted_anew(drive: Make) -> None:
    d = drive("autellix")
    d.run("w", takes=1.0, told_output_tokens=100)  # served for 1 s
    waiting = d.arrive("w")
    d.now += 7.9
    assert d.policy.level(waiting_call(waiting)) == 6
    d.now += 0.1
    assert d.policy.level(waiting_call(waiting)) == 0  # waited 8 times as long as it was served
    d.now += 2.0
    d.finish(waiting, output_tokens=3, queue_seconds=8.0)  # promoted: only these 3 steps count now
    again = d.arrive("w")
    assert d.policy.level(waiting_call(again)) == 1


def test_waiting_adds_up_over_the_calls_of_a_program(drive: Make) -> None:
    d = drive("autellix")
    for _ in range(2):
        d.run("w", takes=4.0, told_output_tokens=100, told_queue_seconds=3.0)
    waiting = d.arrive("w")  # waited 6 s and was served 2 s in all
    d.now += 9.5
    assert d.policy.level(waiting_call(waiting)) == 6
    d.now += 0.5
    assert d.policy.level(waiting_call(waiting)) == 0


def test_thresholds_can_be_chosen_and_the_state_goes_with_the_workflow(drive: Make) -> None:
    d = drive({"name": "autellix", "thresholds": [1000, 10]})
    d.run("w", takes=1.0, told_output_tokens=10)
    assert d.policy.level(waiting_call(d.arrive("w"))) == 1
    d.end("w")
    assert d.policy.level(waiting_call(d.arrive("w"))) == 0


def test_nodes_are_left_to_recency(drive: Make) -> None:
    d = drive("autellix")
    d.run("w", nodes="ab")
    assert not d.runtime.ranks_nodes
    assert d.runtime.ranks_calls


@pytest.mark.parametrize("jump", [-1e6, 1e6])
def test_clock_jumps_do_no_harm(jump: float, drive: Make) -> None:
    d = drive("autellix")
    request = d.arrive("w")
    d.now += jump
    d.finish(request, output_tokens=5, queue_seconds=2.0)
    assert d.policy.level(waiting_call(d.arrive("w"))) in (0, 2)


def waiting_call(request: Any) -> Any:
    from agentflow.cache.policy import WaitingCall

    return WaitingCall(request.id, request.call, request.tokens, 0, request.arrived)
