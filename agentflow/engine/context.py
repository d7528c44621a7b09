"""Where the running code is in a workflow: read by the chat model and by tools, set by the graph layer."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING
from uuid import UUID

from agentflow.engine.base import Coordinates

if TYPE_CHECKING:
    from agentflow.engine.workflow import WorkflowRun

__all__ = ["current", "current_run", "handled_tool_run"]

#: Coordinates of the workflow step that runs in this context; the chat model puts them on its calls.
current: ContextVar[Coordinates] = ContextVar("agentflow_coordinates", default=Coordinates())  # noqa: B039 (frozen)
#: The workflow run that this context belongs to, if any.
current_run: ContextVar[WorkflowRun | None] = ContextVar("agentflow_run", default=None)
#: LangChain's run id of the tool call whose events :mod:`agentflow.tools` emits itself. A callback handler that
#: emits tool events leaves out the call whose ``run_id`` equals it, and no other (not those made inside it).
handled_tool_run: ContextVar[UUID | None] = ContextVar("agentflow_handled_tool_run", default=None)
