"""All of LangGraph stays usable around agents: streams, pauses, nesting, bounds, checkpoints."""

from __future__ import annotations

import asyncio
from typing import Any, TypedDict

import pytest
from langchain_core.messages import AIMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.errors import GraphRecursionError
from langgraph.graph import START, StateGraph
from langgraph.runtime import Runtime
from langgraph.types import Command, interrupt

from agentflow.engine.scripted import ScriptedEngine, tool_call
from agentflow.errors import EngineTimeout, UsageError, WorkflowStopped
from agentflow.graph import Agent, AgentGraph, shared
from agentflow.tools import tool
from tests.graph.graph_helpers import Runner, State, assert_in_order, kinds, of_kind, planner_coder


def test_every_stream_mode(runner: Runner) -> None:
    app = planner_coder().compile(InMemorySaver(), engine=ScriptedEngine(lambda call: "one two three"))
    modes = ["values", "updates", "messages", "custom", "debug", "checkpoints", "tasks"]
    config = {"configurable": {"thread_id": "t"}}
    seen = runner.stream(app, {"task": "x"}, config, stream_mode=modes)
    assert {mode for mode, _ in seen} == set(modes) - {"custom"}
    text = "".join(str(m.text) for mode, (m, meta) in [c for c in seen if c[0] == "messages"] if mode)
    assert text == "one two three" * 2
    nodes = [m["langgraph_node"] for _, (_, m) in [c for c in seen if c[0] == "messages"]]
    assert set(nodes) == {"planner", "coder"}


def test_messages_mode_calls_the_model_as_a_stream(runner: Runner) -> None:
    """Trap 1: there LangChain streams without a run manager; the coordinates must be on the call all the same."""
    engine = ScriptedEngine(lambda call: "one two three four five six seven eight nine")
    chunks = runner.stream(planner_coder().compile(engine=engine), {"task": "x"}, stream_mode="messages")
    assert len(chunks) > 4
    assert [c.at.agent for c in engine.calls] == ["planner", "coder"]
    assert kinds(engine)[-1] == "workflow_ended"


class Asked(TypedDict, total=False):
    plan: str
    verdict: str
    code: str


def with_human() -> AgentGraph:
    graph = AgentGraph(Asked)
    graph.add_agent(Agent("planner"), prompt=lambda s: "Plan.", writes="plan")
    graph.add_node("human", lambda s: {"verdict": interrupt("good?")})
    graph.add_agent(Agent("coder"), prompt=lambda s: ["Code: ", shared("plan", s["plan"])], writes="code")
    graph.add_edge(START, "planner")
    graph.add_edge("planner", "human")
    graph.add_edge("human", "coder")
    return graph


def test_interrupt_and_resume_are_one_workflow(runner: Runner) -> None:
    engine = ScriptedEngine(["plan", "code"])
    app = with_human().compile(InMemorySaver(), engine=engine)
    first = runner.run(app, {}, thread_id="t1")
    assert (first.outcome, first.interrupts[0].value, first.state["plan"]) == ("paused", "good?", "plan")
    assert kinds(engine, "workflow") == ["workflow_started", "workflow_paused"]
    second = runner.run(app, Command(resume="yes"), thread_id="t1")
    assert (second.outcome, second.state["verdict"], second.state["code"]) == ("done", "yes", "code")
    assert kinds(engine, "workflow") == ["workflow_started", "workflow_paused", "workflow_resumed", "workflow_ended"]
    assert {e.workflow for e in engine.events} == {"t1"}
    assert_in_order(engine.events)
    assert set(second.agents) == {"planner", "coder"}
    assert of_kind(engine, "agent_ended")[0].next == ("coder",)


def test_a_breakpoint_is_a_pause(runner: Runner) -> None:
    engine = ScriptedEngine(["plan", "code"])
    app = planner_coder().compile(InMemorySaver(), engine=engine, interrupt_before=["coder"])
    assert runner.run(app, {"task": "x"}, thread_id="t").outcome == "paused"
    assert runner.run(app, None, thread_id="t").state["code"] == "code"
    assert kinds(engine, "workflow") == ["workflow_started", "workflow_paused", "workflow_resumed", "workflow_ended"]


def test_an_interrupt_in_an_agents_tool(runner: Runner) -> None:
    @tool
    def ask_human(question: str) -> str:
        """Ask."""
        return str(interrupt(question))

    engine = ScriptedEngine(
        lambda call: "thanks" if "tool" in engine.prompt(call) else tool_call("ask_human", question="q")
    )
    engine = ScriptedEngine(
        [tool_call("ask_human", question="why?"), tool_call("ask_human", question="why?"), "thanks"]
    )
    graph = AgentGraph(State)
    graph.add_agent(Agent("a", tools=[ask_human]), prompt=lambda s: "go", writes="plan")
    graph.add_edge(START, "a")
    app = graph.compile(InMemorySaver(), engine=engine)
    first = runner.run(app, {"task": "x"}, thread_id="t")
    assert (first.outcome, first.interrupts[0].value) == ("paused", "why?")
    assert runner.run(app, Command(resume="because"), thread_id="t").state["plan"] == "thanks"
    assert kinds(engine, "workflow") == ["workflow_started", "workflow_paused", "workflow_resumed", "workflow_ended"]


def test_an_agent_graph_inside_another_uses_its_engine(runner: Runner) -> None:
    engine = ScriptedEngine({"planner": ["p"], "coder": ["c"], "boss": ["b"]})
    outer = AgentGraph(State)
    outer.add_agent(Agent("boss"), prompt=lambda s: "Boss.", writes="task")
    outer.add_node("team", planner_coder().compile())
    outer.add_edge(START, "boss")
    outer.add_edge("boss", "team")
    app = outer.compile(engine=engine)
    result = runner.run(app, {})
    assert result.state["code"] == "c"
    assert set(result.agents) == {"boss", "planner", "coder"}
    assert kinds(engine, "workflow") == ["workflow_started", "workflow_ended"]
    assert len({c.at.workflow for c in engine.calls}) == 1


def test_an_app_with_its_own_engine_inside_a_plain_graph(runner: Runner) -> None:
    engine = ScriptedEngine(["p", "c"])
    outer = StateGraph(State)
    outer.add_node("team", planner_coder().compile(engine=engine))
    outer.add_edge(START, "team")
    assert runner.invoke(outer.compile(), {"task": "x"})["code"] == "c"
    assert kinds(engine, "workflow") == ["workflow_started", "workflow_ended"]
    assert kinds(engine, "agent_started") == ["agent_started"] * 2


def test_an_app_run_inside_a_node_reports_the_surrounding_workflow(runner: Runner) -> None:
    engine = ScriptedEngine({"planner": ["p"], "coder": ["c"], "boss": ["b"]})
    inner = planner_coder().compile(engine=engine)
    reports: list[Any] = []

    def sync_team(state: State) -> Any:
        reports.append(inner.run({"task": state["task"]}))
        return {"code": reports[-1].state["code"]}

    async def async_team(state: State) -> Any:
        reports.append(await inner.arun({"task": state["task"]}))
        return {"code": reports[-1].state["code"]}

    outer = AgentGraph(State)
    outer.add_agent(Agent("boss"), prompt=lambda s: "Boss.", writes="task")
    outer.add_node("team", async_team if runner.is_async else sync_team)
    outer.add_edge(START, "boss")
    outer.add_edge("boss", "team")
    result = runner.run(outer.compile(engine=engine), {}, workflow_id="w")
    assert result.state["code"] == "c"
    assert reports[0].workflow == result.workflow == "w"
    assert reports[0].agents["coder"].calls == 1
    assert kinds(engine, "workflow") == ["workflow_started", "workflow_ended"]


def test_two_engines_in_one_graph_each_hear_of_their_own(runner: Runner) -> None:
    inner, outer_engine = ScriptedEngine(["p", "c"]), ScriptedEngine(["b"])
    outer = AgentGraph(State)
    outer.add_agent(Agent("boss"), prompt=lambda s: "Boss.", writes="task")
    outer.add_node("team", planner_coder().compile(engine=inner))
    outer.add_edge(START, "boss")
    outer.add_edge("boss", "team")
    result = runner.run(outer.compile(engine=outer_engine), {}, workflow_id="both")
    assert set(result.agents) == {"boss", "planner", "coder"}
    for engine, agents in ((inner, ["planner", "coder"]), (outer_engine, ["boss"])):
        assert [e.agent for e in of_kind(engine, "agent_started")] == agents
        assert kinds(engine, "workflow") == ["workflow_started", "workflow_ended"]
        assert {c.at.workflow for c in engine.calls} == {"both"}
        assert_in_order(engine.events)


def test_the_step_bound_returns_the_partial_state(runner: Runner) -> None:
    """Trap 10."""
    engine = ScriptedEngine(lambda call: "more")
    graph = AgentGraph(State)
    graph.add_agent(Agent("a"), prompt=lambda s: "go", writes="plan")
    graph.add_edge(START, "a")
    graph.add_edge("a", "a")
    app = graph.compile(engine=engine, max_steps=4)
    result = runner.run(app, {"task": "x"})
    assert (result.outcome, result.max_steps, len(engine.calls)) == ("limit", 4, 4)
    assert result.state == {"task": "x", "plan": "more"}
    assert of_kind(engine, "workflow_ended")[-1].outcome == "limit"
    with pytest.raises(WorkflowStopped, match="max_steps=4") as stopped:
        result.raise_for_outcome()
    assert stopped.value.state == result.state
    assert runner.run(app, {"task": "x"}, max_steps=2).max_steps == 2
    with pytest.raises(GraphRecursionError):
        runner.invoke(app, {"task": "x"})
    for bad in (0, True, 1.5):
        with pytest.raises(UsageError, match="max_steps"):
            graph.compile(engine=engine, max_steps=bad)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="max_steps"):
            app.run({}, max_steps=bad)  # type: ignore[arg-type]


def test_a_nodes_error_is_the_outcome_with_the_state_before_it(runner: Runner) -> None:
    engine = ScriptedEngine({"planner": ["p"], "coder": [EngineTimeout("slow")]})
    result = runner.run(planner_coder().compile(engine=engine), {"task": "x"})
    assert (result.outcome, result.state) == ("error", {"task": "x", "plan": "p"})
    with pytest.raises(EngineTimeout):
        result.raise_for_outcome()
    assert of_kind(engine, "workflow_ended")[0].outcome == "error"


def test_turns_of_one_conversation_are_one_workflow_in_order(runner: Runner) -> None:
    engine = ScriptedEngine(lambda call: "x")
    app = planner_coder().compile(InMemorySaver(), engine=engine)
    for _ in range(3):
        runner.run(app, {"task": "x"}, thread_id="talk")
    assert kinds(engine, "workflow") == ["workflow_started", "workflow_ended"] * 3
    assert {e.workflow for e in engine.events} == {"talk"}
    assert_in_order(engine.events)


def test_langgraphs_options_reach_the_run(runner: Runner) -> None:
    class Context(TypedDict):
        style: str

    graph = AgentGraph(State, context_schema=Context)
    graph.add_node("ask", _style)
    graph.add_agent(Agent("a"), prompt=lambda s: s["task"], writes="plan")
    graph.add_edge(START, "ask")
    graph.add_edge("ask", "a")
    engine = ScriptedEngine(["x"])
    app = graph.compile(InMemorySaver(), engine=engine)
    paused = runner.run(app, {}, thread_id="t", context={"style": "terse"}, interrupt_before=["a"], durability="sync")
    assert (paused.outcome, paused.state["task"]) == ("paused", "be terse")
    assert kinds(engine)[-1] == "workflow_paused"


def _style(state: State, runtime: Runtime[Any]) -> State:
    return {"task": "be " + runtime.context["style"]}


def test_state_history_time_travel_and_updates_work() -> None:
    engine = ScriptedEngine(["p1", "c1", "c2"])
    app = planner_coder().compile(InMemorySaver(), engine=engine)
    config: Any = {"configurable": {"thread_id": "t"}}
    app.invoke({"task": "x"}, config)
    states = list(app.get_state_history(config))
    before_coder = next(s for s in states if s.next == ("coder",))
    assert app.invoke(None, before_coder.config)["code"] == "c2"
    app.update_state(config, {"code": "by hand"})
    assert app.get_state(config).values["code"] == "by hand"
    assert isinstance(app.with_config(tags=["x"]), type(app))
    assert app.with_config(tags=["x"]).handler is app.handler


def test_an_async_app_serves_many_runs_at_once() -> None:
    engine = ScriptedEngine(lambda call: str(call.at.workflow), delay=0.005)
    app = planner_coder().compile(engine=engine)

    async def many() -> list[Any]:
        return await asyncio.gather(*(app.arun({"task": "x"}, workflow_id=f"w{i}") for i in range(20)))

    results = asyncio.run(many())
    assert [r.state["code"] for r in results] == [f"w{i}" for i in range(20)]
    assert all(r.workflow == f"w{i}" and r.usage.completion_tokens > 0 for i, r in enumerate(results))
    assert all(len(r.runs) == 1 and r.agents["planner"].calls == 1 for r in results)
    assert_in_order(engine.events)


def test_ai_messages_of_foreign_chat_models_are_counted(runner: Runner) -> None:
    from langchain_core.language_models.fake_chat_models import GenericFakeChatModel

    used = {"input_tokens": 7, "output_tokens": 3, "total_tokens": 10}
    model = GenericFakeChatModel(messages=iter([AIMessage("p", usage_metadata=used), AIMessage("c")]))  # type: ignore[arg-type]
    result = runner.run(planner_coder().compile(engine=model), {"task": "x"})
    assert result.state["code"] == "c"
    assert result.agents["planner"].usage.prompt_tokens == 7
    assert result.agents["coder"].calls == 1
