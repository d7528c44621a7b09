"""Graphs written for plain LangGraph: followed by changing one line, the model, or by ``attach``."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.tools import tool as plain_tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.func import entrypoint, task
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from langgraph.types import Command, interrupt

from agentflow import AgentflowChat
from agentflow.engine.scripted import ScriptedEngine, tool_call
from agentflow.errors import UsageError
from agentflow.graph import ambient, attach, tool_node
from agentflow.graph._scopes import PAUSED_LIMIT, Binding, Workflows, workflows_of
from tests.graph.graph_helpers import Runner, assert_in_order, kinds, of_kind


@plain_tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"rain in {city}"


@plain_tool
def broken(city: str) -> str:
    """Never works."""
    raise RuntimeError("no weather today")


def react(model: Any) -> Any:
    """A tool-calling graph as LangGraph's own documentation writes it."""
    bound = model.bind_tools([weather])

    def chatbot(state: MessagesState) -> Any:
        return {"messages": [bound.invoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("chatbot", chatbot)
    graph.add_node("tools", ToolNode([weather]))
    graph.add_edge(START, "chatbot")
    graph.add_conditional_edges("chatbot", tools_condition)
    graph.add_edge("tools", "chatbot")
    return graph


QUESTION: Any = {"messages": [HumanMessage("weather in Oslo?")]}


def assert_react_events(engine: ScriptedEngine) -> None:
    assert kinds(engine) == [
        "workflow_started",
        "agent_started",
        "agent_ended",
        "tool_started",
        "tool_ended",
        "agent_started",
        "agent_ended",
        "workflow_ended",
    ]
    assert_in_order(engine.events)
    ended = of_kind(engine, "tool_ended")[0]
    assert (ended.tool, ended.agent, ended.step, ended.outcome) == ("weather", "chatbot", 0, "ok")
    assert ended.call_id == of_kind(engine, "tool_started")[0].call_id
    assert ended.duration > 0
    assert [c.at.agent for c in engine.calls] == ["chatbot", "chatbot"]
    assert [c.at.step for c in engine.calls] == [0, 1]
    assert len({c.at.workflow for c in engine.calls}) == 1


def script() -> ScriptedEngine:
    return ScriptedEngine([tool_call("weather", city="Oslo"), "Rain."])


def test_one_changed_line_is_enough(runner: Runner) -> None:
    engine = script()
    model = AgentflowChat(engine=engine)  # the changed line
    app = react(model).compile()
    assert runner.invoke(app, QUESTION)["messages"][-1].content == "Rain."
    assert_react_events(engine)


def test_agentflows_tool_node_in_a_plain_graph(runner: Runner) -> None:
    """Its tools emit their own events, once, under the agent that called them."""
    engine = script()
    bound = AgentflowChat(engine=engine).bind_tools([weather])
    graph = StateGraph(MessagesState)
    graph.add_node("chatbot", lambda s: {"messages": [bound.invoke(s["messages"])]})
    graph.add_node("tools", tool_node([weather]))
    graph.add_edge(START, "chatbot")
    graph.add_conditional_edges("chatbot", tools_condition)
    graph.add_edge("tools", "chatbot")
    runner.invoke(graph.compile(), QUESTION)
    assert_react_events(engine)


def test_attach_gives_results_and_knows_the_edges(runner: Runner) -> None:
    engine = script()
    app = attach(react(AgentflowChat(engine=engine)).compile(), engine, name="bot", tenant="acme")
    result = runner.run(app, QUESTION, workflow_id="w")
    assert result.state["messages"][-1].content == "Rain."
    assert_react_events(engine)
    assert (of_kind(engine, "workflow_started")[0].graph, engine.calls[0].at.tenant) == ("bot", "acme")
    assert [e.next for e in of_kind(engine, "agent_ended")] == [("tools",), ()]
    report = result.agents["chatbot"]
    assert (report.calls, report.tools["weather"].calls) == (2, 1)


def test_attach_leaves_the_graph_and_the_users_callbacks_alone() -> None:
    from langchain_core.callbacks import UsageMetadataCallbackHandler

    engine = script()
    plain = react(AgentflowChat(engine=engine)).compile()
    app = attach(plain, engine)
    mine = UsageMetadataCallbackHandler()
    app.invoke(QUESTION, {"callbacks": [mine]})
    assert mine.usage_metadata["scripted"]["output_tokens"] > 0
    assert plain.config is None or "callbacks" not in plain.config
    assert len((attach(app, engine).config or {})["callbacks"]) == 1


def test_attaching_inside_and_outside_does_not_duplicate(runner: Runner) -> None:
    engine = script()
    inner = attach(react(AgentflowChat(engine=engine)).compile(), engine)
    outer = StateGraph(MessagesState)
    outer.add_node("inner", inner)
    outer.add_edge(START, "inner")
    runner.invoke(attach(outer.compile(), engine), QUESTION)
    assert_react_events(engine)


def test_create_agent_is_followed_under_its_own_name(runner: Runner) -> None:
    engine = script()
    agent = create_agent(AgentflowChat(engine=engine), [weather], name="forecaster", system_prompt="You know weather.")
    runner.invoke(agent, QUESTION)
    assert kinds(engine)[0] == "workflow_started"
    assert [e.agent for e in of_kind(engine, "agent_started")] == ["forecaster", "forecaster"]
    assert of_kind(engine, "tool_ended")[0].agent == "forecaster"
    assert [c.at.agent for c in engine.calls] == ["forecaster", "forecaster"]
    again = ScriptedEngine([tool_call("weather", city="Oslo"), "Rain."])
    attached = attach(
        create_agent(AgentflowChat(engine=again), [weather], name="forecaster", system_prompt="You know weather."),
        again,
    )
    assert set(runner.run(attached, QUESTION).agents) == {"forecaster"}


def test_create_agent_agents_as_nodes_of_a_team(runner: Runner) -> None:
    engine = ScriptedEngine({"red": ["r"], "blue": ["b"]})
    model = AgentflowChat(engine=engine)
    team = StateGraph(MessagesState)
    team.add_node("red", create_agent(model, [], name="red"))
    team.add_node("blue", create_agent(model, [], name="blue"))
    team.add_edge(START, "red")
    team.add_edge("red", "blue")
    runner.invoke(team.compile(), QUESTION)
    assert [e.agent for e in of_kind(engine, "agent_started")] == ["red", "blue"]
    assert kinds(engine, "workflow") == ["workflow_started", "workflow_ended"]


def test_a_failing_tool_of_langgraph_ends_as_error(runner: Runner) -> None:
    """Trap 6: ToolNode raises execution errors, and has no events for unknown tools."""
    engine = ScriptedEngine([tool_call("broken", city="Oslo")])
    bound = AgentflowChat(engine=engine).bind_tools([broken])
    graph = StateGraph(MessagesState)
    graph.add_node("chatbot", lambda s: {"messages": [bound.invoke(s["messages"])]})
    graph.add_node("tools", ToolNode([broken], handle_tool_errors=False))
    graph.add_edge(START, "chatbot")
    graph.add_edge("chatbot", "tools")
    with pytest.raises(RuntimeError, match="no weather"):
        runner.invoke(graph.compile(), QUESTION)
    assert of_kind(engine, "tool_ended")[0].outcome == "error"
    assert of_kind(engine, "workflow_ended")[0].outcome == "error"


def test_interrupts_are_pauses_with_the_model_alone(runner: Runner) -> None:
    engine = ScriptedEngine(["p", "q"])
    model = AgentflowChat(engine=engine)

    def ask(state: MessagesState) -> Any:
        return {"messages": [HumanMessage(str(interrupt("ok?"))), model.invoke([HumanMessage("2")])]}

    graph = StateGraph(MessagesState)
    graph.add_node("first", lambda s: {"messages": [model.invoke([HumanMessage("1")])]})
    graph.add_node("ask", ask)
    graph.add_edge(START, "first")
    graph.add_edge("first", "ask")
    app = graph.compile(InMemorySaver())
    config = {"configurable": {"thread_id": "t"}}
    runner.invoke(app, {"messages": []}, config)
    runner.invoke(app, Command(resume="yes"), config)
    assert kinds(engine, "workflow") == ["workflow_started", "workflow_paused", "workflow_resumed", "workflow_ended"]
    assert {e.workflow for e in engine.events} == {"t"}
    assert_in_order(engine.events)


def test_an_interrupt_that_stays_inside_a_node_is_no_pause(runner: Runner) -> None:
    engine = ScriptedEngine(["done"])
    model = AgentflowChat(engine=engine)
    inner = StateGraph(MessagesState)
    inner.add_node("ask", lambda s: {"messages": [HumanMessage(str(interrupt("?")))]})
    inner.add_edge(START, "ask")
    asks = inner.compile(InMemorySaver())

    def outer_node(state: MessagesState) -> Any:
        got = asks.invoke({"messages": []}, {"configurable": {"thread_id": "inner"}})
        assert "__interrupt__" in got
        return {"messages": [model.invoke([HumanMessage("go on")])]}

    outer = StateGraph(MessagesState)
    outer.add_node("outer", outer_node)
    outer.add_edge(START, "outer")
    app = attach(outer.compile(), engine)
    assert runner.run(app, QUESTION).outcome == "done"
    assert kinds(engine, "workflow") == ["workflow_started", "workflow_ended"]


def test_a_resume_in_another_process_is_a_resume(runner: Runner) -> None:
    """The pause was seen by an engine of which this process knows nothing."""
    saver = InMemorySaver()
    first, second = ScriptedEngine(["p"]), ScriptedEngine(["p", "q"])

    def app(engine: ScriptedEngine) -> Any:
        model = AgentflowChat(engine=engine)

        def ask(state: MessagesState) -> Any:
            interrupt("ok?")
            return {"messages": [model.invoke([HumanMessage("2")])]}

        graph = StateGraph(MessagesState)
        graph.add_node("ask", ask)
        graph.add_edge(START, "ask")
        return attach(graph.compile(saver), engine)

    runner.run(app(first), {"messages": []}, thread_id="t")
    runner.run(app(second), Command(resume="yes"), thread_id="t")
    assert kinds(first) == ["workflow_started", "workflow_paused"]
    assert kinds(second, "workflow") == ["workflow_resumed", "workflow_ended"]
    assert second.events[0].workflow == first.events[0].workflow == "t"


def test_the_functional_api_is_followed(runner: Runner) -> None:
    engine = ScriptedEngine(["a", "b"])
    model = AgentflowChat(engine=engine)

    if runner.is_async:

        @task
        async def write(topic: str) -> str:
            return str((await model.ainvoke([HumanMessage(topic)])).text)

        @entrypoint()
        async def flow(topic: str) -> list[str]:
            return [await write(topic), await write(topic)]
    else:

        @task
        def write(topic: str) -> str:  # type: ignore[misc]
            return str(model.invoke([HumanMessage(topic)]).text)

        @entrypoint()
        def flow(topic: str) -> list[str]:
            return [write(topic).result(), write(topic).result()]  # type: ignore[union-attr, list-item]

    assert runner.invoke(flow, "x") == ["a", "b"]
    assert kinds(engine, "workflow") == ["workflow_started", "workflow_ended"]
    assert [e.agent for e in of_kind(engine, "agent_started")] == ["write", "write"]


def test_a_model_outside_any_graph_has_no_workflow(runner: Runner) -> None:
    engine = ScriptedEngine(["a", "b"])
    model = AgentflowChat(engine=engine)
    runner.invoke(model, "hi")
    runner.invoke(model | (lambda m: m), "hi")
    assert kinds(engine) == []
    assert [c.at.workflow for c in engine.calls] == [None, None]


def test_graphs_of_other_models_cost_no_events(runner: Runner) -> None:
    graph = StateGraph(MessagesState)
    graph.add_node("echo", lambda s: {"messages": [AIMessage("x")]})
    graph.add_edge(START, "echo")
    runner.invoke(graph.compile(), QUESTION)
    assert ambient.install().remembered == 0


def test_following_can_be_switched_off(runner: Runner) -> None:
    engine = script()
    app = react(AgentflowChat(engine=engine)).compile()
    ambient.uninstall()
    try:
        runner.invoke(app, QUESTION)
    finally:
        ambient.install()
    assert kinds(engine) == []


def test_graphs_run_in_threads_made_by_the_user() -> None:
    engines = [script() for _ in range(8)]
    apps = [react(AgentflowChat(engine=e)).compile() for e in engines]
    threads = [threading.Thread(target=a.invoke, args=(QUESTION,)) for a in apps]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for engine in engines:
        assert_react_events(engine)


def test_concurrent_runs_of_one_app_keep_apart() -> None:
    engine = ScriptedEngine(lambda call: "x", delay=0.005)
    model = AgentflowChat(engine=engine)

    async def node(state: MessagesState) -> Any:
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("a", node)
    graph.add_node("b", node)
    graph.add_edge(START, "a")
    graph.add_edge("a", "b")
    graph.add_edge("b", END)
    app = graph.compile()

    async def many() -> None:
        await asyncio.gather(*(app.ainvoke(QUESTION, {"metadata": {"workflow_id": f"w{i}"}}) for i in range(20)))

    asyncio.run(many())
    assert {c.at.workflow for c in engine.calls} == {f"w{i}" for i in range(20)}
    assert_in_order(engine.events)
    for i in range(20):
        mine = [e.kind for e in engine.events if e.workflow == f"w{i}"]
        assert mine == ["workflow_started", *["agent_started", "agent_ended"] * 2, "workflow_ended"]


def test_two_runs_of_one_workflow_at_once_end_it_once() -> None:
    engine = ScriptedEngine(lambda call: "x", delay=0.01)
    model = AgentflowChat(engine=engine)

    async def node(state: MessagesState) -> Any:
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("a", node)
    graph.add_edge(START, "a")
    app = attach(graph.compile(), engine)

    async def both() -> None:
        await asyncio.gather(*(app.arun(QUESTION, workflow_id="w") for _ in range(2)))

    asyncio.run(both())
    assert kinds(engine, "workflow") == ["workflow_started", "workflow_ended"]


@pytest.mark.parametrize("bad", [StateGraph(MessagesState), "graph", None])
def test_attach_says_what_it_takes(bad: Any) -> None:
    with pytest.raises(UsageError, match="compiled graph"):
        attach(bad, script())
    compiled = react(AgentflowChat(engine=script())).compile()
    with pytest.raises(UsageError, match="takes an engine"):
        attach(compiled, AgentflowChat(engine=script()))  # type: ignore[arg-type]


def test_paused_workflows_are_bounded_and_die_with_their_engine() -> None:
    class Root:
        workflow, graph, tenant, resumes = "", "g", None, False
        binding = Binding()

    engine = ScriptedEngine([])
    book: Workflows = workflows_of(engine)
    for i in range(PAUSED_LIMIT + 10):
        root: Any = Root()
        root.workflow = f"w{i}"
        run, entry = book.enter(engine, root)
        assert entry == "started"
        assert book.leave(run, paused=True)
    assert book.counts() == (0, PAUSED_LIMIT)
    gone = weakref.ref(engine)
    del engine, book, run
    gc.collect()
    assert gone() is None
