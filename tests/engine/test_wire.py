"""Hints arrive as they were sent, and hostile ones change nothing but a count."""

import json

from hypothesis import given
from hypothesis import strategies as st

from agentflow.cache.decision import Decision
from agentflow.engine.base import Call, Coordinates, Segment
from agentflow.engine.sglang import wire
from agentflow.events import WorkflowStarted

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def sent(call: Call, events: list) -> list[tuple[str, object]]:
    """What the scheduler gets after a trip through JSON."""
    envelope = json.loads(json.dumps(wire.hints(call, events)))
    return [(a["action_type"], a["payload"]) for a in envelope["actions"]]


def test_a_call_and_its_events_arrive_as_they_were_sent() -> None:
    at = Coordinates(workflow="w", agent="coder", step=3, branch="b", parent="p", tenant="t")
    segments = (Segment("private", 0, 2), Segment("shared", 2, 3, "plan", "planner"))
    events = [WorkflowStarted(workflow="w", seq=1, time=5.0)]
    hint, read, refused = wire.read_hints(
        sent(Call(token_ids=range(5), at=at, segments=segments), events), prompt_tokens=5
    )
    assert hint is not None
    assert (hint.at, hint.segments) == (at, segments)
    assert read == events
    assert refused == 0


def test_actions_of_others_are_skipped_uncounted() -> None:
    assert wire.read_hints([("dynamo.pin", {"x": 1})], prompt_tokens=5) == (None, [], 0)


def test_a_segment_table_that_does_not_fit_the_prompt_is_refused_whole() -> None:
    for table in (
        [["p", 0, 2, None, None]],
        [["p", 0, 6, None, None]],
        [["p", 1, 4, None, None]],
        [["p", 0, 3, None, None], ["s", 2, 3, "x", None]],
        [["x", 0, 5, None, None]],
        [["p", 0, -1, None, None], ["p", -1, 6, None, None]],
        [["p", 0, 5, 7, None]],
        [["p", False, 5, None, None]],
        "pp",
        [[]],
    ):
        hint, _, refused = wire.read_hints([(wire.CALL_ACTION, {"workflow": "w", "segments": table})], prompt_tokens=5)
        assert hint is not None
        assert hint.segments == ()
        assert refused == 1


@given(st.lists(st.tuples(st.sampled_from([wire.CALL_ACTION, wire.EVENTS_ACTION, "other"]), JSON), max_size=4))
def test_reading_hints_never_raises(actions: list[tuple[str, object]]) -> None:
    hint, events, refused = wire.read_hints(actions, prompt_tokens=10)
    assert refused >= 0
    assert all(e.workflow for e in events)
    assert hint is None or all(s.start + s.length <= 10 for s in hint.segments)


def test_decisions_come_back_from_meta_info() -> None:
    decision = Decision(
        seq=4, time=1.5, kind="evict", policy="lifecycle", reason="retired", tokens=7, node=3, workflows=("w",),
        agents=("a",), request="r", terms={"active": 0.0}, outcome="regretted",
    )  # fmt: skip
    meta = {"agentflow": [None, None, wire.reply([decision], queue_seconds=0.25, first_seconds=0.5)]}
    assert wire.reply_of(meta) == ((decision,), 0.25, 0.5)


@given(JSON)
def test_a_garbled_reply_gives_no_decisions(raw: object) -> None:
    assert wire.reply_of({"agentflow": raw}) == wire.Reply()
    assert wire.reply_of({"agentflow": [json.dumps(raw)]}) == wire.Reply()
