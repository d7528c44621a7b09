"""Where a graph's policies hold: in graphs inside others, after a pause, for every tool, whatever else fails."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
from langchain.agents import create_agent
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command

from agentflow import AgentflowChat, attach, tool
from agentflow.cache.policy import register_policy
from agentflow.engine.scripted import Answer, ScriptedEngine, tool_call
from agentflow.errors import UsageError
from agentflow.graph import Agent, AgentGraph
from agentflow.runtime import Guard
from agentflow.runtime.guards import Done, Proceed, Work
from tests.graph.graph_helpers import Runner
from tests.graph.test_policies import Talk, stats, talker

GO = {"messages": [("user", "go")]}
ran: list[Any] = []


@pytest.fixture(autouse=True)
def nothing_ran() -> None:
    ran.clear()


@tool
def shell(command: str) -> str:
    """Run a command."""
    ran.append(command)
    return "ok"


@tool
def pay(amount: int) -> str:
    """Pay."""
    ran.append(amount)
    return "paid"


def around(app: Any, how: str) -> Any:
    """The app as a subgraph of another graph, or called by a node of one; of ours or of LangGraph."""
    outer: Any = AgentGraph(Talk) if how.startswith("ours") else StateGraph(Talk)
    outer.add_node(
        "sub", app if how.endswith("subgraph") else lambda s: {"messages": app.run(s).state["messages"][-1:]}
    )
    outer.add_edge(START, "sub")
    outer.add_edge("sub", END)
    return outer.compile(engine=app.handler.binding.engine) if how.startswith("ours") else outer.compile()


@pytest.mark.parametrize("how", ["ours, subgraph", "ours, called", "langgraph, subgraph", "langgraph, called"])
def test_a_graph_inside_another_keeps_its_policies(runner: Runner, how: str) -> None:
    policies = [{"name": "safety", "deny": ["shell"], "workflow": {"model_calls": 2}}]
    inner, engine = talker([shell], [tool_call("shell", command="rm"), "done"] * 2, policies=policies)
    runner.invoke(around(inner, how), GO)
    assert ran == []
    assert stats(inner, "safety")["denied"] == 1
    assert len(engine.calls) == 2
    assert stats(inner, "safety")["workflows"] == 0  # it heard that the workflow is over


def beside(*, tenants: tuple[str | None, str | None]) -> ScriptedEngine:
    """A graph without policies runs while one that denies ``shell`` does, on one engine and under one id."""
    script = {"slow": [Answer(text="s", delay=0.5)], "worker": [tool_call("shell", command="rm"), "done"]}
    engine = ScriptedEngine(script)
    apps = []
    for name, policies in (("slow", []), ("worker", [{"name": "safety", "deny": ["shell"]}])):
        graph = AgentGraph(Talk)
        graph.add_agent(Agent(name, "work", tools=[shell] if policies else []))
        graph.add_edge(START, name)
        graph.add_edge(name, END)
        apps.append(graph.compile(engine=engine, policies=policies))
    first = threading.Thread(target=lambda: apps[0].run(GO, thread_id="1", tenant=tenants[0]))
    first.start()
    while not engine.calls:
        time.sleep(0.01)
    apps[1].run(GO, thread_id="1", tenant=tenants[1])
    first.join()
    return engine


def test_two_tenants_with_one_id_at_once_are_two_workflows() -> None:
    engine = beside(tenants=("A", "B"))
    seen = {(c.at.agent, c.at.tenant, c.at.workflow) for c in engine.calls}
    assert seen == {("slow", "A", "1"), ("worker", "B", "1 (B)")}
    assert ran == []


def test_a_graph_beside_another_in_one_workflow_has_its_own_policies() -> None:
    engine = beside(tenants=(None, None))
    assert {c.at.workflow for c in engine.calls} == {"1"}
    assert ran == []


def test_rules_for_tools_are_refused_where_nobody_could_keep_them() -> None:
    engine = ScriptedEngine([])
    agent: Any = create_agent(AgentflowChat(engine=engine), tools=[shell])
    rules = {"name": "safety", "deny": ["shell"], "workflow": {"tool_calls": 1}}
    with pytest.raises(
        UsageError, match=r"safety \(deny, a limit on tool_calls\) cannot be kept .*: tools is LangGraph"
    ):
        attach(agent, engine, policies=[rules])
    outer: Any = StateGraph(Talk)
    outer.add_node("helper", agent)
    outer.add_edge(START, "helper")
    with pytest.raises(UsageError, match=r"helper\.tools is LangGraph's ToolNode"):
        attach(outer.compile(), ScriptedEngine([], policies=[rules]))
    attach(agent, engine, policies=[{"name": "safety", "workflow": {"tokens": 5}}, "memo"])


# -- approval ---------------------------------------------------------------------------------------------


def approving(script: Any, **options: Any) -> tuple[Any, ScriptedEngine]:
    return talker(
        [pay, shell],
        script,
        policies=[{"name": "safety", "approve": ["pay"], **options}],
        checkpointer=InMemorySaver(),
    )


def test_an_approval_holds_for_the_call_that_was_shown(runner: Runner) -> None:
    """A step that goes on asks its model again, which may want something else by then."""
    small, large = tool_call("pay", amount=10), tool_call("pay", amount=1_000_000)
    app, _ = approving([small, large, large, "done"])
    asked = runner.run(app, GO, thread_id="t")
    assert asked.interrupts[0].value["arguments"] == {"amount": 10}
    again = runner.run(app, Command(resume=True), thread_id="t")
    assert again.outcome == "paused"
    assert again.interrupts[0].value["arguments"] == {"amount": 1_000_000}
    assert ran == []
    assert runner.run(app, Command(resume=True), thread_id="t").outcome == "done"
    assert ran == [1_000_000]


def test_an_approval_in_a_graph_inside_another(runner: Runner) -> None:
    graph = AgentGraph(Talk)
    graph.add_agent(Agent("worker", "work", tools=[pay]))
    graph.add_edge(START, "worker")
    graph.add_edge("worker", END)
    small, large = tool_call("pay", amount=10), tool_call("pay", amount=1_000_000)
    engine = ScriptedEngine([small, large, large, "done"])
    inner = graph.compile(engine=engine, policies=[{"name": "safety", "approve": ["pay"]}])
    outer: Any = AgentGraph(Talk)
    outer.add_node("sub", inner)
    outer.add_edge(START, "sub")
    outer.add_edge("sub", END)
    app = outer.compile(InMemorySaver(), engine=engine)
    shown = [runner.run(app, GO, thread_id="t").interrupts[0].value["arguments"]["amount"]]
    shown.append(runner.run(app, Command(resume=True), thread_id="t").interrupts[0].value["arguments"]["amount"])
    assert (shown, ran) == ([10, 1_000_000], [])
    assert runner.run(app, Command(resume=True), thread_id="t").outcome == "done"
    assert ran == [1_000_000]


def test_each_of_many_approvals_is_asked_for_once(runner: Runner) -> None:
    message = [tool_call("pay", amount=n) for n in range(22)]
    app, _ = approving([*[message] * 23, "done"])  # more than the repeats that would be a loop
    result, asked = runner.run(app, GO, thread_id="t"), []
    while result.outcome == "paused":
        asked += [i.value["arguments"]["amount"] for i in result.interrupts]
        result = runner.run(app, Command(resume=True), thread_id="t")
    assert (result.outcome, asked) == ("done", list(range(22)))
    assert sorted(ran) == list(range(22))


def test_calls_that_waited_for_an_approval_count_once(runner: Runner) -> None:
    message = [tool_call("shell", command="ls"), tool_call("pay", amount=1)]
    app, _ = approving([message, message, "done"], workflow={"tool_calls": 2})
    runner.run(app, GO, thread_id="t")
    assert runner.run(app, Command(resume=True), thread_id="t").outcome == "done"
    assert sorted(map(str, ran)) == ["1", "ls"]


def test_approved_calls_of_one_message_are_within_the_limit_together(runner: Runner) -> None:
    message = [tool_call("pay", amount=n) for n in range(5)]
    app, _ = approving([message] * 6, workflow={"tool_calls": 1})
    result = runner.run(app, GO, thread_id="t")
    while result.outcome == "paused":
        result = runner.run(app, Command(resume=True), thread_id="t")
    assert (result.outcome, result.reason) == ("limit", "tool_calls")
    assert ran == []


def test_an_approval_needs_a_checkpointer(runner: Runner) -> None:
    app, _ = talker([pay], [tool_call("pay", amount=1)], policies=[{"name": "safety", "approve": ["pay"]}])
    with pytest.raises(UsageError, match="compile it with a checkpointer"):
        runner.run(app, GO)


# -- limits -----------------------------------------------------------------------------------------------


def test_a_limit_reached_inside_a_tool_ends_the_run(runner: Runner) -> None:
    @tool
    def summarize(text: str) -> str:
        """Summarize."""
        return str(AgentflowChat(engine=engine).invoke("long text " * 200).text)

    app, engine = talker(
        [summarize],
        [tool_call("summarize", text="x"), "done"],
        policies=[{"name": "safety", "workflow": {"tokens": 300}}],
    )
    result = runner.run(app, GO)
    assert (result.outcome, result.reason) == ("limit", "tokens")


def test_streams_that_are_left_early_are_used_as_far_as_they_came() -> None:
    engine = ScriptedEngine(["a long answer"] * 20, policies=[{"name": "safety", "workflow": {"model_calls": 100}}])
    model = AgentflowChat(engine=engine)
    graph = StateGraph(Talk)

    def node(state: Talk) -> Talk:
        for _ in range(3):
            stream = model.stream("hello there")
            next(stream)
            stream.close()  # type: ignore[attr-defined]
        used.update(engine.guards.guard("safety").used("t"))  # type: ignore[union-attr]
        return {}

    used: dict[str, float] = {}
    graph.add_node("node", node)
    graph.add_edge(START, "node")
    attach(graph.compile(), engine).run(GO, workflow_id="t")
    assert used["model_calls"] == 3
    assert used["tokens"] >= 3 * len(engine.calls[0].token_ids)


# -- guards of any quality --------------------------------------------------------------------------------


class Forgetful(Guard):
    name = "forgetful-guard"

    async def around(self, work: Work, proceed: Proceed) -> Done:
        await proceed()
        return None  # type: ignore[return-value]


class Talkative(Guard):
    name = "talkative-guard"

    def allow(self, work: Work) -> Any:
        return True

    def stats(self) -> Any:
        raise RuntimeError("no")


class Hasty(Guard):
    name = "hasty-guard"

    async def around(self, work: Work, proceed: Proceed) -> Done:
        return await asyncio.wait_for(proceed(), 0.05 if work.kind == "tool" else 5.0)


class Swallowing(Guard):
    name = "swallowing-guard"

    async def around(self, work: Work, proceed: Proceed) -> Done:
        try:
            return await proceed()
        except Exception:
            return None  # type: ignore[return-value]


for each in (Forgetful, Talkative, Hasty, Swallowing):
    register_policy(each.name, each)


@pytest.mark.parametrize("guard", [Forgetful, Talkative, Hasty, Swallowing])
def test_a_bad_guard_fails_no_request_repeats_no_effect_and_costs_no_other_guard_its_place(
    runner: Runner, guard: type[Guard]
) -> None:
    @tool
    async def send(to: str) -> str:
        """Send a message."""
        ran.append(to)
        await asyncio.sleep(0.2)
        return "sent"

    app, _ = talker(
        [send, shell],
        [tool_call("send", to="bob"), tool_call("shell", command="rm"), "done"],
        policies=[guard.name, {"name": "safety", "deny": ["shell"]}],
    )
    result = runner.run(app, GO)
    assert result.outcome == "done"
    assert ran == ["bob"]
    assert "safety" in app.handler.binding.guards.names
    assert stats(app, "safety")["denied"] == 1


def test_policies_of_both_levels_are_in_one_order() -> None:
    """One answered from memory is not hedged, though the engine's policy remembers and the graph's hedges."""
    questions = [str(n) for n in range(12)] * 2

    @tool(pure=True)
    def look(word: str) -> str:
        """Look up."""
        ran.append(word)
        return word

    graph = AgentGraph(Talk)
    graph.add_agent(Agent("worker", "work", tools=[look], max_tool_rounds=30))
    graph.add_edge(START, "worker")
    graph.add_edge("worker", END)
    engine = ScriptedEngine([*[tool_call("look", word=q) for q in questions], "done"], policies=["memo"])
    app = graph.compile(engine=engine, policies=["hedging"])
    assert app.run(GO).outcome == "done"
    hedging, memo = stats(app, "hedging"), engine.guards.stats()["policies"]["memo"]  # type: ignore[union-attr]
    assert memo["hits"] == 12
    assert len(ran) == 12 + hedging.get("second_tries", 0)
    assert hedging.get("second_tries", 0) <= 1
