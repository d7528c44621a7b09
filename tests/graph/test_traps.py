"""The traps of LangGraph and LangChain that this layer must not fall into, each with real LangGraph.

Also in other files: trap 1 (streams without a run manager) and 10 (the step bound) in ``test_langgraph.py``,
trap 6 (``ToolNode`` raises) in ``test_attach.py``; 2, 6 and 7 in the tests of the chat model and the tools.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, TypedDict

import pytest
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool as plain_tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from langgraph.types import Command, RetryPolicy, interrupt

from agentflow import AgentflowChat
from agentflow.engine.in_flight import calls_in_flight
from agentflow.engine.scripted import ScriptedEngine, tool_call
from agentflow.errors import BadSampling, CallAborted, EngineTimeout
from agentflow.events import Event
from agentflow.graph import Agent, AgentGraph, attach, tool_node
from agentflow.graph.handler import AgentflowHandler
from agentflow.tools import tool
from tests.graph.graph_helpers import Runner, assert_in_order, kinds, of_kind

SLOW = 30.0  # seconds; a test that waits for it has failed


def one_node(node: Any, name: str = "node") -> Any:
    graph = StateGraph(MessagesState)
    graph.add_node(name, node)
    graph.add_edge(START, name)
    return graph.compile()


async def until(condition: Callable[[], bool], limit: float = 5.0) -> None:
    """Let the loop turn until ``condition`` holds; fail after ``limit`` seconds."""
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        await asyncio.sleep(0.001)


async def cancelled_while(app: Any, condition: Callable[[], bool]) -> None:
    """Run ``app``, cancel it as soon as ``condition`` holds, and see it end as cancelled."""
    running = asyncio.create_task(app.ainvoke({"messages": []}))
    await until(lambda: condition() or running.done())
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


def assert_cancelled(engine: ScriptedEngine) -> None:
    assert of_kind(engine, "workflow_ended")[-1].outcome == "cancelled"
    assert kinds(engine, "workflow") == ["workflow_started", "workflow_ended"]
    assert engine.stats().running == 0


# ---------------------------------------------------------------------------------------------- trap 2: cancelling


@pytest.mark.parametrize("attached", [True, False], ids=["attach", "model alone"])
async def test_cancel_in_an_async_model_call(attached: bool) -> None:
    engine = ScriptedEngine(lambda call: "x", delay=SLOW)
    model = AgentflowChat(engine=engine)

    async def node(state: MessagesState) -> Any:
        return {"messages": [await model.ainvoke("hi")]}

    app = one_node(node)
    await cancelled_while(attach(app, engine) if attached else app, lambda: engine.stats().running == 1)
    assert_cancelled(engine)
    assert list(engine.aborted) == [engine.calls[0].request_id]


@pytest.mark.parametrize("attached", [True, False], ids=["attach", "model alone"])
async def test_cancel_in_a_sync_node_stops_its_model_call(attached: bool) -> None:
    engine = ScriptedEngine(lambda call: "x", delay=SLOW)
    model = AgentflowChat(engine=engine)
    seen: list[BaseException] = []
    over = threading.Event()

    def node(state: MessagesState) -> Any:
        try:
            return {"messages": [model.invoke("hi")]}
        except BaseException as error:
            seen.append(error)
            raise
        finally:
            over.set()

    app = one_node(node)
    await cancelled_while(attach(app, engine) if attached else app, lambda: engine.stats().running == 1)
    assert await asyncio.to_thread(over.wait, 5)
    assert isinstance(seen[0], CallAborted)
    assert_cancelled(engine)


async def test_a_cancelled_sync_node_cannot_call_the_model_again() -> None:
    engine = ScriptedEngine(lambda call: "x", delay=SLOW)
    model = AgentflowChat(engine=engine)
    errors: list[str] = []
    over = threading.Event()

    def stubborn(state: MessagesState) -> Any:
        for _ in range(3):
            try:
                model.invoke("hi")
            except CallAborted as error:
                errors.append(str(error))
        over.set()

    await cancelled_while(attach(one_node(stubborn), engine), lambda: engine.stats().running == 1)
    assert await asyncio.to_thread(over.wait, 5)
    assert len(errors) == 3
    assert "was cancelled" in errors[1]
    assert len(engine.calls) == 1
    assert kinds(engine)[-1] == "workflow_ended"


async def test_a_cancelled_sync_node_cannot_begin_a_workflow_by_calling_a_graph() -> None:
    engine = ScriptedEngine(lambda call: "x", delay=SLOW)
    model = AgentflowChat(engine=engine)
    over = threading.Event()
    inner = attach(one_node(lambda s: {"messages": [model.invoke("hi")]}), engine)

    def node(state: MessagesState) -> Any:
        try:
            model.invoke("hi")
        except CallAborted:
            with pytest.raises(CallAborted):
                inner.invoke({"messages": []})
            over.set()

    await cancelled_while(attach(one_node(node), engine), lambda: engine.stats().running == 1)
    assert await asyncio.to_thread(over.wait, 5)
    assert_cancelled(engine)


async def test_work_left_behind_by_a_finished_run_begins_no_workflow() -> None:
    engine = ScriptedEngine(lambda call: "x")
    model = AgentflowChat(engine=engine)
    over = asyncio.Event()
    left: list[asyncio.Task[Any]] = []

    async def later() -> Any:
        await over.wait()
        return await model.ainvoke("hi")

    async def node(state: MessagesState) -> Any:
        left.append(asyncio.create_task(later()))

    await one_node(node).ainvoke({"messages": []})
    over.set()
    assert (await left[0]).content == "x"
    assert kinds(engine) == []


async def test_cancel_in_a_subgraph() -> None:
    engine = ScriptedEngine(lambda call: "x", delay=SLOW)
    inner = AgentGraph(MessagesState)
    inner.add_agent(Agent("deep"), prompt=lambda s: "hi")
    inner.add_edge(START, "deep")
    outer = AgentGraph(MessagesState)
    outer.add_node("team", inner.compile())
    outer.add_edge(START, "team")
    model = AgentflowChat(engine=engine)
    await cancelled_while(outer.compile(engine=model), lambda: engine.stats().running == 1)
    assert_cancelled(engine)
    assert kinds(engine, "agent") == ["agent_started", "agent_ended"]


@pytest.mark.parametrize("own", [True, False], ids=["agentflow's tools", "langchain's tools"])
async def test_cancel_in_a_tool(own: bool) -> None:
    running = asyncio.Event()

    async def hang() -> str:
        """Hang."""
        running.set()
        await asyncio.sleep(SLOW)
        return "never"

    engine = ScriptedEngine([tool_call("hang")])
    tools = tool_node([tool(hang)]) if own else ToolNode([plain_tool(hang)])
    bound = AgentflowChat(engine=engine).bind_tools([hang])

    async def chat(state: MessagesState) -> Any:
        return {"messages": [await bound.ainvoke("hi")]}

    graph = StateGraph(MessagesState)
    graph.add_node("chat", chat)
    graph.add_node("tools", tools)
    graph.add_edge(START, "chat")
    graph.add_edge("chat", "tools")
    await cancelled_while(attach(graph.compile(), engine), running.is_set)
    assert [e.outcome for e in of_kind(engine, "tool_ended")] == ["cancelled"]
    assert kinds(engine)[-1] == "workflow_ended"
    assert_cancelled(engine)


async def test_cancel_in_an_agents_own_tool() -> None:
    running = asyncio.Event()

    @tool
    async def hang() -> str:
        """Hang."""
        running.set()
        await asyncio.sleep(SLOW)
        return "never"

    engine = ScriptedEngine([tool_call("hang")])
    graph = AgentGraph(MessagesState)
    graph.add_agent(Agent("a", tools=[hang]), prompt=lambda s: "hi")
    graph.add_edge(START, "a")
    await cancelled_while(graph.compile(engine=engine), running.is_set)
    assert [e.outcome for e in of_kind(engine, "tool_ended")] == ["cancelled"]
    assert_cancelled(engine)


async def test_a_failing_branch_cancels_its_siblings_calls() -> None:
    """LangGraph cancels the other tasks of a step in which one failed."""
    engine = ScriptedEngine({"slow": lambda call: "x", "bad": lambda call: EngineTimeout("no")}, delay=SLOW)
    model = AgentflowChat(engine=engine)

    async def slow(state: MessagesState) -> Any:
        return {"messages": [await model.ainvoke("hi")]}

    async def bad(state: MessagesState) -> Any:
        await until(lambda: engine.stats().running == 1)
        return {"messages": [await model.ainvoke("hi")]}

    graph = StateGraph(MessagesState)
    graph.add_node("slow", slow)
    graph.add_node("bad", bad)
    graph.add_edge(START, "slow")
    graph.add_edge(START, "bad")
    with pytest.raises(EngineTimeout):
        await attach(graph.compile(), engine).ainvoke({"messages": []})
    assert engine.stats().running == 0
    assert of_kind(engine, "workflow_ended")[0].outcome == "error"


# ------------------------------------------------------------------------------ traps 3 and 4: pauses, closed streams


def test_an_interrupt_reads_paused_not_ended(runner: Runner) -> None:
    """Trap 3: one parallel branch interrupts, the other calls the model."""
    engine = ScriptedEngine(["x"])
    model = AgentflowChat(engine=engine)
    graph = StateGraph(MessagesState)
    graph.add_node("ask", lambda s: {"messages": [HumanMessage(str(interrupt("?")))]})
    graph.add_node("say", lambda s: {"messages": [model.invoke("hi")]})
    graph.add_edge(START, "ask")
    graph.add_edge(START, "say")
    app = attach(graph.compile(InMemorySaver()), engine)
    assert runner.run(app, {"messages": []}, thread_id="t").outcome == "paused"
    assert kinds(engine, "workflow") == ["workflow_started", "workflow_paused"]
    assert runner.run(app, Command(resume="yes"), thread_id="t").outcome == "done"
    assert kinds(engine, "workflow")[2:] == ["workflow_resumed", "workflow_ended"]


def two_steps(engine: ScriptedEngine) -> Any:
    graph = AgentGraph(MessagesState)
    graph.add_agent(Agent("a"), prompt=lambda s: "hi")
    graph.add_agent(Agent("b"), prompt=lambda s: "hi")
    graph.add_edge(START, "a")
    graph.add_edge("a", "b")
    return graph.compile(engine=engine)


def test_a_stream_closed_early_is_cancelled() -> None:
    """Trap 4."""
    engine = ScriptedEngine(lambda call: "x")
    stream = two_steps(engine).stream({"messages": []}, stream_mode="updates")
    assert "a" in next(stream)
    stream.close()
    assert_cancelled(engine)


async def test_an_async_stream_closed_early_is_cancelled() -> None:
    engine = ScriptedEngine(lambda call: "x")
    stream = two_steps(engine).astream({"messages": []}, stream_mode="updates")
    assert "a" in await anext(stream)
    await stream.aclose()
    assert_cancelled(engine)


def test_a_stream_closed_in_the_middle_of_an_answer_stops_it() -> None:
    engine = ScriptedEngine(lambda call: "one two three four five six seven eight " * 20, delay=SLOW)
    began = time.monotonic()
    stream = two_steps(engine).stream({"messages": []}, stream_mode="messages")
    next(stream)
    assert len(calls_in_flight(engine.events[0].workflow)) == 1
    stream.close()
    assert time.monotonic() - began < SLOW / 2
    assert_cancelled(engine)
    assert len(engine.aborted) == 1


async def test_an_async_stream_closed_in_the_middle_of_an_answer_stops_it() -> None:
    engine = ScriptedEngine(lambda call: "one two three four five six seven eight " * 20, delay=SLOW)
    stream = two_steps(engine).astream({"messages": []}, stream_mode="messages")
    await anext(stream)
    await stream.aclose()
    assert_cancelled(engine)
    assert len(engine.aborted) == 1


# ----------------------------------------------------------------------------------------- trap 5: what is retried


def test_the_default_retry_policy_retries_engine_failures_only(runner: Runner) -> None:
    policy = RetryPolicy(initial_interval=0.001, jitter=False, max_attempts=3)
    for error, calls in ((EngineTimeout("slow"), 3), (BadSampling("bad"), 1)):
        engine = ScriptedEngine(lambda call, error=error: error)  # type: ignore[misc]
        model = AgentflowChat(engine=engine)
        graph = StateGraph(MessagesState)
        graph.add_node("a", lambda s, model=model: {"messages": [model.invoke("hi")]}, retry_policy=policy)
        graph.add_edge(START, "a")
        with pytest.raises(type(error)):
            runner.invoke(attach(graph.compile(), engine), {"messages": []})
        assert len(engine.calls) == calls
        assert len(of_kind(engine, "agent_started")) == len(of_kind(engine, "agent_ended")) == calls


# --------------------------------------------------------------------------- trap 7: sync code under an async graph


async def test_sync_tools_do_not_block_the_loop() -> None:
    """Trap 7: two sync tools of an agent wait for each other, which works only side by side."""
    barrier = threading.Barrier(2, timeout=10)

    @tool
    def meet() -> str:
        """Meet."""
        return str(barrier.wait())

    engine = ScriptedEngine([[tool_call("meet"), tool_call("meet")], "met"])
    graph = AgentGraph(MessagesState)
    graph.add_agent(Agent("a", tools=[meet]), prompt=lambda s: "hi")
    graph.add_edge(START, "a")
    result = await graph.compile(engine=engine).arun({"messages": []})
    assert result.agents["a"].tools["meet"].failures == 0


# ------------------------------------------------------------------------------------ trap 8: the superstep barrier


async def test_an_agents_end_does_not_wait_for_its_slow_sibling() -> None:
    release = asyncio.Event()
    engine = ScriptedEngine(lambda call: "x")
    model = AgentflowChat(engine=engine)

    async def fast(state: MessagesState) -> Any:
        return {"messages": [await model.ainvoke("hi")]}

    async def slow(state: MessagesState) -> Any:
        await model.ainvoke("hi")
        await release.wait()

    graph = StateGraph(MessagesState)
    graph.add_node("fast", fast)
    graph.add_node("slow", slow)
    graph.add_edge(START, "fast")
    graph.add_edge(START, "slow")
    running = asyncio.create_task(attach(graph.compile(), engine).ainvoke({"messages": []}))
    await until(lambda: "agent_ended" in kinds(engine))
    assert [e.agent for e in of_kind(engine, "agent_ended")] == ["fast"]
    release.set()
    await running


# ------------------------------------------------------------------------------- trap 9: errors inside the handler


class DeafEngine(ScriptedEngine):
    """Breaks its promise that ``emit`` never raises."""

    def emit(self, event: Event) -> None:
        raise OSError("nobody listens")


def test_errors_in_the_handler_are_counted_and_the_graph_goes_on(
    runner: Runner, caplog: pytest.LogCaptureFixture
) -> None:
    engine = DeafEngine(lambda call: "x")
    app = two_steps(engine)
    handler = app.handler
    assert handler is not None
    with caplog.at_level(logging.ERROR, logger="agentflow.graph.handler"):
        for _ in range(3):
            result = runner.run(app, {"messages": []})
            assert (result.outcome, len(result.state["messages"])) == ("done", 4)
    assert handler.errors == {"on_chain_start": 3, "bind": 6, "on_chain_end": 9}
    assert len([r for r in caplog.records if "events are incomplete" in r.message]) == 3
    handler.errors.clear()


def test_the_handler_takes_callbacks_it_does_not_expect() -> None:
    from uuid import uuid4

    handler = AgentflowHandler()
    handler.on_chain_end({}, run_id=uuid4())
    handler.on_chain_error(ValueError("x"), run_id=uuid4())
    handler.on_tool_end("x", run_id=uuid4())
    handler.on_tool_error(ValueError("x"), run_id=uuid4())
    handler.on_llm_end(None, run_id=uuid4())
    handler.on_llm_error(ValueError("x"), run_id=uuid4())
    handler.on_chat_model_start({}, [], run_id=uuid4())
    handler.on_tool_start({}, "", run_id=uuid4(), parent_run_id=uuid4())
    handler.on_chain_start({}, {}, run_id=uuid4())
    assert (handler.errors, handler.remembered) == ({}, 0)
    handler.on_chain_start({}, {}, run_id="not hashable trouble", metadata=3, parent_run_id=None)  # type: ignore[arg-type]
    assert handler.errors == {"on_chain_start": 1}
    handler.errors.clear()


# ------------------------------------------------------------------------------------------------- what is bounded


class Count(TypedDict):
    n: int


def test_a_long_loop_stays_bounded(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentflow.engine.workflow.LOG_LIMIT", 64)
    engine = ScriptedEngine(lambda call: "x")
    graph = AgentGraph(Count)
    graph.add_agent(Agent("a"), prompt=lambda s: "hi", writes=lambda answer, state: {"n": state["n"] + 1})
    graph.add_edge(START, "a")
    graph.add_conditional_edges("a", lambda s: "a" if s["n"] < 500 else "__end__")
    app = graph.compile(engine=engine, max_steps=501)
    handler = app.handler
    assert handler is not None
    remembered: list[int] = []
    emit = engine.emit

    def noting(event: Event) -> None:
        remembered.append(handler.remembered)
        emit(event)

    engine.emit = noting  # type: ignore[method-assign]
    result = runner.run(app, {"n": 0})
    assert (result.outcome, result.state["n"]) == ("done", 500)
    assert result.agents["a"].calls == 500
    run = result.runs[0]
    assert len(run.events) == 64
    assert run.dropped_events == len(engine.events) - 64 > 900
    assert_in_order(engine.events)
    assert max(remembered) <= 8
