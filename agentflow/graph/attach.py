"""``attach``: agentflow's events for a graph that exists already, by one line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from langgraph.graph.state import CompiledStateGraph
from langgraph.prebuilt import ToolNode

from agentflow.cache.policy import PolicySpec
from agentflow.engine.base import Engine, Reuse, check_reuse
from agentflow.errors import UsageError
from agentflow.graph._scopes import Binding
from agentflow.graph.app import AgentApp
from agentflow.graph.handler import AgentflowHandler
from agentflow.runtime.guards import Guards

__all__ = ["attach", "binding_of"]


def attach(
    graph: CompiledStateGraph[Any, Any, Any, Any],
    engine: Engine,
    *,
    name: str | None = None,
    tenant: str | None = None,
    max_steps: int | None = None,
    policies: Sequence[PolicySpec] = (),
    reuse: Reuse = "exact",
) -> AgentApp:
    """A copy of a compiled graph whose runs tell ``engine`` what happens in them.

    Works for any compiled graph, those of ``create_agent`` included; the graph itself is not changed, and the
    copy is used like it, with :meth:`AgentApp.run` on top. The models in the graph stay the ones it was
    built with: use ``AgentflowChat(engine)`` there, so that the calls reach the engine too.

    ``name`` names the graph and ``tenant`` who pays, in events. ``max_steps`` is a bound on its steps.
    ``policies`` are those of the framework (``safety``, ``memo``, ``hedging``) for this graph's runs, beside the
    engine's; rules for tools are refused where LangGraph's own ``ToolNode`` runs them. With ``reuse="corrected"`` calls
    may use other agents' KV of what they share, corrected: faster, and nearly exact (see the guide to KVCMAS).
    """
    if not isinstance(graph, CompiledStateGraph):
        raise UsageError(f"attach() takes a compiled graph, not {type(graph).__name__}; call .compile() first")
    if not isinstance(engine, Engine):
        raise UsageError(f"attach() takes an engine, not {type(engine).__name__}; for a chat model, give its engine")
    binding = binding_of(graph, engine=engine, name=name, tenant=tenant, policies=policies, reuse=reuse)
    return AgentApp.of(graph, AgentflowHandler(binding), max_steps=max_steps)


def binding_of(
    graph: CompiledStateGraph[Any, Any, Any, Any],
    *,
    engine: Engine | None,
    model: Any = None,
    name: str | None = None,
    tenant: str | None = None,
    agents: frozenset[str] = frozenset(),
    policies: Sequence[PolicySpec] = (),
    agent_nodes: Mapping[str, Any] | None = None,
    reuse: Reuse = "exact",
) -> Binding:
    """What can be said of a compiled graph beforehand: its edges, and the labels of its branches."""
    check_reuse(reuse)
    guards = Guards(policies) if policies else None
    for each in (guards, getattr(engine, "guards", None)):
        if each is not None and (rules := each.rules_tools()) and (foreign := _foreign_tools(graph)):
            raise UsageError(
                f"{rules} cannot be kept in this graph: {', '.join(foreign)} is LangGraph's ToolNode, whose calls no"
                " policy sees. Run them by agentflow.graph.tool_node(tools) or an Agent's tools, or leave those options"
                " out"
            )
    builder = graph.builder
    successors: dict[str, list[str]] = {}
    for start, end in sorted(builder._all_edges):
        successors.setdefault(start, []).append(end)
    labels = {
        node: {label: end for spec in specs.values() for label, end in (spec.ends or {}).items()}
        for node, specs in builder.branches.items()
    }
    return Binding(
        engine=engine,
        model=model,
        graph=name or graph.get_name(),
        tenant=tenant,
        nodes=frozenset(builder.nodes),
        successors={k: tuple(v) for k, v in successors.items()},
        labels=labels,
        agents=agents,
        guards=guards,
        agent_nodes=agent_nodes or {},
        reuse=reuse,
    )


def _foreign_tools(graph: CompiledStateGraph[Any, Any, Any, Any]) -> list[str]:
    """Nodes, those of graphs inside included, that are LangGraph's own ``ToolNode``."""
    inside: list[tuple[str, Any]] = [(f"{name}.", sub) for name, sub in graph.get_subgraphs(recurse=True)]
    return [
        f"{prefix}{name}" for prefix, g in [("", graph), *inside] for name, n in g.nodes.items() if _is_foreign(n.bound)
    ]


def _is_foreign(runnable: Any) -> bool:
    return any(isinstance(step, ToolNode) for step in getattr(runnable, "steps", [runnable]))
