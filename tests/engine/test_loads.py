"""How long loads from the host take, as the engine measures it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from agentflow.engine.sglang.loads import LoadTimes


class Moment:
    """A time-stamped event of a stream, in milliseconds, as CUDA's."""

    def __init__(self, at: float) -> None:
        self.at = at

    def elapsed_time(self, other: Moment) -> float:
        return other.at - self.at


def ack(tokens: int, milliseconds: float | None = None) -> Any:
    timed = milliseconds is not None
    return SimpleNamespace(
        num_tokens=tokens,
        timing_enabled=timed,
        start_event=Moment(5.0) if timed else None,
        finish_event=Moment(5.0 + milliseconds) if milliseconds is not None else None,
    )


def test_nothing_is_known_before_the_first_load() -> None:
    assert LoadTimes().seconds(100) == 0.0


def test_loads_without_timed_events_count_when_they_start_and_others_when_they_are_done() -> None:
    loads = LoadTimes()
    loads.started(ack(100), 0.5)
    loads.done(ack(100))
    assert loads.seconds(200) == pytest.approx(1.0)
    loads.started(ack(300, milliseconds=1_500.0), 9.0)
    assert loads.seconds(200) == pytest.approx(1.0)
    loads.done(ack(300, milliseconds=1_500.0))
    assert loads.seconds(400) == pytest.approx(2.0)


def test_old_loads_are_forgotten_and_senseless_times_left_out() -> None:
    loads = LoadTimes()
    for _ in range(100):
        loads.add(10, 1.0)
    for _ in range(64):
        loads.add(10, 2.0)
    for tokens, seconds in ((0, 1.0), (10, 0.0), (10, -1.0), (10, 1e9), (10, float("nan"))):
        loads.add(tokens, seconds)
    assert loads.seconds(10) == pytest.approx(2.0)
