"""Mooncake files, plain and agentic: what the format holds comes back."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentflow.bench.traces.generators import GENERATORS, Plan, generate
from agentflow.bench.traces.model import Content, Span, Trace, TraceCall, TraceTool, TraceWorkflow
from agentflow.bench.traces.mooncake import (
    export_agentic,
    export_plain,
    import_agentic,
    import_plain,
    session_id,
)
from agentflow.errors import TraceError, UsageError

DATA = Path(__file__).parents[2] / ".." / "shared" / "data"


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def written(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def common(a: Content, b: Content) -> int:
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += x.tokens
    return n


def row(request: str, hashes: list[int], length: int, **fields: Any) -> dict[str, Any]:
    return {"request_id": request, "hash_ids": hashes, "input_length": length, "output_length": 4} | fields


def test_a_small_agentic_trace_by_hand(tmp_path: Path) -> None:
    path = written(
        tmp_path / "t.jsonl",
        row("plan", [0, 1], 12, session_id="root", timestamp=2000.0, branches=["sub"], prefix_reset=True),
        row("sub", [7], 5, session_id="child", wait_for=["plan"], delay=100, tool_wait_ms=400, prefix_reset=True),
        row(
            "join",
            [0, 2, 3],
            20,
            session_id="root",
            wait_for=["plan", "sub"],
            delay=0.5,
            tool_events=[
                {"tool_class": "bash", "started_at_unix_ms": 1760000000500, "duration_ms": 1500.0, "status": "ok"},
                {"tool_class": "web", "started_at_unix_ms": 1760000000000, "duration_ms": 250.0, "status": "error"},
            ],
        ),
        row("again", [9], 3, session_id="root", wait_for=["join"], prefix_reset=True),
    )
    trace, report = import_agentic(path, block_size=8)
    assert (report.records, report.used, report.rejected) == (4, 4, [])
    (flow,) = trace.workflows
    plan, sub, join, again = flow.calls
    assert flow.arrival == 2.0
    assert [c.branch for c in flow.calls] == [None, "child", None, None]
    assert (sub.wait_for, sub.delay) == (("plan",), 0.5)
    assert (join.wait_for, join.delay) == (("plan", "sub"), 0.0005)
    assert join.tools == (
        TraceTool(name="bash", start=0.5, duration=1.5),
        TraceTool(name="web", duration=0.25, outcome="error"),
    )
    assert [c.superseded for c in flow.calls] == [False, False, True, False]
    assert [c.prompt_tokens for c in flow.calls] == [12, 5, 20, 3]
    # The root's conversation only grew: its first answer is what follows its prompt in the next one.
    assert common(plan.prompt + plan.output, join.prompt) == 16
    assert common(join.prompt, again.prompt) == 0


@pytest.mark.parametrize("name", sorted(GENERATORS))
@pytest.mark.parametrize("block_size", [1, 16])
def test_generated_traces_come_back(tmp_path: Path, name: str, block_size: int) -> None:
    trace = generate(name, Plan(workflows=5, rate=0.5, max_calls=25, scale=0.05))
    path = tmp_path / "t.jsonl"
    export_agentic(trace, path, block_size=block_size)
    back, report = import_agentic(path, block_size=block_size)
    assert (report.records, report.used) == (trace.calls, trace.calls)
    assert [w.id for w in back.workflows] == [w.id for w in trace.workflows]
    for flow, again in zip(trace.workflows, back.workflows, strict=True):
        assert again.arrival == pytest.approx(flow.arrival)
        for call, other in zip(flow.calls, again.calls, strict=True):
            assert (other.id, other.agent, other.branch) == (call.id, call.agent, call.branch)
            assert (other.wait_for, other.output_tokens) == (call.wait_for, call.output_tokens)
            assert other.delay == pytest.approx(call.delay, abs=1e-8)
            assert [t.name for t in other.tools] == [t.name for t in call.tools]
            assert [t.duration for t in other.tools] == pytest.approx([t.duration for t in call.tools], abs=1e-8)
    before = [c for w in trace.workflows for c in w.calls]
    after = [c for w in back.workflows for c in w.calls]
    for (a, b), (x, y) in zip(combinations(before, 2), combinations(after, 2), strict=True):
        shared = common(a.prompt, b.prompt)
        whole = a.prompt_tokens == b.prompt_tokens == shared
        # Exact in whole blocks. Beyond those, a conversation that goes on shares its last block's beginning too.
        assert (shared if whole else shared // block_size * block_size) <= common(x.prompt, y.prompt) <= shared
    again_path = tmp_path / "again.jsonl"
    export_agentic(back, again_path, block_size=block_size)
    assert rows(again_path) == rows(path)


contents = st.lists(
    st.sampled_from([Span("a", 3), Span("b", 8), Span("c", 5), Span("d", 1)]), min_size=1, max_size=6
).map(tuple)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(prompts=st.lists(contents, max_size=8), block_size=st.integers(1, 9))
def test_plain_rows_share_whole_blocks(tmp_path: Path, prompts: list[Content], block_size: int) -> None:
    flows = tuple(
        TraceWorkflow(id=str(i), calls=(TraceCall(id=str(i), agent="r", prompt=p, output=(Span(f"o{i}", 2),)),))
        for i, p in enumerate(prompts)
    )
    path = tmp_path / "t.jsonl"
    export_plain(Trace(name="t", workflows=flows), path, block_size=block_size)
    back, report = import_plain(path, block_size=block_size)
    assert report.used == len(prompts)
    found = [w.calls[0].prompt for w in back.workflows]
    for (a, b), (x, y) in zip(combinations(prompts, 2), combinations(found, 2), strict=True):
        shared = common(a, b)
        ends = sum(s.tokens for s in a) == sum(s.tokens for s in b) == shared
        assert common(x, y) == (shared if ends else shared // block_size * block_size)
    export_plain(back, tmp_path / "again.jsonl", block_size=block_size)
    assert rows(tmp_path / "again.jsonl") == rows(path)


BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"hash_ids": [0], "input_length": 3, "output_length": 1}, "no request_id"),
    (row("b", [0], 0), "input_length must be"),
    (row("b", [0], 3) | {"output_length": -1}, "output_length must be"),
    (row("b", [0, 1], 8), "do not fit input_length"),
    (row("b", [0], 9), "do not fit input_length"),
    (row("b", [-1], 3), "hash_ids must be"),
    (row("b", [0], 3, wait_for="a"), "wait_for must be"),
    (row("b", [0], 3, delay=-1), "delay must be"),
    (row("b", [0], 3, tool_events=[1]), "tool_events must be"),
    (row("a", [0], 3), "a second row"),
    (row("b", [0], 3, wait_for=["b"]), "circle"),
]


@pytest.mark.parametrize(("broken", "reason"), BROKEN, ids=[r for _, r in BROKEN])
def test_broken_rows_are_reported_or_refused(tmp_path: Path, broken: dict[str, Any], reason: str) -> None:
    path = written(tmp_path / "t.jsonl", row("a", [0], 3), broken, row("z", [0], 3, wait_for=["a"]))
    trace, report = import_agentic(path, block_size=8)
    assert (report.records, report.used, len(report.rejected)) == (3, 2, 1)
    assert reason in report.rejected[0].reason
    assert reason in str(report)
    assert [c.id for w in trace.workflows for c in w.calls] == ["a", "z"]
    with pytest.raises(TraceError, match=reason):
        import_agentic(path, block_size=8, on_error="refuse")


def test_a_dependency_that_is_not_there_is_left_out_and_counted(tmp_path: Path) -> None:
    path = written(tmp_path / "t.jsonl", row("a", [0], 3, wait_for=["gone"], delay=5))
    trace, report = import_agentic(path, block_size=8)
    assert trace.workflows[0].calls[0].wait_for == ()
    assert list(report.notes.values()) == [1]


def test_session_ids_hold_any_name() -> None:
    call = TraceCall(id="1", agent="a/b agentflow:", prompt=(), output=(), branch="")
    assert session_id("w/x", call).count("/") == 2


def test_what_plain_mooncake_cannot_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="single calls only"):
        export_plain(generate("hover", Plan(workflows=1)), tmp_path / "t.jsonl")
    twice = TraceWorkflow(id="w", calls=(TraceCall(id="c", agent="a", prompt=(), output=()),))
    with pytest.raises(UsageError, match="unique"):
        export_agentic(Trace(name="t", workflows=(twice, twice)), tmp_path / "t.jsonl")


def test_the_published_trace_comes_back_row_by_row(tmp_path: Path) -> None:
    source = DATA / "mooncake" / "conversation_trace.jsonl"
    if not source.exists():
        pytest.skip("shared/data/mooncake is not here")
    trace, report = import_plain(source)
    assert (report.records, report.used, report.rejected) == (12_031, 12_031, [])
    export_plain(trace, tmp_path / "t.jsonl")
    assert rows(tmp_path / "t.jsonl") == rows(source)
