"""Stands in for an engine where the chat model is not agentflow's: runs are reported, events go nowhere."""

from __future__ import annotations

from typing import cast

from agentflow.engine.base import Engine
from agentflow.events import Event

__all__ = ["event_sink"]


class _EventSink:
    """The one part of an engine that a workflow run needs."""

    def emit(self, event: Event) -> None:
        """Drop the event."""


def event_sink() -> Engine:
    """A place for events that nobody wants; it can do nothing else an engine can."""
    return cast(Engine, _EventSink())
