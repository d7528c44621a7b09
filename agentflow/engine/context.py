"""Where the running code is in a workflow: read by the chat model and by tools, set by the graph layer."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING
from uuid import UUID

from agentflow.engine.base import Coordinates, Engine, Reuse

if TYPE_CHECKING:
    from agentflow.engine.workflow import WorkflowRun
    from agentflow.runtime.guards import Guards

__all__ = ["binder", "current", "current_run", "default_reuse", "graph_guards", "handled_tool_run", "run_for"]

#: Coordinates of the workflow step that runs in this context; the chat model puts them on its calls.
current: ContextVar[Coordinates] = ContextVar("agentflow_coordinates", default=Coordinates())  # noqa: B039 (frozen)
#: The workflow run that this context belongs to, if any.
current_run: ContextVar[WorkflowRun | None] = ContextVar("agentflow_run", default=None)
#: The policies given to the graphs around this context, the innermost graph's first.
graph_guards: ContextVar[tuple[Guards, ...]] = ContextVar("agentflow_graph_guards", default=())
#: How calls reuse KV where no run is known and nothing else is said; a call made early has its run's way.
default_reuse: ContextVar[Reuse] = ContextVar("agentflow_reuse", default="exact")
#: LangChain's run id of the tool call whose events :mod:`agentflow.tools` emits itself. A callback handler that
#: emits tool events leaves out the call whose ``run_id`` equals it, and no other (not those made inside it).
handled_tool_run: ContextVar[UUID | None] = ContextVar("agentflow_handled_tool_run", default=None)
#: Set by the graph layer inside a graph's node: makes the run of the surrounding workflow on an engine known, with
#: the coordinates of the node's step as :data:`current`.
binder: ContextVar[Callable[[Engine], WorkflowRun | None] | None] = ContextVar("agentflow_binder", default=None)


def run_for(engine: Engine) -> WorkflowRun | None:
    """The workflow run on ``engine`` that this context belongs to, None outside of any graph.

    Whoever is about to call ``engine`` asks this first and reads :data:`current` after it: inside a graph's node
    this is what begins the agent's step, and the workflow if it is the first.
    """
    bind = binder.get()
    if bind is not None:
        return bind(engine)
    run = current_run.get()
    return run if run is not None and run.engine is engine else None
