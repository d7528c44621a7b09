"""Ways to run an app, and to read the events that an engine was told."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, TypedDict

from langgraph.graph import END, START

from agentflow.engine.scripted import ScriptedEngine
from agentflow.events import Event
from agentflow.graph import Agent, AgentGraph, shared


def kinds(engine: ScriptedEngine, *only: str) -> list[str]:
    """The kinds of the events in order, of those that begin with one of ``only`` if given."""
    return [e.kind for e in engine.events if not only or e.kind.startswith(only)]


def of_kind(engine: ScriptedEngine, kind: str) -> list[Any]:
    return [e for e in engine.events if e.kind == kind]


def assert_in_order(events: Iterable[Event]) -> None:
    """Sequence numbers grow by one within each workflow."""
    last: dict[str, int] = {}
    for event in events:
        assert event.seq == last.get(event.workflow, 0) + 1, event
        last[event.workflow] = event.seq


class Runner:
    """Runs an app sync or async, so that a test covers both."""

    def __init__(self, is_async: bool) -> None:
        self.is_async = is_async

    def run(self, app: Any, *args: Any, **kwargs: Any) -> Any:
        return asyncio.run(app.arun(*args, **kwargs)) if self.is_async else app.run(*args, **kwargs)

    def invoke(self, app: Any, *args: Any, **kwargs: Any) -> Any:
        return asyncio.run(app.ainvoke(*args, **kwargs)) if self.is_async else app.invoke(*args, **kwargs)

    def stream(self, app: Any, *args: Any, **kwargs: Any) -> list[Any]:
        if not self.is_async:
            return list(app.stream(*args, **kwargs))

        async def collect() -> list[Any]:
            return [c async for c in app.astream(*args, **kwargs)]

        return asyncio.run(collect())


class State(TypedDict, total=False):
    task: str
    plan: str
    code: str


def planner_coder() -> AgentGraph:
    graph = AgentGraph(State)
    graph.add_agent(Agent("planner", "Plan."), prompt=lambda s: ["T: ", shared("task", s["task"])], writes="plan")
    graph.add_agent(Agent("coder", "Code."), prompt=lambda s: ["P: ", shared("plan", s["plan"])], writes="code")
    graph.add_edge(START, "planner")
    graph.add_edge("planner", "coder")
    graph.add_edge("coder", END)
    return graph
