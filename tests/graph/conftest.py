"""Every graph test runs sync and async where it can, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from agentflow.engine.scripted import ScriptedEngine
from agentflow.graph import ambient
from agentflow.graph._scopes import workflows_of
from agentflow.graph.handler import AgentflowHandler
from tests.graph.graph_helpers import Runner


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def runner(request: pytest.FixtureRequest) -> Runner:
    return Runner(request.param)


@pytest.fixture(autouse=True)
def clean_handlers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test ends with no handler error, and with nothing remembered of the runs that ended."""
    made: list[AgentflowHandler] = [ambient.install()]
    original = AgentflowHandler.__init__

    def spied(self: AgentflowHandler, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(AgentflowHandler, "__init__", spied)
    made[0].errors.clear()
    yield
    for handler in made:
        assert handler.errors == {}
        assert handler.remembered == 0
        if isinstance(handler.binding.engine, ScriptedEngine):
            assert workflows_of(handler.binding.engine).counts()[0] == 0
