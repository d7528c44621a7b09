"""What happens in a workflow, as one frozen type per event: the only vocabulary between layers.

An event names its workflow, carries a sequence number that grows within that workflow, and a wall-clock
time in seconds. Receivers tolerate anything: late, lost, repeated or unknown events are harmless, and
:func:`decode` refuses what it cannot read with :class:`~agentflow.errors.EventError`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, ClassVar, Literal, get_args

from agentflow.errors import EventError

__all__ = [
    "AgentEnded",
    "AgentStarted",
    "EVENT_TYPES",
    "Event",
    "SegmentProduced",
    "StateSuperseded",
    "ToolEnded",
    "ToolOutcome",
    "ToolStarted",
    "WorkflowEnded",
    "WorkflowOutcome",
    "WorkflowPaused",
    "WorkflowResumed",
    "WorkflowStarted",
    "decode",
    "decode_batch",
    "encode",
    "encode_batch",
    "read_events",
]

#: Longest string of a field, in characters.
MAX_FIELD_CHARS = 512

ToolOutcome = Literal["ok", "error", "timeout", "cancelled"]
WorkflowOutcome = Literal["done", "error", "cancelled", "limit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Fields common to all events.

    ``step`` counts the agent calls of a workflow from 0. ``parent`` is the workflow that started this one
    (a subgraph run on its own, a sub-agent).
    """

    kind: ClassVar[str] = "event"

    workflow: str
    seq: int = 0
    time: float = 0.0
    agent: str | None = None
    step: int | None = None
    parent: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowStarted(Event):
    """A workflow begins. ``graph`` names the graph it runs, ``tenant`` who pays for it."""

    kind: ClassVar[str] = "workflow_started"
    graph: str | None = None
    tenant: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowPaused(Event):
    """A workflow waits for somebody outside (an interrupt); it will be resumed, so it is not over."""

    kind: ClassVar[str] = "workflow_paused"
    reason: str = "interrupt"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowResumed(Event):
    """A paused workflow goes on."""

    kind: ClassVar[str] = "workflow_resumed"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowEnded(Event):
    """A workflow is over: nothing that only it used will be used by it again."""

    kind: ClassVar[str] = "workflow_ended"
    outcome: WorkflowOutcome = "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentStarted(Event):
    """An agent (a graph node that calls the model) begins a step."""

    kind: ClassVar[str] = "agent_started"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentEnded(Event):
    """An agent's step is over. ``next`` holds the agents that the graph will run next, when it knows."""

    kind: ClassVar[str] = "agent_ended"
    next: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolStarted(Event):
    """A tool call begins. ``call_id`` ties it to its :class:`ToolEnded`.

    ``variant`` tells kinds of use apart that take different times: of a shell tool, the command.
    """

    kind: ClassVar[str] = "tool_started"
    tool: str = ""
    call_id: str = ""
    variant: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolEnded(Event):
    """A tool call is over after ``duration`` seconds of its own work, waiting for a free slot not counted."""

    kind: ClassVar[str] = "tool_ended"
    tool: str = ""
    call_id: str = ""
    duration: float = 0.0
    outcome: ToolOutcome = "ok"


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentProduced(Event):
    """An agent produced the text of shared slot ``slot`` (``tokens`` long), for others to read."""

    kind: ClassVar[str] = "segment_produced"
    slot: str = ""
    tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSuperseded(Event):
    """Earlier KV of this workflow will not be used again.

    With ``request`` the KV of that request beyond the part it shares with others; with ``branch`` all that
    the calls of that branch (a fan-out task, an abandoned retry) touched and no other live branch did; with
    ``agent`` alone, what that agent's earlier calls touched and its later calls did not.
    """

    kind: ClassVar[str] = "state_superseded"
    request: str | None = None
    branch: str | None = None


EVENT_TYPES: Mapping[str, type[Event]] = {
    t.kind: t
    for t in (
        WorkflowStarted,
        WorkflowPaused,
        WorkflowResumed,
        WorkflowEnded,
        AgentStarted,
        AgentEnded,
        ToolStarted,
        ToolEnded,
        SegmentProduced,
        StateSuperseded,
    )
}

#: Says that a value cannot be read; no JSON is this.
_BAD = object()
_DEFAULTS: Mapping[str, dict[str, Any]] = {
    k: {f.name: f.default for f in fields(t) if f.name != "workflow"} for k, t in EVENT_TYPES.items()
}
_STRINGS = frozenset(
    {
        "workflow",
        "agent",
        "parent",
        "graph",
        "tenant",
        "reason",
        "outcome",
        "tool",
        "call_id",
        "slot",
        "request",
        "branch",
        "variant",
    }
)
_OPTIONAL = frozenset({"agent", "parent", "graph", "tenant", "request", "branch", "step", "variant"})
_CLOSED: Mapping[str, frozenset[str]] = {
    "tool_ended": frozenset(get_args(ToolOutcome)),
    "workflow_ended": frozenset(get_args(WorkflowOutcome)),
}


def encode(event: Event) -> dict[str, Any]:
    """The event as a JSON-ready dict; fields at their defaults are left out."""
    kind = event.kind
    defaults = _DEFAULTS[kind]
    out: dict[str, Any] = {"kind": kind, "workflow": event.workflow}
    for name, default in defaults.items():
        value = getattr(event, name)
        if value != default:
            out[name] = list(value) if isinstance(value, tuple) else value
    return out


def decode(data: Any) -> Event:
    """Read one event from a dict made by :func:`encode`.

    Raises :class:`~agentflow.errors.EventError` for an unknown kind, an unknown or missing field, a value of
    the wrong type, a number that is not finite, or a string longer than ``MAX_FIELD_CHARS``.
    """
    if not isinstance(data, Mapping):
        raise EventError(f"an event is an object, not {type(data).__name__}")
    kind = data.get("kind")
    cls = EVENT_TYPES.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise EventError(f"unknown event kind {str(kind)[:40]!r}")
    event = cls.__new__(cls)
    known = 1
    for name, put, read, default in _READING[cls.kind]:
        if name not in data:
            put(event, default)
            continue
        known += 1
        value = read(data[name])
        if value is _BAD:
            raise EventError(f"{cls.kind}: bad value for {name}: {str(data[name])[:40]!r}")
        put(event, value)
    if known != len(data):
        unknown = next(n for n in data if n != "kind" and n not in _DEFAULTS[cls.kind] and n != "workflow")
        raise EventError(f"{cls.kind}: unknown field {str(unknown)[:40]!r}")
    if not event.workflow:
        raise EventError(f"{cls.kind}: no workflow")
    outcomes = _CLOSED.get(cls.kind)
    if outcomes is not None and event.outcome not in outcomes:  # type: ignore[attr-defined]
        raise EventError(f"{cls.kind}: outcome must be one of {sorted(outcomes)}")
    return event


def _text(value: Any) -> Any:
    return value if isinstance(value, str) and len(value) <= MAX_FIELD_CHARS else _BAD


def _names(value: Any) -> Any:
    if isinstance(value, list | tuple) and len(value) <= 256 and all(_text(v) is not _BAD for v in value):
        return tuple(value)
    return _BAD


def _seconds(value: Any) -> Any:
    fits = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e11
    return float(value) if fits else _BAD


def _count(value: Any) -> Any:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53 else _BAD


def _reading(cls: type[Event]) -> tuple[tuple[str, Callable[[Any, Any], None], Callable[[Any], Any], Any], ...]:
    """For each field: its name, what sets it on an event (frozen for everybody else), what checks a value, and its
    default."""
    readers = {"next": _names, "time": _seconds, "duration": _seconds} | dict.fromkeys(_STRINGS, _text)
    out = []
    for field in fields(cls):
        read = readers.get(field.name, _count)
        if field.name in _OPTIONAL:
            read = partial(_optional, read)
        default = "" if field.name == "workflow" else field.default
        out.append((field.name, getattr(cls, field.name).__set__, read, default))
    return tuple(out)


def _optional(read: Callable[[Any], Any], value: Any) -> Any:
    return None if value is None else read(value)


_READING = {kind: _reading(cls) for kind, cls in EVENT_TYPES.items()}


def encode_batch(events: Sequence[Event]) -> str:
    """Several events as one JSON string."""
    return json.dumps([encode(e) for e in events], separators=(",", ":"))


def read_events(data: Any, *, limit: int = 65_536) -> tuple[list[Event], int]:
    """Read what can be read of a list of dicts made by :func:`encode`.

    Returns the events in order and how many entries were refused: those that :func:`decode` cannot read and
    those beyond ``limit``. Anything but a list counts as one refused entry. Never raises.
    """
    if not isinstance(data, list | tuple):
        return [], 1
    out: list[Event] = []
    refused = max(0, len(data) - limit)
    for item in data[:limit]:
        try:
            out.append(decode(item))
        except EventError:
            refused += 1
    return out, refused


def decode_batch(text: Any) -> tuple[list[Event], int]:
    """Like :func:`read_events`, from a string made by :func:`encode_batch`. Never raises."""
    try:
        data = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        return [], 1
    return read_events(data)
