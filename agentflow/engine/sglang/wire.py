"""How calls, events and decisions travel between the framework and the scheduler.

On a request they ride in SGLang's ``kv_hints`` envelope as two actions of ours; SGLang itself ignores
actions that it does not know. The scheduler's answer rides back in the request's ``meta_info``. Reading
never raises: what cannot be read is counted and left out. This module imports no SGLang.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from agentflow.cache.decision import Decision
from agentflow.engine.base import Call, Coordinates, Reuse, Segment
from agentflow.events import MAX_FIELD_CHARS, Event, encode, read_events

__all__ = ["CallHint", "META_KEY", "Reply", "hints", "read_hints", "reply", "reply_of"]

PROTOCOL = "agentflow/1"
VERSION = "1"
CALL_ACTION = "agentflow.call"
EVENTS_ACTION = "agentflow.events"
#: Key of our part of a request's ``meta_info``.
META_KEY = "agentflow"
#: Segments, and events, read from one request; more are refused.
MAX_SEGMENTS = 1024
MAX_EVENTS = 4096


@dataclass(frozen=True, slots=True)
class CallHint:
    """What the scheduler knows about a request. ``time`` is when it was sent, in seconds since the epoch."""

    at: Coordinates
    segments: tuple[Segment, ...] = ()
    time: float = 0.0
    reuse: Reuse = "exact"
    #: The first tokens of the prompt, which are the agent's own in every call.
    anchor: int = 0


class Reply(NamedTuple):
    """What the scheduler says of a finished request: its decisions, how long it waited to run first, and how long
    after it came its first token was there. 0.0 where not known."""

    decisions: tuple[Decision, ...] = ()
    queue_seconds: float = 0.0
    first_seconds: float = 0.0


def hints(call: Call, events: Sequence[Event]) -> dict[str, Any]:
    """The ``kv_hints`` envelope of a call, with the events that go along."""
    at = call.at
    payload: dict[str, Any] = {
        name: value
        for name in ("workflow", "agent", "step", "branch", "parent", "tenant")
        if (value := getattr(at, name)) is not None
    }
    payload["time"] = time.time()
    if call.reuse != "exact":
        payload["reuse"] = call.reuse
    if call.anchor:
        payload["anchor"] = call.anchor
    if call.segments:
        payload["segments"] = [[s.kind[0], s.start, s.length, s.slot, s.producer] for s in call.segments]
    actions = [_action(CALL_ACTION, call.request_id, payload)]
    if events:
        actions.insert(0, _action(EVENTS_ACTION, call.request_id, {"events": [encode(e) for e in events]}))
    return {"protocol_version": PROTOCOL, "message_id": call.request_id, "actions": actions}


def read_hints(actions: Sequence[tuple[str, Any]], *, prompt_tokens: int) -> tuple[CallHint | None, list[Event], int]:
    """Read the ``(action type, payload)`` pairs of a request whose prompt is ``prompt_tokens`` long.

    Returns the call hint (None without one), the events, and how many entries were refused. Actions of
    others are skipped and not counted. Never raises.
    """
    hint: CallHint | None = None
    events: list[Event] = []
    refused = 0
    for action_type, payload in actions:
        if action_type == EVENTS_ACTION:
            read, bad = read_events(payload.get("events") if isinstance(payload, Mapping) else None, limit=MAX_EVENTS)
            events += read
            refused += bad
        elif action_type == CALL_ACTION:
            read_hint, bad = _read_call(payload, prompt_tokens)
            refused += bad
            hint = read_hint or hint
    return hint, events, refused


def reply(decisions: Sequence[Decision], *, queue_seconds: float = 0.0, first_seconds: float = 0.0) -> str:
    """What the scheduler sends back with a finished request."""
    times = {"queue": round(queue_seconds, 6), "first": round(first_seconds, 6)}
    said = {"decisions": [d.to_json() for d in decisions], **times}
    return json.dumps(said, separators=(",", ":"))


def reply_of(meta_info: Mapping[str, Any]) -> Reply:
    """What the scheduler said of a finished request in its ``meta_info``; an empty reply where nothing is readable."""
    raw = meta_info.get(META_KEY)
    if isinstance(raw, list | tuple):
        raw = raw[-1] if raw else None
    if not isinstance(raw, str):
        return Reply()
    try:
        said = json.loads(raw)
        decisions = tuple(Decision.from_json(d) for d in said["decisions"])
        return Reply(decisions, float(said["queue"]), float(said["first"]))
    except (ValueError, KeyError, TypeError, AttributeError):
        return Reply()


def _action(action_type: str, request_id: str, payload: dict[str, Any]) -> dict[str, Any]:
    return {"action_id": request_id, "action_type": action_type, "action_version": VERSION, "payload": payload}


def _read_call(payload: Any, prompt_tokens: int) -> tuple[CallHint | None, int]:
    if not isinstance(payload, Mapping):
        return None, 1
    fields: dict[str, Any] = {}
    for name in ("workflow", "agent", "branch", "parent", "tenant"):
        value = payload.get(name)
        if value is not None and not (isinstance(value, str) and 0 < len(value) <= MAX_FIELD_CHARS):
            return None, 1
        fields[name] = value
    step = payload.get("step")
    if step is not None and not (isinstance(step, int) and not isinstance(step, bool) and 0 <= step < 2**53):
        return None, 1
    sent = payload.get("time", 0.0)
    if not (isinstance(sent, int | float) and not isinstance(sent, bool) and 0 <= sent < 1e11):
        return None, 1
    segments, refused = _read_segments(payload.get("segments"), prompt_tokens)
    reuse: Reuse = "corrected" if payload.get("reuse") == "corrected" else "exact"
    anchor = payload.get("anchor", 0)
    if not isinstance(anchor, int) or isinstance(anchor, bool) or not 0 <= anchor <= prompt_tokens:
        anchor, refused = 0, refused + 1
    return CallHint(Coordinates(step=step, **fields), segments, float(sent), reuse, anchor), refused


def _read_segments(raw: Any, prompt_tokens: int) -> tuple[tuple[Segment, ...], int]:
    """Segments are all read or all refused: a table with a hole is of no use."""
    if raw is None:
        return (), 0
    if not isinstance(raw, list | tuple) or len(raw) > MAX_SEGMENTS:
        return (), 1
    out: list[Segment] = []
    end = 0
    for item in raw:
        if not isinstance(item, list | tuple) or len(item) != 5:
            return (), 1
        kind, start, length, slot, producer = item
        names_ok = all(n is None or (isinstance(n, str) and len(n) <= MAX_FIELD_CHARS) for n in (slot, producer))
        numbers_ok = all(isinstance(n, int) and not isinstance(n, bool) for n in (start, length))
        if kind not in ("p", "s") or not names_ok or not numbers_ok or start != end or length < 0:
            return (), 1
        end = start + length
        out.append(Segment("private" if kind == "p" else "shared", start, length, slot, producer))
    return (tuple(out), 0) if end == prompt_tokens else ((), 1)
