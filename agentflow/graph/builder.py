"""``AgentGraph``: LangGraph's ``StateGraph`` that knows what an agent is."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

from langchain_core.language_models import BaseChatModel
from langgraph.graph import StateGraph
from langgraph.types import Checkpointer

from agentflow.cache.policy import PolicySpec
from agentflow.engine.base import Engine, Reuse
from agentflow.engine.chat_model import AgentflowChat
from agentflow.errors import UsageError
from agentflow.graph._node import AgentNode, AgentSpec, PromptFunction, Writes, positional_count
from agentflow.graph._options import refuse_unknown
from agentflow.graph._sink import event_sink
from agentflow.graph.agent import Agent
from agentflow.graph.app import AgentApp
from agentflow.graph.attach import binding_of
from agentflow.graph.handler import AgentflowHandler
from agentflow.graph.tool_node import tool_executor

__all__ = ["AgentGraph"]


class AgentGraph(StateGraph[Any, Any, Any, Any]):
    """A ``StateGraph`` with :meth:`add_agent`; all else is LangGraph's, and stays usable."""

    def __init__(self, state_schema: type[Any], context_schema: type[Any] | None = None, **kwargs: Any) -> None:
        super().__init__(state_schema, context_schema, **kwargs)
        self._agents: dict[str, AgentSpec] = {}

    @property
    def agents(self) -> dict[str, Agent]:
        """The agents of the graph by node name."""
        return {name: spec.agent for name, spec in self._agents.items()}

    def add_agent(
        self,
        agent: Agent,
        *,
        prompt: PromptFunction | None = None,
        writes: Writes | None = None,
        history: str | None = None,
        **node_options: Any,
    ) -> Self:
        """Add an agent as a node of its own name.

        A step asks the model with the agent's instructions and ``prompt(state)``, runs the tools it calls, and
        asks again, until it answers or has used up ``agent.max_tool_rounds``.

        ``prompt`` returns text, :func:`~agentflow.graph.shared` parts, messages, or a list of them; without it
        the state's ``messages`` are the prompt. ``writes`` is the state key that takes the answer (the parsed
        output of an agent with ``output=``), or a function ``answer -> update`` or ``(answer, state) -> update``
        where an update is a dict or a LangGraph ``Command``; without it the new messages are added to
        ``messages``. ``history`` is a state key (a list with LangGraph's ``add_messages``) that keeps this
        agent's conversation from step to step: its next step goes on where the last one ended, which keeps
        the cached prefix whole; without it every step starts afresh.

        ``node_options`` are those of ``add_node`` (``retry_policy``, ``timeout``, ``destinations``, ...).
        Raises :class:`~agentflow.errors.UsageError` for state keys that the graph does not have, and for options
        that do not exist.
        """
        if not isinstance(agent, Agent):
            raise UsageError(f"add_agent() takes an Agent, not {type(agent).__name__}")
        refuse_unknown(node_options, f"agent {agent.name!r}: add_agent()", AgentGraph.add_agent, StateGraph.add_node)
        if agent.name in self.nodes:
            raise UsageError(f"the graph has a node {agent.name!r} already; give the agent another name")
        if prompt is not None and not callable(prompt):
            raise UsageError(f"agent {agent.name!r}: prompt must be a function of the state, such as lambda state: ...")
        self._need_key(agent, history, "history")
        if prompt is None:
            self._need_key(agent, "messages", "prompt (left out)")
        if isinstance(writes, str):
            self._need_key(agent, writes, "writes")
        elif writes is None and history is None:
            self._need_key(agent, "messages", "writes (left out)")
        takes_state = False
        if writes is not None and not isinstance(writes, str):
            count = positional_count(writes) if callable(writes) else -1
            if count not in (None, 1, 2):
                raise UsageError(
                    f"agent {agent.name!r}: writes must be a state key, or a function of (answer) or (answer, state)"
                )
            takes_state = count == 2
        spec = AgentSpec(
            agent=agent,
            prompt=prompt,
            writes=writes,
            history=history,
            producers={},
            executor=tool_executor(agent.tools) if agent.tools else None,
            writes_state=takes_state,
        )
        self._agents[agent.name] = spec
        self.add_node(agent.name, AgentNode(spec), **node_options)
        return self

    def compile(
        self,
        checkpointer: Checkpointer = None,
        *,
        engine: Engine | BaseChatModel | None = None,
        max_steps: int = 50,
        name: str | None = None,
        tenant: str | None = None,
        policies: Sequence[PolicySpec] = (),
        reuse: Reuse = "exact",
        **options: Any,
    ) -> AgentApp:
        """Compile the graph for an engine (or a LangChain chat model).

        ``max_steps`` bounds the graph's steps: :meth:`AgentApp.run` then returns what there is, ``invoke`` raises
        LangGraph's ``GraphRecursionError``. Without ``engine`` the agents use that of the graph around
        this one. ``tenant`` is who pays, in events. ``policies`` are those of the framework (``safety``, ``memo``,
        ``speculation``, ``hedging``) for this graph's runs, beside the engine's. With ``reuse="corrected"`` the agents'
        calls may use each other's KV of what they share, corrected: faster, and nearly exact (see the guide to
        KVCMAS). The rest are LangGraph's options.
        """
        model = _chat_model(engine)
        producers = {s.writes: n for n, s in self._agents.items() if isinstance(s.writes, str)}
        bound = copy.copy(self)
        bound.nodes = dict(self.nodes)
        for node, spec in self._agents.items():
            ready = AgentNode(replace(spec, producers=producers), model)
            bound.nodes[node] = replace(self.nodes[node], runnable=ready)
        compiled = StateGraph.compile(bound, checkpointer, name=name, **options)
        handler = None
        if (policies or reuse != "exact") and model is None:
            what = "policies need" if policies else "reuse needs"
            raise UsageError(f"{what} an engine: compile with engine=..., or give them to the outer graph")
        if model is not None:
            known = getattr(model, "engine", None)
            handler = AgentflowHandler(
                binding_of(
                    compiled,
                    engine=known if isinstance(known, Engine) else event_sink(),
                    model=model,
                    name=name,
                    tenant=tenant,
                    agents=frozenset(self._agents),
                    policies=policies,
                    reuse=reuse,
                    agent_nodes={node: bound.nodes[node].runnable for node in self._agents},
                )
            )
        return AgentApp.of(compiled, handler, max_steps=max_steps)

    def _need_key(self, agent: Agent, key: str | None, what: str) -> None:
        if key is not None and key not in self.channels:
            known = ", ".join(sorted(k for k in self.channels if not k.startswith("__")))
            raise UsageError(
                f"agent {agent.name!r}: {what} needs the state key {key!r}; the state has: {known or '(none)'}"
            )


def _chat_model(engine: Engine | BaseChatModel | None) -> BaseChatModel | None:
    if engine is None or isinstance(engine, BaseChatModel):
        return engine
    if not isinstance(engine, Engine):
        raise UsageError(f"engine must be an Engine or a LangChain chat model, not {type(engine).__name__}")
    return AgentflowChat(engine=engine)
