"""Ways to run an app, and to read the events that an engine was told."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from agentflow.engine.scripted import ScriptedEngine
from agentflow.events import Event


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
