"""The executor in real LangGraph graphs, and its tools under LangGraph's and LangChain's own machinery."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Annotated, Any

import pytest
from langchain.agents import create_agent
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import InjectedToolCallId
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import InjectedState, ToolNode, ToolRuntime
from langgraph.types import Command, interrupt

from agentflow.errors import UsageError
from agentflow.graph import tool_node
from agentflow.tools import ToolExecutor, error_kind, tool

Invoke = Callable[..., Any]


@pytest.fixture(params=["sync", "async"])
def invoke(request: pytest.FixtureRequest) -> Invoke:
    def go(graph: Any, *args: Any, **kwargs: Any) -> Any:
        if request.param == "sync":
            return graph.invoke(*args, **kwargs)
        return asyncio.run(graph.ainvoke(*args, **kwargs))

    return go


def asking(*calls: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    made = [{"name": n, "args": a, "id": f"id{i}"} for i, (n, a) in enumerate(calls)]
    return {"messages": [HumanMessage("go"), AIMessage(content="", tool_calls=made)]}


def graph_of(node: Any, state: Any = MessagesState, **compile_options: Any) -> Any:
    graph = StateGraph(state)
    graph.add_node("tools", node)
    graph.add_edge(START, "tools")
    return graph.compile(**compile_options)


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def test_the_node_does_what_toolnode_does(invoke: Invoke) -> None:
    asked = asking(("add", {"a": 1, "b": 2}), ("add", {"a": 3, "b": 4}))
    ours = invoke(graph_of(ToolExecutor([add]).node()), asked)["messages"][2:]
    theirs = invoke(graph_of(ToolNode([add])), asked)["messages"][2:]
    assert [(m.content, m.tool_call_id, m.name, m.status) for m in ours] == [
        (m.content, m.tool_call_id, m.name, m.status) for m in theirs
    ]


def test_the_node_takes_message_lists_objects_and_single_calls(invoke: Invoke) -> None:
    node = ToolExecutor([add]).node()
    asked = asking(("add", {"a": 1, "b": 2}))
    assert [m.content for m in invoke(node, asked["messages"])] == ["3"]

    class State:
        messages = asked["messages"]

    assert [m.content for m in invoke(node, State())["messages"]] == ["3"]
    call = {"name": "add", "args": {"a": 2, "b": 2}, "id": "x", "type": "tool_call"}
    assert [m.content for m in invoke(node, [call])["messages"]] == ["4"]
    sent = {"__type": "tool_call_with_context", "tool_call": call, "state": {}}
    assert [m.content for m in invoke(node, sent)["messages"]] == ["4"]
    with pytest.raises(UsageError, match="no AIMessage"):
        invoke(node, {"messages": [HumanMessage("hi")]})


def test_an_interrupt_in_a_tool_pauses_the_graph_after_its_sibling_finished(invoke: Invoke) -> None:
    runs: list[str] = []

    @tool
    def ask(question: str) -> str:
        """Ask a human."""
        return f"human says {interrupt(question)}"

    @tool
    async def slow() -> str:
        """Take some turns of the loop."""
        for _ in range(10):
            await asyncio.sleep(0)
        runs.append("slow")
        return "done"

    app = graph_of(ToolExecutor([ask, slow]).node(), checkpointer=InMemorySaver())
    config = {"configurable": {"thread_id": "1"}}
    paused = invoke(app, asking(("ask", {"question": "ok?"}), ("slow", {})), config)
    assert [i.value for i in paused["__interrupt__"]] == ["ok?"]
    assert runs == ["slow"]
    done = invoke(app, Command(resume="yes"), config)
    assert [m.content for m in done["messages"][2:]] == ["human says yes", "done"]


def test_a_command_from_a_tool_updates_the_graph(invoke: Invoke) -> None:
    class State(MessagesState):
        mood: str

    @tool
    def cheer(call_id: Annotated[str, InjectedToolCallId]) -> Command[Any]:
        """Cheer up."""
        return Command(update={"mood": "happy", "messages": [ToolMessage("cheered", tool_call_id=call_id)]})

    asked = asking(("cheer", {}), ("add", {"a": 1, "b": 2}))
    done = invoke(graph_of(ToolExecutor([cheer, add]).node(), State), asked)
    assert done["mood"] == "happy"
    assert [m.content for m in done["messages"][2:]] == ["cheered", "3"]


def test_injected_state_and_runtime_reach_the_tool_and_cannot_be_forged(invoke: Invoke) -> None:
    class State(MessagesState):
        user: str

    @tool
    def whoami(
        user: Annotated[str, InjectedState("user")], state: Annotated[dict, InjectedState], runtime: ToolRuntime
    ) -> str:
        """Say who asks."""
        return f"{user}/{state['user']}/{runtime.state['user']}/{runtime.tool_call_id}"

    assert not set(whoami.tool_call_schema.model_json_schema()["properties"])
    forged = asking(("whoami", {"user": "root", "state": {"user": "root"}, "runtime": "root"})) | {"user": "ann"}
    done = invoke(graph_of(tool_node([whoami]), State), forged)
    assert done["messages"][-1].content == "ann/ann/ann/id0"
    with pytest.raises(UsageError, match="injected arguments"):
        invoke(graph_of(ToolExecutor([whoami]).node(), State), forged)


def test_a_failing_a_hung_and_a_good_tool_in_one_node(invoke: Invoke) -> None:
    gate = threading.Event()

    @tool(timeout=0.05)
    def hangs() -> str:
        """Hang."""
        gate.wait()
        return "late"

    @tool
    def fails() -> str:
        """Fail."""
        raise OSError("disk")

    asked = asking(("hangs", {}), ("fails", {}), ("add", {"a": 1, "b": 2}), ("nope", {}))
    done = invoke(graph_of(ToolExecutor([hangs, fails, add]).node()), asked)["messages"][2:]
    gate.set()
    assert [error_kind(m) for m in done] == ["timeout", "error", None, "unknown_tool"]


async def test_cancelling_the_graph_stops_its_tools() -> None:
    begun, cleaned = asyncio.Event(), []

    @tool
    async def waits() -> str:
        """Wait."""
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.append(1)
        return "late"

    running = asyncio.create_task(graph_of(ToolExecutor([waits]).node()).ainvoke(asking(("waits", {}))))
    await begun.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert cleaned == [1]


def test_our_tools_work_in_create_agent_and_toolnode() -> None:
    class Model(GenericFakeChatModel):
        def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
            assert [t.name for t in tools] == ["add"]
            return self

    call = {"name": "add", "args": {"a": 20, "b": 22}, "id": "1"}
    model = Model(messages=iter([AIMessage(content="", tool_calls=[call]), AIMessage(content="it is 42")]))
    done = create_agent(model, [add]).invoke({"messages": [HumanMessage("20 + 22?")]})
    assert [m.content for m in done["messages"][-2:]] == ["42", "it is 42"]


def test_the_schema_comes_from_signature_and_docstring() -> None:
    @tool(parse_docstring=True, timeout=3)
    def find(pattern: str, limit: int = 10) -> str:
        """Find lines.

        Args:
            pattern: What to look for.
            limit: How many lines at most.
        """
        return pattern * limit

    schema = find.tool_call_schema.model_json_schema()
    assert find.description == "Find lines."
    assert schema["properties"]["pattern"]["description"] == "What to look for."
    assert schema["required"] == ["pattern"]
    assert find.invoke({"pattern": "a", "limit": 2}) == "aa"


def test_functions_that_cannot_be_tools_are_refused() -> None:
    with pytest.raises(UsageError, match="docstring"):

        @tool
        def silent(x: int) -> int:
            return x

    with pytest.raises(UsageError, match="as they are"):
        tool(add)


def test_the_tools_layer_does_not_load_langgraph() -> None:
    code = "import sys, agentflow.tools; print([m for m in sys.modules if m.split('.')[0] == 'langgraph'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
