"""AgentGraph: what an agent's step does, and that all of LangGraph stays usable around it."""

from __future__ import annotations

import asyncio
import operator
from dataclasses import dataclass
from typing import Annotated, Any, TypedDict

import pytest
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, ToolMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.errors import GraphRecursionError
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.graph.message import add_messages
from langgraph.runtime import Runtime
from langgraph.types import Command, RetryPolicy, Send, interrupt
from pydantic import BaseModel

from agentflow.engine.context import current, current_run
from agentflow.engine.scripted import Answer, ScriptedEngine, tool_call
from agentflow.errors import EngineTimeout, OutputInvalid, OutputTruncated, UsageError, WorkflowStopped
from agentflow.graph import Agent, AgentGraph, shared
from agentflow.tools import tool
from tests.graph.graph_helpers import Runner, assert_in_order, kinds, of_kind


class State(TypedDict, total=False):
    task: str
    plan: str
    code: str


def planner_coder() -> AgentGraph:
    graph = AgentGraph(State)
    graph.add_agent(Agent("planner", "Plan."), prompt=lambda s: ["T: ", shared("task", s["task"])], writes="plan")
    graph.add_agent(Agent("coder", "Code."), prompt=lambda s: ["P: ", shared("plan", s["plan"])], writes="code")
    graph.add_edge(START, "planner")
    graph.add_edge("planner", "coder")
    graph.add_edge("coder", END)
    return graph


def test_a_run_from_state_to_result(runner: Runner) -> None:
    engine = ScriptedEngine({"planner": ["the plan"], "coder": ["the code"]})
    app = planner_coder().compile(engine=engine, name="pc", tenant="acme")
    result = runner.run(app, {"task": "do"}, workflow_id="w1")
    assert (result.outcome, result.error, result.workflow) == ("done", None, "w1")
    assert result.state == {"task": "do", "plan": "the plan", "code": "the code"}
    assert {n: r.calls for n, r in result.agents.items()} == {"planner": 1, "coder": 1}
    assert result.usage.prompt_tokens == sum(len(c.token_ids) for c in engine.calls) > 0
    assert result.raise_for_outcome() is result

    assert kinds(engine) == [
        "workflow_started",
        "agent_started",
        "segment_produced",
        "agent_ended",
        "agent_started",
        "segment_produced",
        "agent_ended",
        "workflow_ended",
    ]
    assert_in_order(engine.events)
    started = of_kind(engine, "workflow_started")[0]
    assert (started.workflow, started.graph, started.tenant) == ("w1", "pc", "acme")
    assert [e.next for e in of_kind(engine, "agent_ended")] == [("coder",), ()]
    assert [(e.slot, e.agent, e.step) for e in of_kind(engine, "segment_produced")] == [
        ("plan", "planner", 0),
        ("code", "coder", 1),
    ]
    assert [(c.at.workflow, c.at.agent, c.at.step, c.at.tenant) for c in engine.calls] == [
        ("w1", "planner", 0, "acme"),
        ("w1", "coder", 1, "acme"),
    ]
    assert current_run.get() is None
    assert current.get().workflow is None


def test_shared_segments_name_their_producer_and_have_exact_bounds() -> None:
    engine = ScriptedEngine(["the plan", "the code"])
    planner_coder().compile(engine=engine).run({"task": "do"})
    slots = []
    for call in engine.calls:
        at = 0
        for segment in call.segments:
            assert segment.start == at
            at += segment.length
            if segment.kind == "shared":
                ids = call.token_ids[segment.start : segment.start + segment.length]
                slots.append((segment.slot, segment.producer, engine.tokenizer.decode(ids)))
        assert at == len(call.token_ids)
    assert slots == [("task", None, "do"), ("plan", "planner", "the plan")]


def test_one_graph_compiles_for_several_engines() -> None:
    graph = planner_coder()
    first, second = ScriptedEngine(["a", "b"]), ScriptedEngine(["c", "d"])
    app1, app2 = graph.compile(engine=first), graph.compile(engine=second)
    assert app2.run({"task": "x"}).state["code"] == "d"
    assert app1.run({"task": "x"}).state["code"] == "b"


def test_without_an_engine_the_error_says_so(runner: Runner) -> None:
    with pytest.raises(UsageError, match="'planner' has no model"):
        runner.run(planner_coder().compile(), {"task": "x"})
    with pytest.raises(UsageError, match="engine must be"):
        planner_coder().compile(engine="qwen")  # type: ignore[arg-type]


class Verdict(BaseModel):
    passed: bool
    reason: str = ""


class Judged(TypedDict, total=False):
    verdict: Any
    rounds: int


def judge(**options: Any) -> AgentGraph:
    graph = AgentGraph(Judged)
    node = options.pop("node", {})
    graph.add_agent(Agent("judge", **options), prompt=lambda s: "Judge.", writes="verdict", **node)
    graph.add_edge(START, "judge")
    return graph


def test_structured_output(runner: Runner) -> None:
    engine = ScriptedEngine([{"passed": True, "reason": "ok"}, {"passed": False}])
    app = judge(output=Verdict).compile(engine=engine)
    assert runner.run(app, {}).state["verdict"] == Verdict(passed=True, reason="ok")
    assert engine.calls[0].sampling.json_schema == Verdict.model_json_schema()
    schema = {"type": "object", "properties": {"passed": {"type": "boolean"}}, "required": ["passed"]}
    assert runner.run(judge(output=schema).compile(engine=engine), {}).state["verdict"] == {"passed": False}


def test_structured_output_survives_a_checkpoint(runner: Runner) -> None:
    engine = ScriptedEngine([{"passed": True}])
    app = judge(output=Verdict).compile(InMemorySaver(), engine=engine)
    runner.run(app, {}, thread_id="t")
    assert app.get_state({"configurable": {"thread_id": "t"}}).values["verdict"] == Verdict(passed=True)


class PydanticState(BaseModel):
    task: str
    plan: str = ""


@dataclass
class DataState:
    task: str
    plan: str = ""


@pytest.mark.parametrize("schema", [PydanticState, DataState])
def test_states_that_are_objects(runner: Runner, schema: Any) -> None:
    engine = ScriptedEngine(["the plan"])
    graph = AgentGraph(schema)
    graph.add_agent(Agent("planner"), prompt=lambda s: [shared("task", s.task)], writes="plan")
    graph.add_edge(START, "planner")
    assert runner.run(graph.compile(engine=engine), {"task": "do"}).state == {"task": "do", "plan": "the plan"}


def test_the_next_agent_is_seen_through_plain_nodes(runner: Runner) -> None:
    engine = ScriptedEngine(["p", "c"])
    graph = AgentGraph(State)
    graph.add_agent(Agent("planner"), prompt=lambda s: "P", writes="plan")
    graph.add_node("tidy", lambda s: {"plan": s["plan"].strip()})
    graph.add_node("also", lambda s: None)
    graph.add_agent(Agent("coder"), prompt=lambda s: "C", writes="code")
    graph.add_edge(START, "planner")
    graph.add_conditional_edges("planner", lambda s: "neat", {"neat": "tidy", "raw": "coder"})
    graph.add_edge("tidy", "also")
    graph.add_edge("also", "coder")
    runner.run(graph.compile(engine=engine), {"task": "x"})
    assert [e.next for e in of_kind(engine, "agent_ended")] == [("coder",), ()]


def test_broken_output_is_reported_as_what_it_is(runner: Runner) -> None:
    engine = ScriptedEngine([Answer(text='{"passed": tr', finish="length"), '{"reason": 3}'])
    app = judge(output=Verdict).compile(engine=engine)
    cut = runner.run(app, {})
    assert cut.outcome == "error"
    assert isinstance(cut.error, OutputTruncated)
    assert isinstance(runner.run(app, {}).error, OutputInvalid)
    with pytest.raises(OutputTruncated):
        cut.raise_for_outcome()
    assert [e.outcome for e in of_kind(engine, "workflow_ended")] == ["error", "error"]


def test_broken_output_is_retried_by_langgraphs_policy(runner: Runner) -> None:
    engine = ScriptedEngine(["no json", {"passed": True}])
    graph = judge(output=Verdict, node={"retry_policy": RetryPolicy(initial_interval=0.001, jitter=False)})
    assert runner.run(graph.compile(engine=engine), {}).state["verdict"].passed
    assert kinds(engine, "agent", "state") == [
        "agent_started",
        "agent_ended",
        "agent_started",
        "state_superseded",
        "agent_ended",
        "state_superseded",
    ]


@tool
def double(x: int) -> int:
    """Double a number."""
    return 2 * x


@tool
def fail(x: int) -> int:
    """Fail."""
    raise ValueError(f"no {x}")


class Talk(TypedDict, total=False):
    answer: str
    stopped: str
    past: Annotated[list[AnyMessage], add_messages]


def test_tool_rounds(runner: Runner) -> None:
    calls = [
        [tool_call("double", x=2), tool_call("fail", x=1), tool_call("nope")],
        '<tool_call>{"name": "double", "arguments": {"x": </tool_call>',
        "done",
    ]
    engine = ScriptedEngine(calls)
    graph = AgentGraph(Talk)
    graph.add_agent(Agent("a", tools=[double, fail]), prompt=lambda s: "go", writes="answer", history="past")
    graph.add_edge(START, "a")
    result = runner.run(graph.compile(engine=engine), {})
    assert result.state["answer"] == "done"
    answers = [m for m in result.state["past"] if isinstance(m, ToolMessage)]
    assert answers[0].content == "4"
    assert [m.status for m in answers[:3]] == ["success", "error", "error"]
    assert "no 1" in str(answers[1].content)
    assert "nope" in str(answers[2].content)
    report = result.agents["a"]
    assert report.calls == len(engine.calls) == 3
    assert {n: (t.calls, t.failures) for n, t in report.tools.items()} == {"double": (1, 0), "fail": (1, 1)}
    assert [(e.tool, e.agent, e.step) for e in of_kind(engine, "tool_started")] == [
        ("double", "a", 0),
        ("fail", "a", 0),
    ]
    assert sorted((e.tool, e.outcome) for e in of_kind(engine, "tool_ended")) == [("double", "ok"), ("fail", "error")]
    assert kinds(engine, "agent") == ["agent_started", "agent_ended"]


def test_a_model_that_calls_a_tool_for_ever_is_stopped(runner: Runner) -> None:
    engine = ScriptedEngine(lambda call: tool_call("double", x=1))
    graph = AgentGraph(Talk)
    graph.add_agent(
        Agent("a", tools=[double], max_tool_rounds=3),
        prompt=lambda s: "go",
        writes=lambda answer: {"answer": answer.text, "stopped": answer.stopped},
        history="past",
    )
    graph.add_edge(START, "a")
    result = runner.run(graph.compile(engine=engine), {})
    assert (result.outcome, result.state["stopped"], result.state["answer"]) == ("done", "tool_limit", "")
    assert result.agents["a"].tools["double"].calls == 3
    assert len(engine.calls) == 4
    last = result.state["past"][-1]
    assert isinstance(last, ToolMessage)
    assert "limit of 3 rounds" in str(last.content)


def test_tools_and_structured_output(runner: Runner) -> None:
    engine = ScriptedEngine([tool_call("double", x=2), "it is four", {"passed": True}])
    assert runner.run(judge(output=Verdict, tools=[double]).compile(engine=engine), {}).state["verdict"].passed
    assert engine.calls[-1].sampling.json_schema is not None
    talked, structured = (list(c.token_ids) for c in list(engine.calls)[1:])
    assert structured[: len(talked)] == talked
    engine = ScriptedEngine([tool_call("double", x=2), '{"passed": false}'])
    assert not runner.run(judge(output=Verdict, tools=[double]).compile(engine=engine), {}).state["verdict"].passed


def test_history_makes_the_next_prompt_begin_with_the_last(runner: Runner) -> None:
    engine = ScriptedEngine([tool_call("double", x=2), "first", "second"])
    graph = AgentGraph(Talk)
    graph.add_agent(Agent("a", "Be brief.", tools=[double]), prompt=lambda s: "go", writes="answer", history="past")
    graph.add_edge(START, "a")
    graph.add_conditional_edges("a", lambda s: END if s["answer"] == "second" else "a", [END, "a"])
    runner.run(graph.compile(engine=engine), {})
    first, second, third = (list(c.token_ids) for c in engine.calls)
    assert second[: len(first)] == first
    assert third[: len(second)] == second
    assert [e.next for e in of_kind(engine, "agent_ended")] == [("a",), ()]


def test_writes_may_be_a_command(runner: Runner) -> None:
    engine = ScriptedEngine(["left"])
    graph = AgentGraph(State)
    graph.add_agent(
        Agent("chooser"),
        prompt=lambda s: "Where?",
        writes=lambda answer, state: Command(goto=answer.text, update={"plan": state["task"] + answer.text}),
        destinations=("left", "right"),
    )
    graph.add_node("left", lambda s: {"code": "L"})
    graph.add_node("right", lambda s: {"code": "R"})
    graph.add_edge(START, "chooser")
    app = graph.compile(engine=engine)
    assert runner.run(app, {"task": "go "}).state == {"task": "go ", "plan": "go left", "code": "L"}
    assert "chooser -.-> left" in app.get_graph().draw_mermaid().replace("&nbsp;", " ")


def test_without_prompt_and_writes_the_messages_are_used(runner: Runner) -> None:
    engine = ScriptedEngine([tool_call("double", x=4), "eight"])
    graph = AgentGraph(MessagesState)
    graph.add_agent(Agent("bot", "Help.", tools=[double]))
    graph.add_edge(START, "bot")
    app = graph.compile(engine=engine)
    state = runner.run(app, {"messages": [HumanMessage("double 4")]}).state
    assert [type(m).__name__ for m in state["messages"]] == ["HumanMessage", "AIMessage", "ToolMessage", "AIMessage"]
    with pytest.raises(UsageError, match="'messages' is empty"):
        runner.run(app, {"messages": []})


def test_async_prompts_need_an_async_run() -> None:
    async def prompt(state: Any) -> str:
        await asyncio.sleep(0)
        return "from afar"

    graph = AgentGraph(State)
    graph.add_agent(Agent("a"), prompt=prompt, writes="plan")
    graph.add_edge(START, "a")
    app = graph.compile(engine=ScriptedEngine(["fine"]))
    with pytest.raises(UsageError, match="ainvoke or arun"):
        app.run({})
    assert asyncio.run(app.arun({})).state["plan"] == "fine"


class Many(TypedDict, total=False):
    topic: str
    jokes: Annotated[list[str], operator.add]


def fan_out(count: int, **node: Any) -> AgentGraph:
    graph = AgentGraph(Many)
    graph.add_agent(Agent("joker"), prompt=lambda s: s["topic"], writes=lambda a: {"jokes": [a.text]}, **node)
    graph.add_conditional_edges(START, lambda s: [Send("joker", {"topic": f"t{i}"}) for i in range(count)], ["joker"])
    return graph


def test_parallel_sends_have_distinct_branches(runner: Runner) -> None:
    engine = ScriptedEngine(lambda call: "ha", delay=0.01)
    result = runner.run(fan_out(5).compile(engine=engine), {"topic": ""})
    assert result.state["jokes"] == ["ha"] * 5
    branches = [c.at.branch for c in engine.calls]
    assert len(set(branches)) == 5
    assert None not in branches
    assert sorted(c.at.step or 0 for c in engine.calls) == [0, 1, 2, 3, 4]
    assert kinds(engine, "agent_started").__len__() == kinds(engine, "agent_ended").__len__() == 5


def test_a_retried_branch_has_a_new_name_and_retires_the_old_one(runner: Runner) -> None:
    answers = iter([EngineTimeout("slow"), EngineTimeout("slow"), "ha"])
    engine = ScriptedEngine(lambda call: next(answers))
    policy = RetryPolicy(initial_interval=0.001, jitter=False, max_attempts=3)
    runner.run(fan_out(1, retry_policy=policy).compile(engine=engine), {"topic": ""})
    first, second, third = (str(c.at.branch) for c in engine.calls)
    assert (second, third) == (first + "#2", first + "#3")
    assert [e.branch for e in of_kind(engine, "state_superseded") if e.branch] == [first, second]


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


def test_five_hundred_tool_calls_in_one_message(runner: Runner) -> None:
    engine = ScriptedEngine([[tool_call("double", x=i) for i in range(500)], "done"])
    graph = AgentGraph(Talk)
    graph.add_agent(Agent("a", tools=[double]), prompt=lambda s: "go", writes="answer", history="past")
    graph.add_edge(START, "a")
    result = runner.run(graph.compile(engine=engine), {})
    answers = [m.content for m in result.state["past"] if isinstance(m, ToolMessage)]
    assert answers == [str(2 * i) for i in range(500)]
    assert result.agents["a"].tools["double"].calls == 500


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
