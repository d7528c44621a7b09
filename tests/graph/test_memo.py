"""Memoization in graphs: what a tool answered is given to nobody who would have got something else."""

from __future__ import annotations

from typing import Any

from langchain_core.messages import ToolMessage
from langchain_core.runnables import RunnableConfig
from langgraph.graph import END, START

from agentflow import tool
from agentflow.engine.scripted import ScriptedEngine, tool_call
from agentflow.graph import Agent, AgentGraph
from tests.graph.graph_helpers import Runner
from tests.graph.test_policies import Talk, stats, talker


def searching(where: str) -> Any:
    @tool(pure=True)
    def search(q: str) -> str:
        """Search."""
        return f"{where}: {q}"

    return search


def said(result: Any) -> list[str]:
    return [m.content for m in result.state["messages"] if m.type == "tool"]


def test_tools_of_one_name_answer_for_themselves(runner: Runner) -> None:
    graph = AgentGraph(Talk)
    graph.add_agent(Agent("public", tools=[searching("public")]))
    graph.add_agent(Agent("internal", tools=[searching("internal")]))
    graph.add_edge(START, "public")
    graph.add_edge("public", "internal")
    graph.add_edge("internal", END)
    engine = ScriptedEngine([tool_call("search", q="pay"), "one", tool_call("search", q="pay"), "two"])
    result = runner.run(graph.compile(engine=engine, policies=["memo"]), {"messages": [("user", "go")]})
    assert said(result) == ["public: pay", "internal: pay"]


def test_a_second_graph_of_an_engine_gets_no_answer_of_the_firsts_tool(runner: Runner) -> None:
    engine = ScriptedEngine([tool_call("search", q="x"), "done"] * 3, policies=["memo"])
    fixed = searching("fixed")
    for made, answer in ((searching("wrong"), "wrong: x"), (fixed, "fixed: x"), (fixed, "fixed: x")):
        graph = AgentGraph(Talk)
        graph.add_agent(Agent("worker", tools=[made]))
        graph.add_edge(START, "worker")
        graph.add_edge("worker", END)
        assert said(runner.run(graph.compile(engine=engine), {"messages": [("user", "go")]})) == [answer]
    assert engine.guards is not None
    assert engine.guards.stats()["policies"]["memo"]["hits"] == 1


def test_a_tool_that_reads_the_config_answers_each_user(runner: Runner) -> None:
    @tool(pure=True)
    def profile(q: str, config: RunnableConfig) -> str:
        """Read the user's profile."""
        return f"profile of {config['configurable']['user']}"

    app, _ = talker([profile], [tool_call("profile", q="me"), "done"] * 2, policies=["memo"])
    for user in ("alice", "bob"):
        result = runner.run(app, {"messages": [("user", "go")]}, {"configurable": {"user": user}})
        assert said(result) == [f"profile of {user}"]


def test_what_a_run_writes_into_an_answer_is_not_in_the_next_runs(runner: Runner) -> None:
    seen: list[dict[str, Any]] = []

    @tool(pure=True)
    def look(q: str) -> Any:
        """Look."""
        return ToolMessage(q, tool_call_id="any", additional_kwargs={"sources": ["a"]})

    def writes(answer: Any) -> dict[str, Any]:
        extra = next(m for m in answer.messages if m.type == "tool").additional_kwargs
        seen.append({**extra, "sources": list(extra["sources"])})
        extra["sources"].append("of this run")
        extra["mine"] = True
        return {}

    graph = AgentGraph(Talk)
    graph.add_agent(Agent("worker", tools=[look]), writes=writes)
    graph.add_edge(START, "worker")
    graph.add_edge("worker", END)
    app = graph.compile(engine=ScriptedEngine([tool_call("look", q="x"), "done"] * 3), policies=["memo"])
    for _ in range(3):
        runner.run(app, {"messages": [("user", "go")]})
    assert seen == [{"sources": ["a"]}] * 3
    assert stats(app, "memo")["hits"] == 2
