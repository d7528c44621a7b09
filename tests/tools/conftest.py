"""Both twins of the executor, and a gate for tools that hang."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from agentflow.tools import ToolExecutor

Runner = Callable[..., Any]


@pytest.fixture(params=["sync", "async"])
def run(request: pytest.FixtureRequest) -> Runner:
    """Runs calls by the sync twin on a thread without a loop, or by the async twin on a fresh loop."""

    def sync(executor: ToolExecutor, calls: Any, **kwargs: Any) -> list[Any]:
        return executor.run(calls, **kwargs)

    def by_loop(executor: ToolExecutor, calls: Any, **kwargs: Any) -> list[Any]:
        return asyncio.run(executor.arun(calls, **kwargs))

    return sync if request.param == "sync" else by_loop


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """An event on which hung tools wait; it opens when the test ends, so that no thread outlives it for long."""
    event = threading.Event()
    yield event
    event.set()
