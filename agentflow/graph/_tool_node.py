"""LangGraph's injected arguments for tools that a :class:`~agentflow.tools.ToolExecutor` runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from langchain_core.messages import ToolCall
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import BaseTool
from langgraph.prebuilt import ToolNode, ToolRuntime
from langgraph.runtime import Runtime, get_runtime

from agentflow.tools import ToolExecutor, ToolExecutorNode

__all__ = ["GraphInjector", "tool_node"]


class GraphInjector:
    """Supplies ``InjectedState``, ``InjectedStore`` and ``ToolRuntime`` arguments exactly as ``ToolNode`` does."""

    def __init__(self) -> None:
        self._node = ToolNode([])

    def __call__(self, tool: BaseTool, call: ToolCall, state: Any, config: RunnableConfig | None) -> Mapping[str, Any]:
        """The injected arguments of ``call``. Raises what ``ToolNode`` raises when the state lacks a field."""
        config = config or {}
        runtime = _runtime()
        node = self._node
        seen: Any = node._extract_state([call], config) if state is None else state  # type: ignore[list-item]
        filled = node._inject_tool_args(
            call,
            ToolRuntime(
                state=seen,
                tool_call_id=call["id"],
                config=config,
                context=runtime.context,
                store=runtime.store,
                stream_writer=runtime.stream_writer,
                tools=[tool],
                execution_info=runtime.execution_info,
                server_info=runtime.server_info,
            ),
            tool,
        )
        given = call["args"]
        return {k: v for k, v in filled["args"].items() if k not in given or v is not given[k]}


def tool_node(
    tools: Iterable[BaseTool | Callable[..., Any]],
    *,
    messages_key: str = "messages",
    name: str = "tools",
    **options: Any,
) -> ToolExecutorNode:
    """A drop-in for LangGraph's ``ToolNode`` that runs tools by a ``ToolExecutor``; ``options`` are the executor's."""
    return ToolExecutor(tools, inject=GraphInjector(), **options).node(messages_key=messages_key, name=name)


def _runtime() -> Runtime[Any]:
    try:
        return get_runtime() or Runtime()
    except RuntimeError:  # not inside a graph
        return Runtime()
