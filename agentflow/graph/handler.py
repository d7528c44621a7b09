"""The callback handler that turns LangChain's callbacks about a graph into agentflow's events.

LangChain swallows errors of handlers, so this one counts its own in :attr:`AgentflowHandler.errors`.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar
from uuid import UUID

from langgraph.callbacks import GraphCallbackHandler, GraphInterruptEvent
from langgraph.errors import GraphBubbleUp, GraphInterrupt
from langgraph.types import Command

from agentflow.engine.base import Completion, Engine, Timings, Usage
from agentflow.engine.context import binder, current, current_run, graph_guards, handled_tool_run
from agentflow.engine.in_flight import abort_calls
from agentflow.engine.workflow import WorkflowRun
from agentflow.errors import CallAborted
from agentflow.events import (
    MAX_FIELD_CHARS,
    AgentEnded,
    AgentStarted,
    StateSuperseded,
    ToolEnded,
    ToolOutcome,
    ToolStarted,
    WorkflowEnded,
    WorkflowPaused,
)
from agentflow.graph._reading import (
    agents_behind,
    attempt_name,
    destinations,
    kind_of,
    outcome_of,
    own_branch,
    superseded,
)
from agentflow.graph._scopes import Binding, NodeScope, RootScope, ToolScope, workflows_of

__all__ = ["AgentflowHandler", "NodeBinder", "collected_runs"]

log = logging.getLogger(__name__)
F = TypeVar("F", bound=Callable[..., None])

#: Where root runs put the workflow runs they begin, for the caller's report.
collected_runs: ContextVar[list[WorkflowRun] | None] = ContextVar("agentflow_collected_runs", default=None)

#: Runs left behind by cancelled graphs that a handler remembers.
DEAD_LIMIT = 1024

_Scope = RootScope | NodeScope


def _counted(method: F) -> F:
    """Count an error instead of letting LangChain log and forget it."""

    @functools.wraps(method)
    def guarded(self: AgentflowHandler, *args: Any, **kwargs: Any) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception:
            self.count_error(method.__name__)

    return guarded  # type: ignore[return-value]


class NodeBinder:
    """Begins the workflow of a chat model's engine, and the step of its agent, at the first call in a node."""

    __slots__ = ("handler", "node")

    def __init__(self, handler: AgentflowHandler, node: NodeScope) -> None:
        self.handler = handler
        self.node = node

    def __call__(self, engine: Engine) -> WorkflowRun | None:
        try:
            return self.handler.bind(self.node, engine)
        except CallAborted:
            raise
        except Exception:
            self.handler.count_error("bind")
            return self.node.root.runs.get(id(engine))


class AgentflowHandler(GraphCallbackHandler):
    """Follows every run of the graphs it is attached to. Thread-safe; its state is freed as runs end.

    All handlers are equal, so that a graph attached inside an attached graph is followed once, by the outer
    one. ``errors`` counts this handler's own errors per callback.
    """

    run_inline = True
    raise_error = False

    def __init__(self, binding: Binding | None = None, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self.binding = binding or Binding()
        self.errors: dict[str, int] = {}
        self._clock = clock
        self._scopes: dict[UUID, _Scope] = {}
        self._dead: OrderedDict[UUID, None] = OrderedDict()
        self._branches: dict[UUID, NodeScope] = {}
        self._tools: dict[UUID, ToolScope] = {}
        self._models: dict[UUID, tuple[NodeScope, float]] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AgentflowHandler)

    def __hash__(self) -> int:
        return hash(AgentflowHandler)

    def count_error(self, where: str) -> None:
        """Count the exception being handled; the first of each place is logged."""
        self.errors[where] = self.errors.get(where, 0) + 1
        if self.errors[where] == 1:
            log.exception("agentflow's %s failed; the graph goes on, its events are incomplete", where)

    @property
    def remembered(self) -> int:
        """How many LangChain runs it remembers now; 0 when no graph runs."""
        return len(self._scopes) + len(self._branches) + len(self._tools) + len(self._models)

    # ------------------------------------------------------------------ graphs, nodes and what runs in them

    @_counted
    def on_chain_start(
        self,
        serialized: Any,
        inputs: Any,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        tags: Sequence[str] | None = None,
        metadata: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        parent = self._scopes.get(parent_run_id) if parent_run_id is not None else None
        metadata = metadata or {}
        if parent is None:
            if parent_run_id in self._dead:
                self._bury(run_id)
            elif self.binding.engine is not None or "ls_integration" in metadata:
                self._begin_root(run_id, metadata, kwargs.get("name"), inputs)
            return
        root = parent if isinstance(parent, RootScope) else parent.root
        root.below.add(run_id)
        kind = kind_of(tags)
        inner = isinstance(parent, NodeScope) and metadata.get("langgraph_checkpoint_ns", parent.task) != parent.task
        if kind == "node" or (kind == "branch" and inner):  # the latter is a @task of the functional API
            self._scopes[run_id] = self._begin_node(root, parent, run_id, metadata)
            return
        self._scopes[run_id] = parent
        if kind == "branch" and isinstance(parent, NodeScope) and parent.run_id == parent_run_id:
            self._branches[run_id] = parent

    @_counted
    def on_chain_end(self, outputs: Any, *, run_id: UUID, **kwargs: Any) -> None:
        branch = self._branches.pop(run_id, None)
        if branch is not None:
            branch.route += destinations(outputs, branch.root.binding.labels.get(branch.node) or {})
        self._end(run_id, outputs, None)

    @_counted
    def on_chain_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        self._branches.pop(run_id, None)
        self._end(run_id, None, error)

    @_counted
    def on_interrupt(self, event: GraphInterruptEvent) -> None:
        scope = self._scopes.get(event.run_id) if event.run_id is not None else None
        if isinstance(scope, RootScope) and scope.run_id == event.run_id:
            scope.interrupted = True

    def _begin_root(self, run_id: UUID, metadata: Mapping[str, Any], name: str | None, inputs: Any) -> None:
        root = RootScope(run_id, self.binding, metadata, name, inputs)
        self._scopes[run_id] = root
        if self.binding.engine is not None:
            self._run_on(root, self.binding.engine)

    def _bury(self, run_id: UUID) -> None:
        """Remember that what still starts below this run belongs to a graph run that is over."""
        self._dead[run_id] = None
        while len(self._dead) > DEAD_LIMIT:
            self._dead.popitem(last=False)

    def _run_on(self, root: RootScope, engine: Engine) -> WorkflowRun:
        run = root.run_on(engine)
        collected = collected_runs.get()
        if collected is not None and run not in collected:
            collected.append(run)
        return run

    def _begin_node(self, root: RootScope, parent: _Scope, run_id: UUID, metadata: Mapping[str, Any]) -> NodeScope:
        name = str(metadata.get("langgraph_node", ""))
        task = str(metadata.get("langgraph_checkpoint_ns", run_id))
        outer = parent.branch if isinstance(parent, NodeScope) else None
        failed_before = root.failed.get(task, 0)
        own = own_branch(metadata.get("langgraph_path"), task, outer)
        node = NodeScope(
            root=root,
            run_id=run_id,
            node=name,
            agent=str(metadata.get("lc_agent_name") or name)[:MAX_FIELD_CHARS],
            branch=outer if own is None else attempt_name(own, failed_before),
            task=task,
            nested=isinstance(parent, NodeScope),
            failed_before=failed_before,
            own_branch=own,
            before=(current.get(), current_run.get(), binder.get()),
        )
        run = self._main_run(root)
        agent, step = root.last_agent.get(node.branch) or root.last_agent.get(outer) or (node.agent, None)
        current_run.set(run)
        binder.set(NodeBinder(self, node))
        if run is not None:
            current.set(run.coordinates(agent, step=step, branch=node.branch))
            run.listened(graph_guards.get())
        return node

    def _main_run(self, root: RootScope) -> WorkflowRun | None:
        """The run on the engine that was given, or else on the engine used first."""
        engine = root.binding.engine
        return root.runs.get(id(engine)) if engine is not None else next(iter(root.runs.values()), None)

    def bind(self, node: NodeScope, engine: Engine) -> WorkflowRun | None:
        """A chat model of ``engine`` is about to be called in ``node``.

        Raises :class:`~agentflow.errors.CallAborted` in a run that was cancelled: a node in a thread may not
        have noticed. In one that has ended otherwise nothing begins any more.
        """
        root = node.root
        if root.cancelled or node.cancelled:
            raise CallAborted(
                f"not called: the run of workflow {root.workflow!r} that this call is part of was cancelled"
            )
        if root.ended:
            return root.runs.get(id(engine))
        run = self._run_on(root, engine)
        run.listened(graph_guards.get())
        self._announce(node, run)
        return run

    def _announce(self, node: NodeScope, run: WorkflowRun) -> None:
        """The node has turned out to be an agent: say so once, and put its coordinates on what follows."""
        step = node.steps.get(id(run))
        if step is None:
            step = node.steps[id(run)] = run.next_step()
            run.emit(AgentStarted, agent=node.agent, step=step)
            node.root.last_agent[node.branch] = (node.agent, step)
        current_run.set(run)
        current.set(run.coordinates(node.agent, step=step, branch=node.branch))

    def _end(self, run_id: UUID, outputs: Any, error: BaseException | None) -> None:
        scope = self._scopes.pop(run_id, None)
        if scope is None:
            return
        if isinstance(scope, RootScope):
            if scope.run_id == run_id:
                self._end_root(scope, error)
            else:
                scope.below.discard(run_id)
            return
        scope.root.below.discard(run_id)
        if scope.run_id == run_id:
            self._end_node(scope, outputs, error)

    def _end_node(self, node: NodeScope, outputs: Any, error: BaseException | None) -> None:
        root = node.root
        if node.before is not None:
            at, run_before, bound = node.before
            current.set(at)
            current_run.set(run_before)
            binder.set(bound)
        if isinstance(error, GraphInterrupt) and not node.nested:
            root.interrupted = True
        following = self._next(node, outputs) if error is None else ()
        if error is not None and not isinstance(error, GraphBubbleUp):
            root.failed[node.task] = node.failed_before + 1
        else:
            root.failed.pop(node.task, None)
        if node.own_branch is not None and node.branch is not None:
            root.last_agent.pop(node.branch, None)
        if isinstance(error, asyncio.CancelledError):
            node.cancelled = True
            self._bury(node.run_id)  # a node in a thread goes on
            abort_calls(root.workflow, agent=node.agent, branch=node.branch)
        for run in list(root.runs.values()):
            if not isinstance(error, GraphInterrupt):
                run.forget_asked(node.task)
            step = node.steps.get(id(run))
            if step is not None:
                run.emit(AgentEnded, agent=node.agent, step=step, next=following)
                for branch in superseded(node, error):
                    run.emit(StateSuperseded, agent=node.agent, step=step, branch=branch)

    def _next(self, node: NodeScope, outputs: Any) -> tuple[str, ...]:
        """The agents that run after ``node``, as far as the graph tells by edges, branches and commands."""
        if node.nested:
            return ()
        binding = node.root.binding
        targets = [*binding.successors.get(node.node, ()), *node.route]
        if isinstance(outputs, Command):
            targets += destinations(outputs.goto, {})
        found: dict[str, None] = {}
        for target in targets if not binding.nodes else (t for t in targets if t in binding.nodes):
            found.update(dict.fromkeys(agents_behind(target, binding)))
        return tuple(found)[:256]

    def _end_root(self, root: RootScope, error: BaseException | None) -> None:
        for run_id in list(root.below):  # still running, in threads that were left behind
            self._bury(run_id)
            self._scopes.pop(run_id, None)
            self._branches.pop(run_id, None)
            self._tools.pop(run_id, None)
            self._models.pop(run_id, None)
        root.ended = True
        paused = root.interrupted and (error is None or isinstance(error, GraphInterrupt))
        outcome = outcome_of(error)
        root.cancelled |= outcome == "cancelled"
        for run in root.runs.values():
            if not workflows_of(run.engine).leave(run, paused=paused):
                continue
            if paused:
                run.emit(WorkflowPaused)
                continue
            if error is not None:
                abort_calls(root.workflow)
            run.emit(WorkflowEnded, outcome=outcome)
            workflows_of(run.engine).ended(root, run)

    def abandon(self, run_id: UUID) -> None:
        """Nobody wants the results of the graph run ``run_id`` any more: stop the calls that run in it."""
        root = self._scopes.get(run_id)
        if isinstance(root, RootScope) and root.run_id == run_id and root.runs:
            root.cancelled = True
            abort_calls(root.workflow)

    # ------------------------------------------------------------------ model calls

    @_counted
    def on_chat_model_start(
        self, serialized: Any, messages: Any, *, run_id: UUID, parent_run_id: UUID | None = None, **kwargs: Any
    ) -> None:
        node = self._scopes.get(parent_run_id) if parent_run_id is not None else None
        if not isinstance(node, NodeScope):
            return
        binder.set(NodeBinder(self, node))
        if (kwargs.get("invocation_params") or {}).get("_type") == "agentflow":
            return  # that one asks the binder for its engine's run, and records its calls itself
        node.root.below.add(run_id)
        self._models[run_id] = (node, self._clock())
        if node.root.binding.engine is not None:
            self._announce(node, self._run_on(node.root, node.root.binding.engine))

    @_counted
    def on_llm_end(self, response: Any, *, run_id: UUID, **kwargs: Any) -> None:
        node, started = self._models.pop(run_id, (None, 0.0))
        if node is None:
            return
        node.root.below.discard(run_id)
        run = self._main_run(node.root)
        message = getattr(response.generations[0][0], "message", None) if response.generations else None
        if run is None or message is None:
            return
        used = message.usage_metadata or {}
        usage = Usage(
            prompt_tokens=used.get("input_tokens", 0),
            completion_tokens=used.get("output_tokens", 0),
            cached_device=(used.get("input_token_details") or {}).get("cache_read", 0),
        )
        done = Completion(
            request_id=str(run_id),
            text="",
            token_ids=(),
            finish="stop",
            usage=usage,
            timings=Timings(total=self._clock() - started),
        )
        run.record(run.coordinates(node.agent, step=node.steps.get(id(run)), branch=node.branch), done)

    @_counted
    def on_llm_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        node, _ = self._models.pop(run_id, (None, 0.0))
        if node is not None:
            node.root.below.discard(run_id)

    # ------------------------------------------------------------------ tools that do not emit events themselves

    @_counted
    def on_tool_start(
        self,
        serialized: Any,
        input_str: str,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        tool_call_id: str | None = None,
        **kwargs: Any,
    ) -> None:
        scope = self._scopes.get(parent_run_id) if parent_run_id is not None else None
        if not isinstance(scope, NodeScope):
            return
        scope.root.below.add(run_id)
        self._scopes[run_id] = scope
        run = self._main_run(scope.root)
        if handled_tool_run.get() == run_id or run is None:
            return
        at = current.get()
        name = str((serialized or {}).get("name") or kwargs.get("name") or "")[:MAX_FIELD_CHARS]
        call_id = str(tool_call_id or run_id)[:MAX_FIELD_CHARS]
        run.emit(ToolStarted, agent=at.agent, step=at.step, tool=name, call_id=call_id)
        self._tools[run_id] = ToolScope(run, scope, name, call_id, at.agent, at.step, self._clock())

    @_counted
    def on_tool_end(self, output: Any, *, run_id: UUID, **kwargs: Any) -> None:
        self._end_tool(run_id, "error" if getattr(output, "status", None) == "error" else "ok")

    @_counted
    def on_tool_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        outcome: ToolOutcome = "error"
        if isinstance(error, asyncio.CancelledError | KeyboardInterrupt | GraphBubbleUp):
            outcome = "cancelled"
        elif isinstance(error, TimeoutError):
            outcome = "timeout"
        self._end_tool(run_id, outcome)

    def _end_tool(self, run_id: UUID, outcome: ToolOutcome) -> None:
        scope = self._scopes.pop(run_id, None)
        if isinstance(scope, NodeScope):
            scope.root.below.discard(run_id)
        tool = self._tools.pop(run_id, None)
        if tool is None:
            return
        tool.run.emit(
            ToolEnded,
            agent=tool.agent,
            step=tool.step,
            tool=tool.tool,
            call_id=tool.call_id,
            duration=max(0.0, self._clock() - tool.started),
            outcome=outcome,
        )
