"""One run of a workflow on an engine: its events in order, and what its agents used.

Whoever runs agents or tools asks :data:`agentflow.engine.context.current_run` for the run they belong to.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from agentflow.cache.decision import Decision
from agentflow.engine.base import Completion, Coordinates, Engine, Reuse, Usage
from agentflow.events import Event, ToolEnded, ToolStarted
from agentflow.runtime.guards import Guards

__all__ = ["AgentReport", "ToolReport", "WorkflowRun"]

#: Events, and decisions, that a run keeps for its report; older ones are dropped.
LOG_LIMIT = 4096


@dataclass(slots=True)
class ToolReport:
    """What one agent's calls of one tool did. ``seconds`` is the tool's own work."""

    calls: int = 0
    failures: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class AgentReport:
    """What one agent of a run used. Times are sums over its calls, in seconds."""

    agent: str
    calls: int = 0
    usage: Usage = field(default_factory=Usage)
    model_seconds: float = 0.0
    first_token_seconds: float = 0.0
    tools: dict[str, ToolReport] = field(default_factory=dict)

    @property
    def tool_seconds(self) -> float:
        """Seconds spent in tools, of all tools together."""
        return sum(t.seconds for t in self.tools.values())

    @property
    def tool_calls(self) -> int:
        """Tool calls made, of all tools together."""
        return sum(t.calls for t in self.tools.values())


class WorkflowRun:
    """Numbers the events of one workflow, hands them to the engine, and sums up usage per agent.

    Thread-safe; every method is O(1). The event log and the decisions kept are bounded by ``LOG_LIMIT``.
    ``after_seq`` is the last sequence number of an earlier run of the same workflow. ``guards`` are the graph's; they
    and the engine's hear the same events as the engine does. ``reuse`` is what its calls do unless they say otherwise.
    """

    def __init__(
        self,
        engine: Engine,
        workflow: str,
        *,
        tenant: str | None = None,
        parent: str | None = None,
        after_seq: int = 0,
        guards: Guards | None = None,
        reuse: Reuse = "exact",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.engine = engine
        self.workflow = workflow
        self.tenant = tenant
        self.parent = parent
        self.agents: dict[str, AgentReport] = {}
        self.events: deque[Event] = deque(maxlen=LOG_LIMIT)
        self.decisions: deque[Decision] = deque(maxlen=LOG_LIMIT)
        self.dropped_events = 0
        self._guards = guards
        self._listening: list[Guards] = []
        #: What a person was asked to approve: (task, how many were asked in it before) -> the call. A task that is
        #: taken up again asks anew, and its model may ask for something else.
        self.asked: dict[tuple[str, int], str] = {}
        self.reuse: Reuse = reuse
        self._clock = clock
        self._seq = after_seq
        self._steps = 0
        self._lock = threading.Lock()

    @property
    def guards(self) -> tuple[Guards, ...]:
        """The policies that the framework drives in this run: the graph's, then the engine's."""
        engine = getattr(self.engine, "guards", None)
        return tuple(g for g in (self._guards, engine) if g is not None)

    def listened(self, guards: Sequence[Guards]) -> None:
        """Let policies of a graph inside this run, or beside it in the same workflow, hear its events from now on."""
        with self._lock:
            self._listening += [g for g in guards if g not in self._listening and g not in self.guards]

    def forget_asked(self, task: str) -> None:
        """The task is done: what was asked in it will not be asked again."""
        if self.asked:
            for place in [p for p in self.asked if p[0] == task]:
                del self.asked[place]

    @property
    def last_seq(self) -> int:
        """The sequence number of the newest event."""
        return self._seq

    def next_step(self) -> int:
        """The number of the agent step that begins now, from 0."""
        with self._lock:
            step = self._steps
            self._steps += 1
            return step

    def emit(self, event_type: type[Event], **fields: Any) -> Event:
        """Make an event of this workflow with the next sequence number and hand it to the engine."""
        with self._lock:
            self._seq += 1
            event = event_type(workflow=self.workflow, seq=self._seq, time=self._clock(), parent=self.parent, **fields)
            if len(self.events) == LOG_LIMIT:
                self.dropped_events += 1
            self.events.append(event)
            if isinstance(event, ToolStarted | ToolEnded):
                self._count_tool(event)
            self.engine.emit(event)
            for guards in (*self.guards, *self._listening):
                guards.observe(event)
        return event

    def record(self, at: Coordinates, completion: Completion) -> None:
        """Add a finished call to its agent's report."""
        with self._lock:
            report = self._report(at.agent)
            report.calls += 1
            report.usage += completion.usage
            report.model_seconds += completion.timings.total
            report.first_token_seconds += completion.timings.first_token
            self.decisions.extend(completion.decisions)

    def coordinates(self, agent: str | None, *, step: int | None = None, branch: str | None = None) -> Coordinates:
        """The coordinates of a call of ``agent`` in this workflow."""
        return Coordinates(
            workflow=self.workflow, agent=agent, step=step, branch=branch, parent=self.parent, tenant=self.tenant
        )

    def usage(self) -> Usage:
        """Tokens of all agents together."""
        with self._lock:
            total = Usage()
            for report in self.agents.values():
                total += report.usage
            return replace(total)

    def _report(self, agent: str | None) -> AgentReport:
        name = agent or "(none)"
        if name not in self.agents:
            self.agents[name] = AgentReport(name)
        return self.agents[name]

    def _count_tool(self, event: ToolStarted | ToolEnded) -> None:
        tool = self._report(event.agent).tools.setdefault(event.tool, ToolReport())
        if isinstance(event, ToolStarted):
            tool.calls += 1
        else:
            tool.seconds += event.duration
            tool.failures += event.outcome != "ok"
