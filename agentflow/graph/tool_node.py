"""Tools in a graph: a node that runs them, and LangGraph's injected arguments for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, get_args, get_origin, get_type_hints
from weakref import WeakKeyDictionary

from langchain_core.messages import ToolCall
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import BaseTool
from langgraph.config import get_config
from langgraph.prebuilt import InjectedState, InjectedStore, ToolRuntime
from langgraph.runtime import get_runtime
from langgraph.types import interrupt

from agentflow.engine.context import binder, current_run
from agentflow.errors import UsageError
from agentflow.tools import ToolExecutor
from agentflow.tools.node import ToolExecutorNode

__all__ = ["GraphInjector", "tool_executor", "tool_node"]

#: Where LangGraph keeps the checkpointer in a node's configuration.
_CHECKPOINTER = "__pregel_checkpointer"


def tool_executor(tools: Iterable[BaseTool | Callable[..., Any]], **options: Any) -> ToolExecutor:
    """A :class:`~agentflow.tools.ToolExecutor` that gives tools the state, store and runtime of the graph."""
    options.setdefault("inject", GraphInjector())
    options.setdefault("approve", _approve)
    return ToolExecutor(tools, **options)


def _approve(question: Mapping[str, Any]) -> Any:
    """Ask a person by an interrupt, and again where the answer was for another call.

    A node that goes on after an interrupt runs from its start and asks its model again, and LangGraph hands it the
    answers by their order alone. What was asked is known as long as the workflow's run is in this process.
    """
    if get_config().get("configurable", {}).get(_CHECKPOINTER) is None:
        raise UsageError(
            f"a policy wants a person's approval of {question.get('tool')}, and this graph cannot wait for one: compile"
            " it with a checkpointer and run it with a thread_id"
        )
    bound, run = binder.get(), current_run.get()
    node = getattr(bound, "node", None)
    if node is None or run is None:
        return interrupt(question)
    call = repr((question.get("tool"), question.get("arguments")))
    while True:
        place = (node.task, node.asked)
        node.asked += 1
        asked = run.asked.setdefault(place, call)
        answer = interrupt(question)
        if asked == call:
            return answer


def tool_node(
    tools: Iterable[BaseTool | Callable[..., Any]],
    *,
    messages_key: str = "messages",
    name: str = "tools",
    **options: Any,
) -> ToolExecutorNode:
    """A node that runs the tool calls of the last message, in the place of LangGraph's ``ToolNode``.

    On top of it: time limits, retries, caps, an error answer for every failed call with its siblings kept, and
    events. Tools get LangGraph's injected arguments (``InjectedState``, ``InjectedStore``, ``ToolRuntime``).
    ``options`` are those of :class:`~agentflow.tools.ToolExecutor`.
    """
    return tool_executor(tools, **options).node(messages_key=messages_key, name=name)


class GraphInjector:
    """Supplies the arguments that a tool's signature asks LangGraph for."""

    def __init__(self) -> None:
        self._wanted: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()

    def __call__(self, tool: BaseTool, call: ToolCall, state: Any, config: RunnableConfig | None) -> Mapping[str, Any]:
        """The injected arguments of one call. Raises ``UsageError`` for what this graph does not have."""
        function = getattr(tool, "func", None) or getattr(tool, "coroutine", None) or tool._run
        wanted = self._wanted.get(function)
        if wanted is None:
            wanted = self._wanted[function] = _wanted(function)
        return {name: self._value(tool, name, kind, call, state, config) for name, kind in wanted.items()}

    def _value(
        self, tool: BaseTool, name: str, kind: Any, call: ToolCall, state: Any, config: RunnableConfig | None
    ) -> Any:
        if isinstance(kind, InjectedState):
            if kind.field is None:
                return state
            value = state.get(kind.field) if isinstance(state, Mapping) else getattr(state, kind.field, None)
            if value is None:
                raise UsageError(
                    f"tool {tool.name!r} wants the state key {kind.field!r} as {name!r}; the state lacks it"
                )
            return value
        runtime = get_runtime()
        if isinstance(kind, InjectedStore):
            if runtime.store is None:
                raise UsageError(f"tool {tool.name!r} wants a store as {name!r}: compile the graph with store=...")
            return runtime.store
        return ToolRuntime(
            state=state,
            context=runtime.context,
            config=config or {},
            stream_writer=runtime.stream_writer,
            tool_call_id=call["id"],
            store=runtime.store,
            execution_info=runtime.execution_info,
            server_info=runtime.server_info,
        )


def _wanted(function: Callable[..., Any]) -> dict[str, Any]:
    """Parameter -> what is to be injected: an ``InjectedState``, an ``InjectedStore``, or ``ToolRuntime``."""
    try:
        hints = get_type_hints(function, include_extras=True)
    except (NameError, TypeError):  # a hint that cannot be resolved here cannot be one of LangGraph's
        hints = {}
    out: dict[str, Any] = {}
    for name, hint in hints.items():
        if hint is ToolRuntime or get_origin(hint) is ToolRuntime:
            out[name] = ToolRuntime
        if get_origin(hint) is not Annotated:
            continue
        for mark in get_args(hint)[1:]:
            made = mark() if mark in (InjectedState, InjectedStore) else mark
            if isinstance(made, InjectedState | InjectedStore):
                out[name] = made
    return out
