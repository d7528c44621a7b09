"""Tools: ``@tool``, and the executor that runs tool calls with time limits, retries, caps and events."""

from agentflow.tools.errors import TOOL_ERROR_KINDS, ToolErrorKind, Transient, error_kind
from agentflow.tools.executor import Injector, ToolExecutor
from agentflow.tools.node import ToolExecutorNode
from agentflow.tools.tool import AgentTool, ToolOptions, tool

__all__ = [
    "AgentTool",
    "Injector",
    "TOOL_ERROR_KINDS",
    "ToolErrorKind",
    "ToolExecutor",
    "ToolExecutorNode",
    "ToolOptions",
    "Transient",
    "error_kind",
    "tool",
]
