"""Sums per agent and per kind of decision, and their tables on a pipe."""

from __future__ import annotations

import io

from agentflow.cache.decision import Decision
from agentflow.engine.base import Completion, Coordinates, Timings, Usage
from agentflow.engine.scripted import ScriptedEngine
from agentflow.engine.workflow import WorkflowRun
from agentflow.events import ToolEnded, ToolStarted
from agentflow.report import agent_rows, agent_table, decision_rows, decision_table, plain_console


def _run(name: str, calls: int) -> WorkflowRun:
    run = WorkflowRun(ScriptedEngine([]), name)
    for i in range(calls):
        usage = Usage(prompt_tokens=100, completion_tokens=5, cached_device=80 if i else 0, cached_host=3 if i else 0)
        completion = Completion(
            request_id=f"{name}-{i}", text="", token_ids=(), finish="stop", usage=usage, timings=Timings(total=0.5)
        )
        run.record(Coordinates(workflow=name, agent="writer"), completion)
    run.emit(ToolStarted, agent="writer", tool="search", call_id="1")
    run.emit(ToolEnded, agent="writer", tool="search", call_id="1", duration=0.25)
    return run


def test_rows_sum_over_runs() -> None:
    (row,) = agent_rows([_run("a", 2).agents, _run("b", 1).agents])
    assert row.to_json() == {
        "agent": "writer",
        "calls": 3,
        "prompt_tokens": 300,
        "cached_device": 80,
        "cached_host": 3,
        "corrected": 0,
        "completion_tokens": 15,
        "model_seconds": 1.5,
        "tool_calls": 2,
        "tool_seconds": 0.5,
    }
    assert abs(row.cached_share - 83 / 300) < 1e-9


def test_decisions_are_grouped_by_what_and_why_with_the_largest_first() -> None:
    decisions = [
        _evict(1, "workflow a-1 ended", 10, "a-1"),
        _evict(2, "pool full", 50, "a-1", "b-2"),
        _evict(3, "workflow b-2 ended", 60, "b-2"),
    ]
    rows = decision_rows(decisions)
    assert [(r["reason"], r["count"], r["tokens"]) for r in rows] == [("workflow ended", 2, 70), ("pool full", 1, 50)]


def _evict(seq: int, reason: str, tokens: int, *workflows: str) -> Decision:
    return Decision(
        seq=seq, time=0.0, kind="evict", policy="lifecycle", reason=reason, tokens=tokens, workflows=workflows
    )


def test_tables_on_a_pipe_are_plain_and_whole() -> None:
    pipe = io.StringIO()
    console = plain_console(pipe)
    console.print(agent_table(agent_rows([_run("a", 2).agents])))
    console.print(decision_table([{"kind": "evict", "reason": "r" * 60, "count": 1, "tokens": 2, "policy": "lru"}]))
    text = pipe.getvalue()
    assert "\x1b" not in text
    assert "writer" in text
    assert "r" * 60 in text
