"""Events for graphs that nobody attached: those whose nodes call :class:`agentflow.AgentflowChat`.

Once installed, one handler follows every LangGraph run of the process. It says nothing of a run until a chat
model with an engine is called in it; from then on that engine is told of the workflow.
"""

from __future__ import annotations

import threading

from langchain_core.tracers.context import register_configure_hook

from agentflow.graph.handler import AgentflowHandler

__all__ = ["install", "uninstall"]

_handler = AgentflowHandler()
_lock = threading.Lock()
_installed = False


class _Switch:
    """What LangChain asks for the handler; unlike a ContextVar it is the same in every thread and task."""

    def __init__(self) -> None:
        self.on = False

    def get(self) -> AgentflowHandler | None:
        return _handler if self.on else None


_switch = _Switch()


def install() -> AgentflowHandler:
    """Follow every LangGraph run from now on. Doing it twice is fine."""
    global _installed
    with _lock:
        if not _installed:
            register_configure_hook(_switch, True, AgentflowHandler)  # type: ignore[arg-type]
            _installed = True
        _switch.on = True
    return _handler


def uninstall() -> None:
    """Stop following runs that are not attached; those that run now are followed to their end."""
    _switch.on = False
