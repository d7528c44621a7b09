"""Speculation where a call made early could differ from the real one, or do harm to the run around it."""

from __future__ import annotations

from typing import Any

import pytest
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START
from langgraph.types import Command, interrupt
from pydantic import BaseModel
from typing_extensions import TypedDict

from agentflow import tool
from agentflow.engine.scripted import Answer, ScriptedEngine, tool_call
from agentflow.graph import Agent, AgentGraph
from tests.graph.graph_helpers import Runner
from tests.graph.test_policies import stats


class Board(TypedDict, total=False):
    task: str
    plan: Any
    review: str


@pytest.mark.parametrize("reuse", ["exact", "corrected"])
def test_a_call_made_early_reuses_kv_as_its_run_does(runner: Runner, reuse: Any) -> None:
    graph = AgentGraph(Board)
    graph.add_agent(Agent("planner"), prompt=lambda s: s["task"], writes="plan")
    graph.add_agent(Agent("critic"), prompt=lambda s: "judge " + s["task"], writes="review")
    graph.add_edge(START, "planner")
    graph.add_edge("planner", "critic")
    graph.add_edge("critic", END)
    engine = ScriptedEngine(lambda call: Answer(text=f"by {call.at.agent}", delay=0.02))
    app = graph.compile(engine=engine, policies=["speculation"], reuse=reuse)
    for i in range(4):
        assert runner.run(app, {"task": f"task {i}"}).state["review"] == "by critic"
    assert {call.reuse for call in engine.calls} == {reuse}
    assert stats(app, "speculation")["taken"] >= 2
    assert stats(app, "speculation").get("mismatched", 0) == 0


def test_an_output_that_cannot_be_printed_loses_only_the_bet(runner: Runner) -> None:
    class Verdict(BaseModel):
        good: bool

        def __repr__(self) -> str:
            raise RuntimeError("not to be printed")

        __str__ = __repr__

    graph = AgentGraph(Board)
    graph.add_agent(Agent("judge", output=Verdict), prompt=lambda s: s["task"], writes="plan")
    graph.add_edge(START, "judge")
    graph.add_edge("judge", END)
    app = graph.compile(engine=ScriptedEngine(lambda call: '{"good": true}'), policies=["speculation"])
    result = runner.run(app, {"task": "x"})
    assert (result.outcome, result.state["plan"].good) == ("done", True)
    assert app.handler is not None
    assert app.handler.binding.guards is not None
    assert app.handler.binding.guards.names == ("speculation",)


@pytest.mark.parametrize("policies", [[], ["speculation"]], ids=["no policy", "speculation"])
def test_a_prompt_function_called_early_takes_no_answer_of_a_person(runner: Runner, policies: list[str]) -> None:
    paid: list[int] = []
    asks: list[str] = []

    @tool
    def pay(amount: int) -> str:
        """Pay."""
        paid.append(amount)
        return "paid"

    def review(state: Any) -> str:
        return state["task"] + (interrupt("words for the reviewer?") if asks else "")

    def script(call: Any) -> Any:
        if not asks or call.at.agent == "reviewer" or "paid" in engine.prompt(call):
            return "done"
        return tool_call("pay", amount=5)

    graph = AgentGraph(Board)
    graph.add_agent(Agent("payer", tools=[pay]), prompt=lambda s: s["task"], writes="plan")
    graph.add_agent(Agent("reviewer"), prompt=review, writes="review")
    graph.add_edge(START, "payer")
    graph.add_edge("payer", "reviewer")
    graph.add_edge("reviewer", END)
    engine = ScriptedEngine(script)
    safety = {"name": "safety", "approve": ["pay"]}
    app = graph.compile(InMemorySaver(), engine=engine, policies=[*policies, safety])
    for i in range(3):  # so that the reviewer is known to follow
        runner.run(app, {"task": "go"}, thread_id=f"before {i}")
    asks.append("from now on")
    paused = runner.run(app, {"task": "go"}, thread_id="t")
    assert paused.interrupts[0].value["arguments"] == {"amount": 5}
    paused = runner.run(app, Command(resume=True), thread_id="t")
    assert ([i.value for i in paused.interrupts], paid) == (["words for the reviewer?"], [5])
    done = runner.run(app, Command(resume="be kind"), thread_id="t")
    assert (done.outcome, paid) == ("done", [5])
    assert "be kind" in engine.prompt(engine.calls[-1])
