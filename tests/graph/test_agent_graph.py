"""AgentGraph: what an agent's step does."""

from __future__ import annotations

import asyncio
import operator
from dataclasses import dataclass
from typing import Annotated, Any, TypedDict

import pytest
from langchain_core.messages import AnyMessage, HumanMessage, ToolMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState
from langgraph.graph.message import add_messages
from langgraph.types import Command, RetryPolicy, Send
from pydantic import BaseModel

from agentflow.engine.context import current, current_run
from agentflow.engine.scripted import Answer, ScriptedEngine, tool_call
from agentflow.errors import EngineTimeout, OutputInvalid, OutputTruncated, UsageError
from agentflow.graph import Agent, AgentGraph, shared
from agentflow.tools import tool
from tests.graph.graph_helpers import Runner, State, assert_in_order, kinds, of_kind, planner_coder


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


def test_five_hundred_tool_calls_in_one_message(runner: Runner) -> None:
    engine = ScriptedEngine([[tool_call("double", x=i) for i in range(500)], "done"])
    graph = AgentGraph(Talk)
    graph.add_agent(Agent("a", tools=[double]), prompt=lambda s: "go", writes="answer", history="past")
    graph.add_edge(START, "a")
    result = runner.run(graph.compile(engine=engine), {})
    answers = [m.content for m in result.state["past"] if isinstance(m, ToolMessage)]
    assert answers == [str(2 * i) for i in range(500)]
    assert result.agents["a"].tools["double"].calls == 500


def test_a_misspelt_option_is_told_and_not_dropped(runner: Runner) -> None:
    with pytest.raises(UsageError, match=r"add_agent\(\) takes no 'promt': did you mean prompt\?"):
        AgentGraph(State).add_agent(Agent("coder"), promt=lambda state: "x", writes="code")
    app = planner_coder().compile(engine=ScriptedEngine([]))
    with pytest.raises(UsageError, match=r"run\(\) takes no 'thread': did you mean thread_id\?"):
        runner.run(app, {"task": "do"}, thread="t1")


def test_every_node_and_stream_option_of_langgraph_is_taken(runner: Runner) -> None:
    graph = AgentGraph(State)
    graph.add_agent(
        Agent("coder"),
        prompt=lambda state: "x",
        writes="code",
        defer=True,
        metadata={"a": 1},
        retry_policy=RetryPolicy(),
    )
    graph.add_edge(START, "coder")
    app = graph.compile(engine=ScriptedEngine(["y"]))
    assert runner.run(app, {"task": "do"}, debug=False, interrupt_after=[], durability=None).state["code"] == "y"
