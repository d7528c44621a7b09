"""A trace of a real run: recorded on SGLang, read back, and forced upon SGLang again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, TypedDict

from agentflow.bench.traces.jsonl import read_trace
from agentflow.bench.traces.record import recording
from agentflow.bench.traces.spans import SpanTokens
from agentflow.engine.base import Call, Coordinates, Sampling
from agentflow.graph import Agent, AgentGraph, shared

INSTRUCTIONS = " ".join(f"Rule {i}: answer briefly and truthfully." for i in range(12))


class State(TypedDict, total=False):
    question: str
    draft: str
    verdict: str


def graph() -> AgentGraph:
    made = AgentGraph(State)
    made.add_agent(
        Agent("writer", INSTRUCTIONS, sampling={"max_tokens": 12}),
        prompt=lambda s: ["Q: ", shared("question", s["question"])],
        writes="draft",
    )
    made.add_agent(
        Agent("critic", "Judge. " + INSTRUCTIONS, sampling={"max_tokens": 8}),
        prompt=lambda s: ["Q: ", shared("question", s["question"]), " Draft: ", shared("draft", s["draft"])],
        writes="verdict",
    )
    made.add_edge("__start__", "writer")
    made.add_edge("writer", "critic")
    return made


async def test_a_recorded_run_is_replayed_token_by_token(engine: Any, tmp_path: Path) -> None:
    with recording(engine, tmp_path / "run.jsonl.gz") as recorded:
        app = graph().compile(engine=recorded)
        results = await asyncio.gather(*(app.arun({"question": f"Why is {c} a colour?"}) for c in ("red", "blue")))
    assert [r.outcome for r in results] == ["done", "done"]
    trace = read_trace(tmp_path / "run.jsonl.gz")
    assert trace.meta["missing"] == {}
    assert [[c.agent for c in w.calls] for w in trace.workflows] == [["writer", "critic"]] * 2
    used = sum(r.usage.prompt_tokens for r in results)
    assert sum(c.prompt_tokens for w in trace.workflows for c in w.calls) == used
    # Writers share their instructions, and the first span of a prompt is where they part or agree.
    assert trace.workflows[0].calls[0].prompt[0] == trace.workflows[1].calls[0].prompt[0]

    tokens = SpanTokens(trace)
    engine.flush()
    for flow in trace.workflows:
        for call in flow.calls:
            answer = tuple(tokens.ids(call.output))
            completion = await engine.agenerate(
                Call(
                    token_ids=tokens.ids(call.prompt),
                    at=Coordinates(workflow=f"replayed-{flow.id}", agent=call.agent),
                    sampling=Sampling(max_tokens=len(answer), temperature=1.0, forced_tokens=answer, ignore_eos=True),
                )
            )
            assert completion.token_ids == answer
