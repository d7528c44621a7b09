"""``reuse="corrected"``: from a graph, a chat model or a single call to the engine."""

from __future__ import annotations

import pytest
from langgraph.graph import END, START, StateGraph
from typing_extensions import TypedDict

from agentflow import Agent, AgentGraph, attach, shared
from agentflow.engine.base import Call, check_call
from agentflow.engine.chat_model import AgentflowChat
from agentflow.engine.scripted import ScriptedEngine
from agentflow.errors import UsageError


class State(TypedDict, total=False):
    question: str
    plan: str
    answer: str


def team() -> AgentGraph:
    graph = AgentGraph(State)
    graph.add_agent(Agent("planner", "Plan."), prompt=lambda s: [shared("question", s["question"])], writes="plan")
    graph.add_agent(
        Agent("solver", "Solve."),
        prompt=lambda s: [shared("question", s["question"]), shared("plan", s["plan"])],
        writes="answer",
    )
    graph.add_edge(START, "planner")
    graph.add_edge("planner", "solver")
    graph.add_edge("solver", END)
    return graph


def test_a_graph_opts_in_for_all_its_calls() -> None:
    for reuse in ("exact", "corrected"):
        engine = ScriptedEngine(["a plan", "an answer"])
        team().compile(engine=engine, reuse=reuse).invoke({"question": "why?"})
        assert [call.reuse for call in engine.calls] == [reuse, reuse]


def test_an_attached_graph_opts_in_for_its_chat_models() -> None:
    engine = ScriptedEngine(["one", "two"])
    model = AgentflowChat(engine)
    exact = AgentflowChat(engine, reuse="exact")
    graph = StateGraph(State)
    graph.add_node("first", lambda state: {"plan": model.invoke(state["question"]).text})
    graph.add_node("second", lambda state: {"answer": exact.invoke(state["plan"]).text})
    graph.add_edge(START, "first")
    graph.add_edge("first", "second")
    attach(graph.compile(), engine, reuse="corrected").invoke({"question": "why?"})
    assert [call.reuse for call in engine.calls] == ["corrected", "exact"]  # what a model says goes first


def test_a_call_opts_in_alone() -> None:
    engine = ScriptedEngine(["one", "two", "three"])
    model = AgentflowChat(engine)
    model.invoke("hello")
    model.invoke("hello", reuse="corrected")
    AgentflowChat(engine, reuse="corrected").invoke("hello")
    assert [call.reuse for call in engine.calls] == ["exact", "corrected", "corrected"]


def test_other_values_are_refused() -> None:
    engine = ScriptedEngine(["one"])
    with pytest.raises(UsageError, match="reuse must be 'exact' or 'corrected', got 'some'"):
        team().compile(engine=engine, reuse="some")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="reuse must be 'exact' or 'corrected'"):
        AgentflowChat(engine).invoke("hello", reuse="fast")
    with pytest.raises(UsageError, match="reuse must be"):
        check_call(Call(token_ids=[1], reuse=1), context_length=1_000)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="reuse needs an engine"):
        team().compile(reuse="corrected")
