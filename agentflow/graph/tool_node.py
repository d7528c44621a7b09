"""Tools in a graph: a node that runs them, and LangGraph's injected arguments for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from langchain_core.messages import ToolCall
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import BaseTool

from agentflow.graph.agent import Agent
from agentflow.tools import ToolExecutor
from agentflow.tools.node import ToolExecutorNode

__all__ = ["tool_executor", "tool_node"]


def tool_executor(agent: Agent) -> ToolExecutor:
    """An executor of an agent's tools that supplies LangGraph's injected arguments."""
    return ToolExecutor(agent.tools)


def tool_node(
    tools: Iterable[BaseTool | Callable[..., Any]],
    *,
    messages_key: str = "messages",
    name: str = "tools",
    **options: Any,
) -> ToolExecutorNode:
    """A node that runs the tool calls of the last message: what LangGraph's ``ToolNode`` is, with time limits,
    retries, error answers and events. ``options`` are those of :class:`~agentflow.tools.ToolExecutor`."""
    return ToolExecutor(tools, **options).node(messages_key=messages_key, name=name)


def inject(tool: BaseTool, call: ToolCall, state: Any, config: RunnableConfig | None) -> Mapping[str, Any]:
    """The state, store and runtime that a tool's signature asks LangGraph for."""
    return {}
