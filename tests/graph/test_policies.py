"""The framework's policies end to end: chosen on a graph or an engine, real tools, a scripted model."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, TypedDict

import pytest
from langchain_core.messages import AnyMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START
from langgraph.graph.message import add_messages
from langgraph.types import Command

from agentflow import tool
from agentflow.engine.scripted import Answer, ScriptedEngine, tool_call
from agentflow.errors import UsageError, WorkflowStopped
from agentflow.graph import Agent, AgentGraph
from agentflow.runtime import Guard
from tests.graph.graph_helpers import Runner, of_kind


class Talk(TypedDict, total=False):
    messages: Annotated[list[AnyMessage], add_messages]


class Board(TypedDict, total=False):
    task: str
    plan: str
    verdict: str
    report: str


class BrokenGuard(Guard):
    name = "broken-guard"

    async def around(self, work: Any, proceed: Any) -> Any:
        await proceed()
        raise RuntimeError("broken")


def talker(tools: list[Any], script: Any, *, policies: Any = (), **options: Any) -> tuple[Any, ScriptedEngine]:
    """An agent with tools that talks until its script is done."""
    graph = AgentGraph(Talk)
    graph.add_agent(Agent("worker", "work", tools=tools))
    graph.add_edge(START, "worker")
    graph.add_edge("worker", END)
    engine = ScriptedEngine(script)
    return graph.compile(engine=engine, policies=policies, **options), engine


def stats(app: Any, name: str) -> dict[str, float]:
    found: dict[str, float] = app.handler.binding.guards.stats()["policies"][name]
    return found


# -- memo -------------------------------------------------------------------------------------------------


def test_a_pure_tool_is_run_once_and_another_every_time(runner: Runner) -> None:
    ran: list[str] = []

    @tool(pure=True)
    def look(word: str) -> str:
        """Look a word up."""
        ran.append(f"look {word}")
        return f"meaning of {word}"

    @tool
    def note(word: str) -> str:
        """Write a word down."""
        ran.append(f"note {word}")
        return "written"

    def script(call: Any) -> Any:
        return script.answers.pop(0)  # type: ignore[attr-defined]

    rounds = [[tool_call("look", word="a"), tool_call("note", word="a")], "done"]
    script.answers = [*rounds, *rounds, *rounds]  # type: ignore[attr-defined]
    app, _ = talker([look, note], script, policies=["memo"])
    for tenant in ("t1", "t1", "t2"):
        result = runner.run(app, {"messages": [("user", "go")]}, tenant=tenant)
        said = [m for m in result.state["messages"] if m.type == "tool"]
        assert [m.content for m in said] == ["meaning of a", "written"]
        assert {m.tool_call_id for m in said} == {c["id"] for c in result.state["messages"][1].tool_calls}
    assert sorted(ran) == ["look a", "look a", "note a", "note a", "note a"]  # the other tenant looks for itself
    assert stats(app, "memo")["hits"] == 1


def test_a_failed_pure_call_is_tried_again_next_time() -> None:
    ran: list[int] = []

    @tool(pure=True)
    def flaky(x: int) -> str:
        """Fails at first."""
        ran.append(x)
        if len(ran) == 1:
            raise OSError("no network")
        return "fine"

    app, _ = talker([flaky], [tool_call("flaky", x=1), tool_call("flaky", x=1), "done"], policies=["memo"])
    result = app.run({"messages": [("user", "go")]})
    assert [m.status for m in result.state["messages"] if m.type == "tool"] == ["error", "success"]
    assert ran == [1, 1]


# -- safety -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "reason"),
    [({"model_calls": 2}, "model_calls"), ({"tool_calls": 1}, "tool_calls"), ({"tokens": 60}, "tokens")],
)
def test_a_limit_ends_the_run_with_its_name_and_the_state_so_far(
    runner: Runner, limits: dict[str, float], reason: str
) -> None:
    @tool
    def ping(n: int) -> str:
        """Ping."""
        return "pong"

    script = [tool_call("ping", n=i) for i in range(9)]
    app, engine = talker(
        [ping], lambda call: script[len(engine.calls) - 1], policies=[{"name": "safety", "workflow": limits}]
    )
    result = runner.run(app, {"messages": [("user", "go")]})
    assert (result.outcome, result.reason) == ("limit", reason)
    assert result.state["messages"][0].content == "go"
    assert of_kind(engine, "workflow_ended")[-1].outcome == "limit"
    with pytest.raises(WorkflowStopped) as stopped:
        result.raise_for_outcome()
    assert stopped.value.reason == reason
    assert stopped.value.state == result.state


def test_partial_state_of_finished_steps_is_kept_and_a_tenant_has_a_limit_of_its_own() -> None:
    graph = AgentGraph(Board)
    graph.add_agent(Agent("planner"), prompt=lambda s: s["task"], writes="plan")
    graph.add_agent(Agent("writer"), prompt=lambda s: s["plan"], writes="report")
    graph.add_edge(START, "planner")
    graph.add_edge("planner", "writer")
    graph.add_edge("writer", END)
    engine = ScriptedEngine(
        lambda call: f"from {call.at.agent}", policies=[{"name": "safety", "tenant": {"model_calls": 3}}]
    )
    app = graph.compile(engine=engine)
    assert app.run({"task": "x"}, tenant="t").outcome == "done"
    half = app.run({"task": "x"}, tenant="t")
    assert (half.outcome, half.reason, half.state.get("plan")) == ("limit", "model_calls", "from planner")
    assert app.run({"task": "x"}, tenant="other").outcome == "done"


def test_a_loop_is_noticed(runner: Runner) -> None:
    @tool
    def poll() -> str:
        """Ask whether it is done."""
        return "not yet"

    app, _ = talker([poll], lambda call: tool_call("poll"), policies=[{"name": "safety", "repeats": 3}])
    result = runner.run(app, {"messages": [("user", "go")]})
    assert (result.outcome, result.reason) == ("limit", "loop")


def test_a_round_of_agents_that_repeats_is_a_loop() -> None:
    graph = AgentGraph(Board)
    graph.add_agent(Agent("coder"), prompt=lambda s: s.get("verdict", "") + s["task"], writes="plan")
    graph.add_agent(Agent("tester"), prompt=lambda s: s["plan"], writes="verdict")
    graph.add_edge(START, "coder")
    graph.add_edge("coder", "tester")
    graph.add_edge("tester", "coder")
    engine = ScriptedEngine(lambda call: f"try {len(engine.calls)}")
    app = graph.compile(engine=engine, policies=[{"name": "safety", "cycles": 4}])
    result = app.run({"task": "x"})
    assert (result.outcome, result.reason) == ("limit", "loop")
    assert len(engine.calls) <= 9


def test_a_tool_that_is_not_allowed_is_refused_to_the_model(runner: Runner) -> None:
    ran: list[str] = []

    @tool
    def read(name: str) -> str:
        """Read."""
        ran.append("read")
        return "text"

    @tool
    def delete(name: str) -> str:
        """Delete."""
        ran.append("delete")
        return "gone"

    script = [[tool_call("read", name="x"), tool_call("delete", name="x")], "done"]
    app, _ = talker([read, delete], script, policies=[{"name": "safety", "allow": {"worker": ["read"]}}])
    result = runner.run(app, {"messages": [("user", "go")]})
    answers = [m for m in result.state["messages"] if m.type == "tool"]
    assert ran == ["read"]
    assert answers[0].content == "text"
    assert "refused" in answers[1].content


@pytest.mark.parametrize(("word", "runs"), [(True, 1), ("no", 0)])
def test_approval_by_interrupt(runner: Runner, word: Any, runs: int) -> None:
    ran: list[int] = []

    @tool
    def pay(amount: int) -> str:
        """Pay."""
        ran.append(amount)
        return "paid"

    def script(call: Any) -> Any:
        return (
            "done"
            if "paid" in engine.prompt(call) or "not approved" in engine.prompt(call)
            else tool_call("pay", amount=5)
        )

    app, engine = talker(
        [pay],
        script,
        policies=[{"name": "safety", "approve": ["pay"], "workflow": {"tool_calls": 1}}],
        checkpointer=InMemorySaver(),
    )
    paused = runner.run(app, {"messages": [("user", "go")]}, thread_id=f"t{word}")
    assert paused.outcome == "paused"
    assert paused.interrupts[0].value["arguments"] == {"amount": 5}
    assert ran == []
    done = runner.run(app, Command(resume=word), thread_id=f"t{word}")
    assert done.outcome == "done"
    assert len(ran) == runs


def test_approval_without_anybody_to_ask_says_what_to_do() -> None:
    from agentflow.engine.context import current_run
    from agentflow.engine.workflow import WorkflowRun
    from agentflow.tools import ToolExecutor

    @tool
    def pay(amount: int) -> str:
        """Pay."""
        return "paid"

    engine = ScriptedEngine([], policies=[{"name": "safety", "approve": ["pay"]}])
    token = current_run.set(WorkflowRun(engine, "w"))
    try:
        with pytest.raises(UsageError, match="approval"):
            ToolExecutor([pay]).run([{"name": "pay", "args": {"amount": 1}, "id": "1", "type": "tool_call"}])
    finally:
        current_run.reset(token)


# -- hedging ----------------------------------------------------------------------------------------------


def test_a_slow_pure_tool_is_hedged_and_reported_once(runner: Runner) -> None:
    ran: list[int] = []

    @tool(pure=True)
    async def fetch(n: int) -> str:
        """Fetch."""
        ran.append(n)
        if n == 99 and ran.count(99) == 1:
            await asyncio.Event().wait()  # for ever, unless it is cancelled
        return f"page {n}"

    script = [*(tool_call("fetch", n=i) for i in range(6)), tool_call("fetch", n=99), "done"]
    policies = [{"name": "hedging", "min_samples": 5, "max_share": 1.0, "min_delay": 0.05}]
    app, engine = talker([fetch], script, policies=policies)
    result = runner.run(app, {"messages": [("user", "go")]})
    assert [m.content for m in result.state["messages"] if m.type == "tool"][-1] == "page 99"
    assert stats(app, "hedging")["second_won"] == 1
    assert [e.outcome for e in of_kind(engine, "tool_ended")] == ["ok"] * 7
    assert len(of_kind(engine, "tool_started")) == 7
    report = result.agents["worker"].tools["fetch"]
    assert (report.calls, report.failures) == (7, 0)


# -- speculation ------------------------------------------------------------------------------------------


def pipeline(script: Any, *, policies: Any = ("speculation",)) -> tuple[Any, ScriptedEngine]:
    """A planner, then a critic that reads the task alone, then a writer that reads the critic's verdict."""
    graph = AgentGraph(Board)
    graph.add_agent(Agent("planner"), prompt=lambda s: s["task"], writes="plan")
    graph.add_agent(Agent("critic"), prompt=lambda s: "judge " + s["task"], writes="verdict")
    graph.add_agent(Agent("writer"), prompt=lambda s: f"{s['verdict']} {s['task']}", writes="report")
    graph.add_edge(START, "planner")
    graph.add_edge("planner", "critic")
    graph.add_edge("critic", "writer")
    graph.add_edge("writer", END)
    engine = ScriptedEngine(script)
    return graph.compile(engine=engine, policies=list(policies)), engine


def test_the_next_agent_is_started_early_and_its_answer_is_taken(runner: Runner) -> None:
    app, engine = pipeline(lambda call: Answer(text=f"{call.at.agent} says ok", delay=0.05))
    for i in range(6):
        result = runner.run(app, {"task": f"task {i}"})
        assert result.state["report"] == "writer says ok"
        assert {a: r.calls for a, r in result.agents.items()} == {"planner": 1, "critic": 1, "writer": 1}
    seen = stats(app, "speculation")
    assert seen["taken"] >= 4  # the critic reads nothing of the planner's; the writer what the critic always writes
    assert seen["seconds_saved"] > 0
    assert len(engine.calls) <= 18 + seen.get("wasted", 0)
    assert engine.stats().running == 0


def test_a_wrong_guess_is_stopped_and_leaves_nothing(runner: Runner) -> None:
    def script(call: Any) -> Any:
        return Answer(text=f"{call.at.agent} {engine.prompt(call)[-40:]}", delay=0.01)

    app, engine = pipeline(script)
    plain, reference = pipeline(
        lambda call: Answer(text=f"{call.at.agent} {reference.prompt(call)[-40:]}"), policies=()
    )
    for i in range(7):  # the critic's verdict differs every time: the writer cannot be guessed
        got = runner.run(app, {"task": f"task {i}"})
        assert got.state == plain.run({"task": f"task {i}"}).state
        assert sum(r.calls for r in got.agents.values()) == 3
    seen = stats(app, "speculation")
    assert seen.get("wasted", 0) <= 4 + 7  # after its trials the writer is not bet on any more
    assert seen["open"] == 0
    for event in of_kind(engine, "agent_started"):
        assert event.agent in ("planner", "critic", "writer")


def test_tools_are_never_run_early() -> None:
    ran: list[str] = []

    @tool
    def send(text: str) -> str:
        """Send."""
        ran.append(text)
        return "sent"

    graph = AgentGraph(Board)
    graph.add_agent(Agent("planner"), prompt=lambda s: s["task"], writes="plan")
    graph.add_agent(Agent("sender", tools=[send]), prompt=lambda s: "send " + s["task"], writes="report")
    graph.add_edge(START, "planner")
    graph.add_edge("planner", "sender")
    graph.add_edge("sender", END)

    def script(call: Any) -> Any:
        if call.at.agent == "planner":
            return Answer(text="plan", delay=0.03)
        return "done" if "sent" in engine.prompt(call) else tool_call("send", text="hello")

    engine = ScriptedEngine(script)
    app = graph.compile(engine=engine, policies=["speculation"])
    for i in range(4):
        before = len(ran)
        app.run({"task": f"t{i}"})
        assert len(ran) == before + 1
    assert stats(app, "speculation")["taken"] >= 2


# -- adapters ---------------------------------------------------------------------------------------------


def test_an_agents_adapter_is_on_its_calls_and_on_no_others(runner: Runner) -> None:
    graph = AgentGraph(Board)
    graph.add_agent(Agent("planner", adapter="plans", sampling={"max_tokens": 7}), prompt=lambda s: "p", writes="plan")
    graph.add_agent(Agent("critic"), prompt=lambda s: "c", writes="verdict")
    graph.add_edge(START, "planner")
    graph.add_edge("planner", "critic")
    graph.add_edge("critic", END)
    engine = ScriptedEngine(["plan", "fine"])
    runner.run(graph.compile(engine=engine), {"task": "x"})
    assert [(c.at.agent, c.adapter, c.sampling.max_tokens == 7) for c in engine.calls] == [
        ("planner", "plans", True),
        ("critic", None, False),
    ]
    with pytest.raises(UsageError, match="adapter"):
        Agent("x", adapter="")


def test_the_anchor_is_the_agents_own_text_and_nothing_of_the_session(runner: Runner) -> None:
    graph = AgentGraph(Board)
    graph.add_agent(Agent("planner", "You plan."), prompt=lambda s: s["task"], writes="plan")
    graph.add_edge(START, "planner")
    graph.add_edge("planner", END)
    engine = ScriptedEngine(lambda call: "plan")
    app = graph.compile(engine=engine)
    for task in ("first secret", "second secret"):
        runner.run(app, {"task": task})
    one, two = engine.calls
    assert 0 < one.anchor == two.anchor < len(one.token_ids)
    assert list(one.token_ids[: one.anchor]) == list(two.token_ids[: two.anchor])
    own = engine.tokenizer.decode(one.token_ids[: one.anchor])
    assert "You plan." in own
    assert "secret" not in own


# -- together ---------------------------------------------------------------------------------------------


def test_all_of_them_at_once_change_no_answer(runner: Runner) -> None:
    policies = ["hedging", "speculation", "memo", "safety"]
    app, _ = pipeline(lambda call: f"{call.at.agent} says ok", policies=policies)
    assert app.handler is not None
    assert app.handler.binding.guards is not None
    assert app.handler.binding.guards.names == ("safety", "memo", "speculation", "hedging")  # precedence, not order
    for i in range(3):
        assert runner.run(app, {"task": f"task {i}"}).state["report"] == "writer says ok"


def test_engine_policies_on_a_graph_say_where_they_belong() -> None:
    with pytest.raises(UsageError, match="works inside the engine"):
        pipeline([], policies=["fairness"])


def test_a_guard_that_fails_is_left_out_and_the_call_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    app, _ = pipeline(lambda call: "ok", policies=["tests.graph.test_policies:BrokenGuard", "safety"])
    assert app.run({"task": "x"}).outcome == "done"
    assert app.handler.binding.guards.names == ("safety",)
    assert app.handler.binding.guards.stats()["counters"]["policies_left_out"] == 1
