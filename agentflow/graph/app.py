"""A compiled graph with a typed way to run it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self
from uuid import uuid4

from langchain_core.runnables import RunnableConfig
from langgraph.errors import GraphRecursionError
from langgraph.graph.state import CompiledStateGraph

from agentflow.engine.context import graph_guards
from agentflow.engine.workflow import WorkflowRun
from agentflow.errors import SetupError, UsageError, WorkflowStopped
from agentflow.graph._options import refuse_unknown
from agentflow.graph.handler import AgentflowHandler, collected_runs
from agentflow.graph.result import RunOutcome, RunResult
from agentflow.runtime.guards import Guards

__all__ = ["AgentApp"]

_INTERRUPT = "__interrupt__"


class AgentApp(CompiledStateGraph[Any, Any, Any, Any]):
    """A LangGraph ``CompiledStateGraph`` in every way, with :meth:`run` and :meth:`arun` on top.

    ``invoke``, ``stream`` and the rest keep LangGraph's behaviour and values, and emit the same events.
    """

    @classmethod
    def of(
        cls,
        graph: CompiledStateGraph[Any, Any, Any, Any],
        handler: AgentflowHandler | None,
        *,
        max_steps: int | None = None,
    ) -> Self:
        """The graph as an app, followed by ``handler`` instead of any earlier one."""
        if max_steps is not None and (isinstance(max_steps, bool) or not isinstance(max_steps, int) or max_steps < 1):
            raise UsageError(f"max_steps must be an integer of at least 1, got {max_steps!r}")
        config: RunnableConfig = {**(graph.config or {})}
        if handler is not None:
            given = config.get("callbacks")
            if given is not None and not isinstance(given, list):
                raise UsageError("the graph carries a callback manager; attach it before binding one")
            config["callbacks"] = [*(h for h in given or [] if not isinstance(h, AgentflowHandler)), handler]
        if max_steps is not None:
            config["recursion_limit"] = max_steps
        attrs = {k: v for k, v in graph.__dict__.items() if k != "__orig_class__"}
        return cls(**(attrs | {"config": config}))

    @property
    def handler(self) -> AgentflowHandler | None:
        """The handler that follows this app's runs."""
        callbacks = (self.config or {}).get("callbacks")
        handlers = callbacks if isinstance(callbacks, list) else []
        return next((h for h in handlers if isinstance(h, AgentflowHandler)), None)

    @property
    def policy_stats(self) -> Mapping[str, Any]:
        """What the policies given to this graph counted: ``counters``, and ``policies`` by name."""
        guards = self.handler.binding.guards if self.handler is not None else None
        return guards.stats() if guards is not None else {"counters": {}, "policies": {}}

    def stream(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Iterator[Any]:
        """LangGraph's ``stream``; closed early it stops the model calls that run before it waits for its nodes."""
        handler = self.handler
        if handler is None:
            yield from super().stream(input, config, **kwargs)
            return
        run_id = (config or {}).get("run_id") or uuid4()
        source = super().stream(input, {**(config or {}), "run_id": run_id}, **kwargs)
        try:
            yield from _kept_open(source, handler.binding.guards)
        except GeneratorExit:
            handler.abandon(run_id)
            raise
        finally:
            source.close()  # type: ignore[attr-defined]

    def astream(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> AsyncIterator[Any]:
        """LangGraph's ``astream``."""
        source = super().astream(input, config, **kwargs)
        guards = self.handler.binding.guards if self.handler is not None else None
        return source if guards is None else _aunder(source, guards)

    def run(
        self,
        input: Any,
        config: RunnableConfig | None = None,
        *,
        workflow_id: str | None = None,
        thread_id: str | None = None,
        tenant: str | None = None,
        max_steps: int | None = None,
        **options: Any,
    ) -> RunResult:
        """Run the graph and say what came of it, with usage, timings and decisions per agent.

        A run that reaches its bound of steps (``max_steps``, else the one given at compile time) ends with
        outcome ``limit`` and the state so far, and so does one that a policy stops (``reason`` says which limit);
        a node's error ends it with ``error`` and the state before that step. Errors of the calling code or the
        installation (:class:`~agentflow.errors.UsageError`, :class:`~agentflow.errors.SetupError`) are raised, and
        so is being cancelled.

        ``workflow_id`` names the workflow in events; without it the ``thread_id`` does, so that a run that
        was paused goes on as the same workflow, and without both every run has an id of its own.
        ``options`` are those of LangGraph's ``stream``: ``context``, ``durability``, ``interrupt_before``, ...
        """
        refuse_unknown(options, "run()", AgentApp.run, CompiledStateGraph.stream)
        config = self._run_config(config, workflow_id, thread_id, tenant, max_steps)
        watch = _Watch(self, config)
        token = collected_runs.set(watch.runs)
        try:
            for mode, chunk in self.stream(input, config, stream_mode=["values", "updates"], **options):
                watch.take(mode, chunk)
        except Exception as error:
            watch.stopped(error)
        finally:
            collected_runs.reset(token)
        return watch.result()

    async def arun(
        self,
        input: Any,
        config: RunnableConfig | None = None,
        *,
        workflow_id: str | None = None,
        thread_id: str | None = None,
        tenant: str | None = None,
        max_steps: int | None = None,
        **options: Any,
    ) -> RunResult:
        """Like :meth:`run`, without blocking the event loop."""
        refuse_unknown(options, "arun()", AgentApp.arun, CompiledStateGraph.astream)
        config = self._run_config(config, workflow_id, thread_id, tenant, max_steps)
        watch = _Watch(self, config)
        token = collected_runs.set(watch.runs)
        try:
            async for mode, chunk in self.astream(input, config, stream_mode=["values", "updates"], **options):
                watch.take(mode, chunk)
        except Exception as error:
            watch.stopped(error)
        finally:
            collected_runs.reset(token)
        return watch.result()

    def _run_config(
        self,
        config: RunnableConfig | None,
        workflow_id: str | None,
        thread_id: str | None,
        tenant: str | None,
        max_steps: int | None,
    ) -> RunnableConfig:
        out: RunnableConfig = {**(config or {})}
        named = {k: v for k, v in (("workflow_id", workflow_id), ("tenant", tenant)) if v is not None}
        if named:
            out["metadata"] = {**(out.get("metadata") or {}), **named}
        if thread_id is not None:
            out["configurable"] = {**(out.get("configurable") or {}), "thread_id": thread_id}
        if max_steps is not None:
            if isinstance(max_steps, bool) or not isinstance(max_steps, int) or max_steps < 1:
                raise UsageError(f"max_steps must be an integer of at least 1, got {max_steps!r}")
            out["recursion_limit"] = max_steps
        return out


@contextmanager
def _holding(guards: Guards | None) -> Iterator[None]:
    """What is started here is under ``guards`` too, innermost; a graph inside another has its own policies."""
    held = graph_guards.get()
    token = graph_guards.set(held if guards is None or guards in held else (guards, *held))
    try:
        yield
    finally:
        graph_guards.reset(token)


def _kept_open(source: Iterator[Any], guards: Guards | None) -> Iterator[Any]:
    """The items of ``source``, made under ``guards``. Closing this iterator does not close ``source``."""
    while True:
        with _holding(guards):
            try:
                item = next(source)
            except StopIteration:
                return
        yield item


async def _aunder(source: AsyncIterator[Any], guards: Guards) -> AsyncIterator[Any]:
    """The items of ``source``, made under ``guards``."""
    try:
        while True:
            with _holding(guards):
                try:
                    item = await anext(source)
                except StopAsyncIteration:
                    return
            yield item
    finally:
        await source.aclose()  # type: ignore[attr-defined]


class _Watch:
    """What is seen of one run while it goes on."""

    def __init__(self, app: AgentApp, config: RunnableConfig) -> None:
        self.runs: list[WorkflowRun] = []
        self._limit = config.get("recursion_limit") or (app.config or {}).get("recursion_limit") or 0
        self._state: Mapping[str, Any] = {}
        self._interrupts: list[Any] = []
        self._paused = False
        self._error: Exception | None = None
        self._outcome: RunOutcome | None = None
        self._reason = ""
        self._stopped: WorkflowStopped | None = None

    def take(self, mode: str, chunk: Any) -> None:
        if mode == "values":
            if isinstance(chunk, Mapping):
                self._state = {k: v for k, v in chunk.items() if k != _INTERRUPT}
            else:
                self._state = {"__root__": chunk}
        elif isinstance(chunk, Mapping) and _INTERRUPT in chunk:
            self._paused = True
            self._interrupts += chunk[_INTERRUPT]

    def stopped(self, error: Exception) -> None:
        if isinstance(error, GraphRecursionError):
            self._outcome, self._reason = "limit", "max_steps"
        elif isinstance(error, WorkflowStopped):
            self._outcome, self._reason, self._stopped = "limit", error.reason, error
        elif isinstance(error, UsageError | SetupError):
            raise error
        else:
            self._outcome, self._error = "error", error

    def result(self) -> RunResult:
        return RunResult(
            state=self._state,
            outcome=self._outcome or ("paused" if self._paused else "done"),
            interrupts=tuple(self._interrupts),
            error=self._error,
            reason=self._reason,
            stopped=self._stopped,
            runs=tuple(self.runs),
            max_steps=self._limit,
        )
