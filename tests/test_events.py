"""Events survive their encoding, and nothing unreadable gets through."""

import json
from dataclasses import fields

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentflow import events
from agentflow.errors import EventError

NAME = st.text(min_size=1, max_size=40)


def _value(name: str) -> st.SearchStrategy:
    if name == "workflow":
        return NAME
    if name in ("seq", "tokens"):
        return st.integers(0, 2**50)
    if name == "step":
        return st.none() | st.integers(0, 2**50)
    if name in ("time", "duration"):
        return st.floats(0, 1e10)
    if name == "next":
        return st.lists(NAME, max_size=4).map(tuple)
    if name in ("agent", "parent", "graph", "tenant", "request", "branch"):
        return st.none() | NAME
    return NAME


@st.composite
def any_event(draw: st.DrawFn) -> events.Event:
    cls = draw(st.sampled_from(list(events.EVENT_TYPES.values())))
    values = {f.name: draw(_value(f.name)) for f in fields(cls) if f.name != "outcome"}
    if cls is events.ToolEnded:
        values["outcome"] = draw(st.sampled_from(["ok", "error", "timeout", "cancelled"]))
    if cls is events.WorkflowEnded:
        values["outcome"] = draw(st.sampled_from(["done", "error", "cancelled", "limit"]))
    return cls(**values)


@given(st.lists(any_event(), max_size=5))
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_batch_comes_back_as_it_was(batch: list[events.Event]) -> None:
    read, refused = events.decode_batch(events.encode_batch(batch))
    assert read == batch
    assert refused == 0


@pytest.mark.parametrize(
    "bad",
    [
        None,
        7,
        [],
        {},
        {"kind": "nonsense", "workflow": "w"},
        {"kind": ["workflow_started"], "workflow": "w"},
        {"kind": "workflow_started"},
        {"kind": "workflow_started", "workflow": ""},
        {"kind": "workflow_started", "workflow": 3},
        {"kind": "workflow_started", "workflow": "w", "extra": 1},
        {"kind": "workflow_started", "workflow": "w", "seq": -1},
        {"kind": "workflow_started", "workflow": "w", "seq": True},
        {"kind": "workflow_started", "workflow": "w", "time": float("nan")},
        {"kind": "workflow_started", "workflow": "w", "time": float("inf")},
        {"kind": "workflow_started", "workflow": "w" * 600},
        {"kind": "workflow_ended", "workflow": "w", "outcome": "fine"},
        {"kind": "tool_ended", "workflow": "w", "outcome": "done"},
        {"kind": "agent_ended", "workflow": "w", "next": "abc"},
        {"kind": "agent_ended", "workflow": "w", "next": [1]},
    ],
)
def test_what_cannot_be_read_is_refused(bad: object) -> None:
    with pytest.raises(EventError):
        events.decode(bad)


def test_a_batch_keeps_what_can_be_read() -> None:
    good = events.WorkflowStarted(workflow="w", seq=1)
    text = json.dumps([{"kind": "?"}, events.encode(good), 5])
    assert events.decode_batch(text) == ([good], 2)


@given(st.text() | st.binary() | st.none() | st.integers())
def test_reading_a_batch_never_raises(raw: object) -> None:
    read, refused = events.decode_batch(raw)
    assert read == [] or refused == 0


def test_a_deeply_nested_batch_is_refused() -> None:
    assert events.decode_batch("[" * 100_000) == ([], 1)


def test_entries_beyond_the_limit_are_refused() -> None:
    one = events.encode(events.WorkflowStarted(workflow="w"))
    read, refused = events.read_events([one] * 5, limit=3)
    assert len(read) == 3
    assert refused == 2
