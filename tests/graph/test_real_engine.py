"""Graphs on the real SGLang: what agents reuse, and what the scheduler hears of them."""

from __future__ import annotations

import asyncio
import itertools
from typing import Annotated, Any, TypedDict

import pytest
from langchain_core.messages import AIMessage, AnyMessage
from langgraph.graph import END, START
from langgraph.graph.message import add_messages

from agentflow.graph import Agent, AgentGraph, shared

INSTRUCTIONS = " ".join(f"Rule {i}: answer briefly and truthfully." for i in range(12))


class State(TypedDict, total=False):
    question: str
    draft: str
    rounds: int
    talk: Annotated[list[AnyMessage], add_messages]


def writer_critic(rounds: int) -> AgentGraph:
    graph = AgentGraph(State)
    graph.add_agent(
        Agent("writer", INSTRUCTIONS, sampling={"max_tokens": 12}),
        prompt=lambda s: ["Q: ", shared("question", s["question"]), f" Round {s.get('rounds', 0)}."],
        writes=lambda answer, s: {"draft": answer.text or "-", "rounds": s.get("rounds", 0) + 1},
        history="talk",
    )
    graph.add_agent(
        Agent("critic", "Judge. " + INSTRUCTIONS, sampling={"max_tokens": 8}),
        prompt=lambda s: ["Q: ", shared("question", s["question"]), " Draft: ", shared("draft", s["draft"])],
        writes=lambda answer: {},
    )
    graph.add_edge(START, "writer")
    graph.add_edge("writer", "critic")
    graph.add_conditional_edges("critic", lambda s: "writer" if s["rounds"] < rounds else END, ["writer", END])
    return graph


def test_an_agent_finds_its_unchanged_prefix_cached(engine: Any) -> None:
    result = writer_critic(4).compile(engine=engine).run({"question": "Why is the sky blue?"})
    assert result.outcome == "done"
    answers = [m for m in result.state["talk"] if isinstance(m, AIMessage)]
    assert len(answers) == 4
    for earlier, later in itertools.pairwise(answers):
        assert earlier.usage_metadata is not None
        assert later.usage_metadata is not None
        unchanged = earlier.usage_metadata["input_tokens"]
        cached = later.usage_metadata["input_token_details"]["cache_read"]
        assert cached >= 0.95 * unchanged
    usage = result.agents["critic"].usage
    assert usage.cached_device > 0
    assert 0 < usage.completion_tokens <= 4 * 8


async def test_the_scheduler_hears_of_the_workflows(engine: Any) -> None:
    app = writer_critic(2).compile(engine=engine)
    results = await asyncio.gather(*(app.arun({"question": f"Why {i}?"}, workflow_id=f"w{i}") for i in range(3)))
    assert [r.outcome for r in results] == ["done"] * 3
    await engine.aflush()
    stats = await engine.astats()
    assert (stats.running, stats.workflows_live, stats.workflows_paused) == (0, 0, 0)
    sent = sum(len(run.events) for r in results for run in r.runs)
    assert stats.counters.get("events", 0) >= sent


async def test_a_cancelled_run_frees_the_engine(engine: Any) -> None:
    graph = AgentGraph(State)
    long = {"max_tokens": 2000, "ignore_eos": True}
    graph.add_agent(Agent("a", sampling=long), prompt=lambda s: s["question"], writes="draft")
    graph.add_edge(START, "a")
    running = asyncio.create_task(graph.compile(engine=engine).arun({"question": "Count."}))
    for _ in range(500):
        if (await engine.astats()).running:
            break
        await asyncio.sleep(0.01)
    else:
        pytest.fail("the call did not begin")
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    for _ in range(500):
        await engine.aflush()
        stats = await engine.astats()
        if not stats.running and not stats.workflows_live:
            break
        await asyncio.sleep(0.01)
    assert stats.running == 0
    assert stats.workflows_live == 0
    assert stats.device_held == 0
