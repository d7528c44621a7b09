"""Run LangGraph multi-agent graphs on an embedded SGLang engine whose KV cache knows the workflow.

Everything here is loaded at first use: importing agentflow loads neither torch nor SGLang, nor LangGraph.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from agentflow.cache.decision import Decision
    from agentflow.engine.base import Completion, Engine, Sampling, Usage
    from agentflow.engine.chat_model import AgentflowChat
    from agentflow.engine.embedded import EmbeddedEngine
    from agentflow.engine.guard import forbid_real_engines
    from agentflow.engine.remote import RemoteEngine
    from agentflow.engine.scripted import ScriptedEngine, tool_call
    from agentflow.engine.workflow import AgentReport
    from agentflow.errors import AgentflowError, EngineFailure, OutputError, SetupError, ToolFailure, UsageError
    from agentflow.graph import Agent, AgentAnswer, AgentApp, AgentGraph, RunResult, attach, shared, tool_node
    from agentflow.tools import ToolExecutor, Transient, tool

#: Public name -> module that holds it.
_HOMES = {
    "Agent": "agentflow.graph",
    "AgentAnswer": "agentflow.graph",
    "AgentApp": "agentflow.graph",
    "AgentGraph": "agentflow.graph",
    "AgentReport": "agentflow.engine.workflow",
    "AgentflowChat": "agentflow.engine.chat_model",
    "AgentflowError": "agentflow.errors",
    "Completion": "agentflow.engine.base",
    "Decision": "agentflow.cache.decision",
    "EmbeddedEngine": "agentflow.engine.embedded",
    "Engine": "agentflow.engine.base",
    "EngineFailure": "agentflow.errors",
    "OutputError": "agentflow.errors",
    "RemoteEngine": "agentflow.engine.remote",
    "RunResult": "agentflow.graph",
    "Sampling": "agentflow.engine.base",
    "ScriptedEngine": "agentflow.engine.scripted",
    "SetupError": "agentflow.errors",
    "ToolExecutor": "agentflow.tools",
    "ToolFailure": "agentflow.errors",
    "Transient": "agentflow.tools",
    "Usage": "agentflow.engine.base",
    "UsageError": "agentflow.errors",
    "attach": "agentflow.graph",
    "forbid_real_engines": "agentflow.engine.guard",
    "shared": "agentflow.graph",
    "tool": "agentflow.tools",
    "tool_call": "agentflow.engine.scripted",
    "tool_node": "agentflow.graph",
}

__all__ = [
    "Agent",
    "AgentAnswer",
    "AgentApp",
    "AgentGraph",
    "AgentReport",
    "AgentflowChat",
    "AgentflowError",
    "Completion",
    "Decision",
    "EmbeddedEngine",
    "Engine",
    "EngineFailure",
    "OutputError",
    "RemoteEngine",
    "RunResult",
    "Sampling",
    "ScriptedEngine",
    "SetupError",
    "ToolExecutor",
    "ToolFailure",
    "Transient",
    "Usage",
    "UsageError",
    "__version__",
    "attach",
    "forbid_real_engines",
    "shared",
    "tool",
    "tool_call",
    "tool_node",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'agentflow' has no attribute {name!r}")
    if name == "AgentflowChat":
        # A graph of plain LangGraph shall need no more than this model: follow the graphs that call it.
        importlib.import_module("agentflow.graph.ambient").install()
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
