"""Graphs of agents on LangGraph: agents, prompts of private and shared text, the graph builder, and ``attach``."""

from __future__ import annotations

from agentflow.graph.agent import Agent
from agentflow.graph.answer import AgentAnswer
from agentflow.graph.app import AgentApp
from agentflow.graph.attach import attach
from agentflow.graph.builder import AgentGraph
from agentflow.graph.prompt import shared
from agentflow.graph.result import RunOutcome, RunResult
from agentflow.graph.tool_node import tool_node

__all__ = [
    "Agent",
    "AgentAnswer",
    "AgentApp",
    "AgentGraph",
    "RunOutcome",
    "RunResult",
    "attach",
    "shared",
    "tool_node",
]
