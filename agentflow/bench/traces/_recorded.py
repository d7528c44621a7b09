"""What a recorder noted, and the trace that follows from it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from agentflow.bench.traces.model import Content, TraceCall, TraceTool, TraceWorkflow
from agentflow.events import (
    AgentEnded,
    Event,
    StateSuperseded,
    ToolEnded,
    ToolStarted,
    WorkflowEnded,
    WorkflowStarted,
)

__all__ = ["NotedCall", "NotedWorkflow", "Tally", "edges_of", "waits_of", "workflow_of"]

#: What a call's agent is called when its coordinates name none.
NO_AGENT = "(none)"


@dataclass(frozen=True, slots=True, kw_only=True)
class NotedCall:
    """A call as it was made; times in seconds of the recorder's clock, ``number`` is that of its path in the trie."""

    id: str
    agent: str | None
    branch: str | None
    started: float
    ended: float
    number: int
    segments: tuple[tuple[str, int, int, str | None, str | None], ...]


@dataclass(slots=True)
class NotedWorkflow:
    """Calls of one workflow in the order they ended, and its events as they came."""

    calls: list[NotedCall] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    tenant: str | None = None

    @property
    def began(self) -> float:
        """When it began: its first event or call."""
        times = [e.time for e in self.events if isinstance(e, WorkflowStarted)]
        return min(times + [c.started for c in self.calls])


@dataclass(slots=True)
class Tally:
    """What a recording could not put into the trace."""

    tools_left_over: int = 0
    tools_unfinished: int = 0


@dataclass(frozen=True, slots=True)
class _Tool:
    name: str
    agent: str | None
    started: float
    duration: float
    outcome: str

    @property
    def ended(self) -> float:
        return self.started + self.duration


def workflow_of(
    name: str, noted: NotedWorkflow, contents: Sequence[tuple[Content, Content]], zero: float, tally: Tally
) -> TraceWorkflow:
    """The workflow in the trace. ``zero`` is when the trace began."""
    calls = sorted(noted.calls, key=lambda c: (c.started, c.ended))
    waits = waits_of(calls)
    by_id = {c.id: c for c in calls}
    arrival = noted.began
    bases = {c.id: max([by_id[w].ended for w in waits[c.id]], default=arrival) for c in calls}
    tools = _assign(_tools(noted.events, tally), calls, bases, tally)
    superseded = _superseded(noted.events, calls)
    made = []
    for call in calls:
        prompt, output = contents[call.number]
        base = bases[call.id]
        made.append(
            TraceCall(
                id=call.id,
                agent=call.agent or NO_AGENT,
                prompt=prompt,
                output=output,
                wait_for=waits[call.id],
                delay=max(0.0, call.started - base),
                tools=tuple(
                    TraceTool(name=t.name, start=max(0.0, t.started - base), duration=t.duration, outcome=t.outcome)
                    for t in tools.get(call.id, ())
                ),
                branch=call.branch,
                segments=call.segments,
                superseded=call.id in superseded,
            )
        )
    start = next((e for e in noted.events if isinstance(e, WorkflowStarted)), None)
    end = next((e for e in reversed(noted.events) if isinstance(e, WorkflowEnded)), None)
    return TraceWorkflow(
        id=name,
        calls=tuple(made),
        arrival=max(0.0, arrival - zero),
        graph=start.graph if start else None,
        tenant=(start.tenant if start else None) or noted.tenant,
        outcome=end.outcome if end else "unfinished" if start else "done",
    )


def waits_of(calls: Sequence[NotedCall]) -> dict[str, tuple[str, ...]]:
    """What each call waited for: of the calls that ended before it started, those no other of them waited for.

    Within a branch a call waits for its own branch only, once there is one before it.
    """
    waits: dict[str, tuple[str, ...]] = {}
    frontier: dict[str, NotedCall] = {}
    ending = sorted(calls, key=lambda c: (c.ended, c.started))
    done = 0
    for call in calls:
        while done < len(ending) and ending[done].ended <= call.started and ending[done] is not call:
            ended = ending[done]
            for before in waits.get(ended.id, ()):
                frontier.pop(before, None)
            frontier[ended.id] = ended
            done += 1
        own = [i for i, c in frontier.items() if call.branch is not None and c.branch == call.branch]
        waits[call.id] = tuple(own or frontier)
    return waits


def _tools(events: Iterable[Event], tally: Tally) -> list[_Tool]:
    running: dict[str, ToolStarted] = {}
    out = []
    for event in events:
        if isinstance(event, ToolStarted):
            running[event.call_id] = event
        elif isinstance(event, ToolEnded):
            start = running.pop(event.call_id, None)
            began = start.time if start else event.time - event.duration
            out.append(_Tool(event.tool, event.agent, began, event.duration, event.outcome))
    tally.tools_unfinished += len(running)
    return sorted(out, key=lambda t: t.started)


def _assign(
    tools: Iterable[_Tool], calls: Sequence[NotedCall], bases: dict[str, float], tally: Tally
) -> dict[str, list[_Tool]]:
    """Each tool to the call that came of it: the first after its end, by preference one that waited while it ran.

    Among those, one of the agent that called the tool goes first.
    """
    out: dict[str, list[_Tool]] = {}
    for tool in tools:
        later = [c for c in calls if c.started >= tool.ended]
        if not later:
            tally.tools_left_over += 1
            continue
        waited = [c for c in later if bases[c.id] <= tool.started]
        same = [c for c in waited if c.agent == tool.agent]
        out.setdefault((same or waited or later)[0].id, []).append(tool)
    return out


def _superseded(events: Iterable[Event], calls: Sequence[NotedCall]) -> set[str]:
    out: set[str] = set()
    for event in events:
        if not isinstance(event, StateSuperseded):
            continue
        if event.request is not None:
            out.add(event.request)
            continue
        before = [c for c in calls if c.ended <= event.time]
        mine = [c for c in before if (c.branch == event.branch if event.branch is not None else c.agent == event.agent)]
        if mine:
            out.add(mine[-1].id)
    return out


def edges_of(events: Iterable[Event]) -> dict[str, set[str]]:
    """Which agents may follow which, as far as the graph said so."""
    out: dict[str, set[str]] = {}
    for event in events:
        if isinstance(event, AgentEnded) and event.agent is not None and event.next:
            out.setdefault(event.agent, set()).update(event.next)
    return out
