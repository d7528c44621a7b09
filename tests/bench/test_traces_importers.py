"""Public traces: every record is used or reported, and what is known of the data is found in the trace."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentflow.bench.traces.importers import IMPORTERS, Imported, import_trace
from agentflow.bench.traces.jsonl import read_trace, write_trace
from agentflow.bench.traces.model import TraceCall
from agentflow.bench.traces.spans import SpanTokens
from agentflow.errors import TraceError, UsageError

DATA = Path(__file__).parents[2] / ".." / "shared" / "data"

#: Format, place in shared/data, records, records used, workflows, calls.
PUBLIC = [
    ("mini-swe-agent-steps", "mini-swe-agent/steps_first400.jsonl.gz", 15_334, 15_334, 400, 15_334),
    ("mini-swe-agent-trajectories", "mini-swe-agent/trajs_sample50.jsonl.gz", 50, 50, 50, 2_001),
    ("kv-cache-tester", "kv-cache-tester/traces_sample.jsonl.gz", 6_704, 6_704, 61, 6_704),
    ("lmcache", "lmcache-agent-trace/miniswe", 402, 402, 20, 402),
    ("lmcache", "lmcache-agent-trace/magagent", 746, 693, 25, 693),
    ("who-and-when", "who-and-when", 1_099, 1_097, 126, 668),
    ("continuum", "continuum/trace_data/test.json", 5, 5, 5, 125),
    ("bfcl", "bfcl", 200, 200, 200, 1_876),
    ("mooncake", "mooncake/conversation_trace.jsonl", 12_031, 12_031, 12_031, 12_031),
]
_loaded: dict[str, Imported] = {}


def public(format: str, place: str) -> Imported:
    if not (DATA / place).exists():
        pytest.skip(f"shared/data/{place} is not here")
    if place not in _loaded:
        _loaded[place] = import_trace(format, DATA / place)
    return _loaded[place]


def calls_of(imported: Imported) -> list[TraceCall]:
    return [c for w in imported.trace.workflows for c in w.calls]


@pytest.mark.parametrize(("format", "place", "records", "used", "workflows", "calls"), PUBLIC)
def test_public_traces_lose_no_record(
    format: str, place: str, records: int, used: int, workflows: int, calls: int
) -> None:
    trace, report = public(format, place)
    assert report.records == records
    assert report.used == used
    assert report.records == report.used + len(report.rejected)
    assert all(r.where and r.reason for r in report.rejected)
    assert (len(trace.workflows), trace.calls) == (workflows, calls)
    for flow in trace.workflows:
        seen: set[str] = set()
        for call in flow.calls:
            assert seen.issuperset(call.wait_for)
            assert call.id not in seen
            assert call.prompt_tokens > 0
            seen.add(call.id)


@pytest.mark.parametrize("place", ["who-and-when", "lmcache-agent-trace/magagent", "bfcl"])
def test_public_traces_survive_our_own_format(place: str, tmp_path: Path) -> None:
    trace, _ = public(next(p[0] for p in PUBLIC if p[1] == place), place)
    write_trace(trace, tmp_path / "t.jsonl.gz")
    assert read_trace(tmp_path / "t.jsonl.gz") == trace


def test_a_span_is_the_same_text_in_all_of_a_trace() -> None:
    for format, place, *_ in PUBLIC:
        lengths: dict[str, int] = {}
        for call in calls_of(public(format, place)):
            for span in call.prompt + call.output:
                assert lengths.setdefault(span.id, span.tokens) == span.tokens, place


def reuse(imported: Imported) -> float:
    """Share of prompt tokens that the prompt and answer before, of the same agent and branch, already held."""
    held = total = 0
    for flow in imported.trace.workflows:
        latest: dict[Any, TraceCall] = {}
        for call in flow.calls:
            before = latest.get((call.agent, call.branch))
            if before is not None:
                for mine, its in zip(call.prompt, before.prompt + before.output, strict=False):
                    if mine != its:
                        break
                    held += mine.tokens
                total += call.prompt_tokens
            latest[call.agent, call.branch] = call
    return held / total


def test_coding_agents_reuse_nearly_all_of_the_prompt_before() -> None:
    # 0.97 is what the blocks of this data show, measured without agentflow; answers found in the next prompt add to it.
    assert reuse(public("kv-cache-tester", "kv-cache-tester/traces_sample.jsonl.gz")) > 0.94
    assert reuse(public("mini-swe-agent-steps", "mini-swe-agent/steps_first400.jsonl.gz")) > 0.94


def test_magagent_reports_the_empty_inputs() -> None:
    _, report = public("lmcache", "lmcache-agent-trace/magagent")
    assert dict(report.reasons) == {"the input is empty": 53}
    assert all(".jsonl, line " in r.where for r in report.rejected)


def test_mooncake_has_its_known_block_hit_rate() -> None:
    trace, _ = public("mooncake", "mooncake/conversation_trace.jsonl")
    seen: set[str] = set()
    held = total = 0
    for flow in trace.workflows:
        for span in flow.calls[0].prompt:
            held += span.tokens if span.id in seen else 0
            total += span.tokens
            seen.add(span.id)
    assert held / total == pytest.approx(0.366, abs=0.02)


def test_a_tokenizer_gives_token_ids_and_without_one_there_are_none() -> None:
    place = DATA / "continuum" / "trace_data" / "test.json"
    if not place.exists():
        pytest.skip("shared/data/continuum is not here")
    assert not public("continuum", "continuum/trace_data/test.json").trace.tokens
    trace, _ = import_trace("continuum", place, tokenizer=lambda text: [ord(c) % 30_000 for c in text])
    call = trace.workflows[0].calls[0]
    text = "".join(chr(i) for i in SpanTokens(trace).ids(call.prompt))
    assert text.startswith("system\nYou are a helpful assistant that can interact")
    assert trace.calls == 125


# Small files of our own: what each importer makes of them, and of a record that it cannot use.


def lines(path: Path, *items: Any) -> Path:
    data = "".join((i if isinstance(i, str) else json.dumps(i)) + "\n" for i in items).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def step(n: int, prompt: int, answer: int, created: float, **more: Any) -> dict[str, Any]:
    fields = {"instance_id": "i", "step": n, "created": created, "prompt_tokens": prompt, "completion_tokens": answer}
    return fields | {"action": "pytest -x", "returncode": 1} | more


def test_steps_grow_shrink_and_drop_reasoning(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "s.jsonl.gz",
        step(0, 200, 100, 1000),
        step(1, 350, 100, 1013),
        step(2, 400, 20, 1020, action="sed -i s/a/b/ a.py"),
        step(3, 180, 10, 1030, action=None),
        "broken",
        step(4, 0, 10, 1040),
    )
    (trace, report) = import_trace("mini-swe-agent-steps", path)
    assert (report.records, report.used, len(report.rejected)) == (6, 4, 2)
    assert [r.where for r in report.rejected] == ["s.jsonl.gz, line 5", "s.jsonl.gz, line 6"]
    calls = trace.workflows[0].calls
    assert [c.prompt_tokens for c in calls] == [200, 350, 400, 180]
    assert [c.output_tokens for c in calls] == [100, 100, 20, 10]
    assert calls[1].prompt[: len(calls[0].prompt) + 1] == calls[0].prompt + calls[0].output
    assert [s.tokens for s in calls[1].output] == [50, 50]  # the second half was reasoning
    assert calls[3].prompt[0] == calls[0].prompt[0]
    assert calls[1].tools[0].name == "pytest"
    assert calls[1].tools[0].outcome == "error"
    assert calls[1].delay == pytest.approx(13 - 2 - 0.87)
    assert {c.agent for c in calls} == {"agent"}
    phases = import_trace("mini-swe-agent-phases", path).trace.workflows[0].calls
    assert [c.agent for c in phases] == ["tester", "tester", "coder", "planner"]  # what each call's own command is for
    assert [c.prompt for c in phases] == [c.prompt for c in calls]


def test_sub_agents_run_beside_and_are_waited_for(tmp_path: Path) -> None:
    def request(t: float, length: int, hashes: list[int], time: float, stop: str = "tool_use") -> dict[str, Any]:
        return {"t": t, "type": "n", "in": length, "out": 3, "hash_ids": hashes, "api_time": time, "stop": stop}

    sub = {"type": "subagent", "t": 2.0, "agent_id": "a1", "subagent_type": "Explore"}
    sub["requests"] = [request(0.0, 5, [9], 1.0), request(2.0, 6, [9], 1.0, "end_turn"), {"t": 3.0, "in": 4}]
    session = {
        "id": "s",
        "block_size": 4,
        "requests": [request(0, 9, [1, 2], 1.0), sub, request(6.0, 16, [1, 2, 3, 4], 1.0), {"t": 9, "in": 0}, 7],
    }
    trace, report = import_trace("kv-cache-tester", lines(tmp_path / "k.jsonl", session, {"id": 3}))
    assert (report.records, report.used, len(report.rejected)) == (8, 4, 4)
    first, one, two, join = trace.workflows[0].calls
    assert [c.agent for c in (first, one, two, join)] == ["main", "Explore", "Explore", "main"]
    assert [c.wait_for for c in (first, one, two, join)] == [(), (first.id,), (one.id,), (two.id,)]
    assert [c.delay for c in (first, one, two, join)] == [0, 1.0, 1.0, 1.0]
    assert [len(c.tools) for c in (first, one, two, join)] == [0, 1, 1, 0]
    assert join.prompt[: len(first.prompt) + len(first.output)] == first.prompt + first.output


def test_lmcache_sessions_come_in_the_order_of_time(tmp_path: Path) -> None:
    lines(
        tmp_path / "one.jsonl",
        {"timestamp": 9_000_000, "input": "you are a coder. task: fly. more", "output": "x", "session_id": "s"},
        {"timestamp": 1_000_000, "input": "you are a coder. task: fly. ", "output": "y" * 320, "session_id": "s"},
        {"timestamp": 5_000_000, "input": "", "output": "x", "session_id": "s"},
        {"timestamp": "x", "input": "a", "output": "x", "session_id": "s"},
    )
    trace, report = import_trace("lmcache", tmp_path)
    assert (report.records, report.used, len(report.rejected)) == (4, 2, 2)
    early, late = trace.workflows[0].calls
    assert late.prompt[: len(early.prompt)] == early.prompt
    assert late.delay == pytest.approx(8 - 80 / 80)
    assert early.agent == "you are a coder. task:"


def test_who_and_when_puts_the_conversation_behind_each_agents_instructions(tmp_path: Path) -> None:
    history = [
        {"name": "A", "content": "the task"},
        {"name": "A", "content": "a thought of A"},
        {"name": "Computer_terminal", "content": "exitcode: 0 (execution succeeded)"},
        {"name": "B", "content": "done"},
        {"name": "B", "content": ""},
    ]
    (tmp_path / "1.json").write_text(json.dumps({"history": history, "system_prompt": {"A": "be A", "B": "be B!"}}))
    (tmp_path / "2.json").write_text("{}")
    trace, report = import_trace("who-and-when", tmp_path)
    assert (report.records, report.used, len(report.rejected)) == (6, 4, 2)
    a, b = trace.workflows[0].calls
    assert [c.agent for c in (a, b)] == ["A", "B"]
    assert a.prompt[0] != b.prompt[0]
    assert b.prompt[1:3] == a.prompt[1:] + a.output
    assert [t.outcome for t in b.tools] == ["ok"]
    assert b.segments[0] == ("private", 0, 2, None, None)
    assert sum(s[2] for s in b.segments) == b.prompt_tokens


def test_continuum_tools_have_their_times(tmp_path: Path) -> None:
    def tool(name: str, **more: Any) -> dict[str, Any]:
        return {"function": {"name": name}, **more}

    messages = [
        {"role": "system", "content": "help"},
        {"role": "assistant", "content": "look", "tool_calls": [tool("a", execution_time_seconds=2.5), tool("b")]},
        {"role": "tool", "content": [{"type": "text", "text": "seen"}]},
        {"role": "assistant", "content": "done"},
    ]
    path = tmp_path / "c.json"
    path.write_text(json.dumps([{"traj_id": "t", "messages": json.dumps(messages)}, {"traj_id": "u"}]))
    trace, report = import_trace("continuum", path)
    assert (report.records, report.used, len(report.rejected)) == (2, 1, 1)
    assert dict(report.notes) == {"a tool call without a time": 1}
    first, second = trace.workflows[0].calls
    assert [(t.name, t.start, t.duration) for t in second.tools] == [("a", 0, 2.5), ("b", 2.5, 0)]
    assert second.delay == 2.5
    assert second.prompt[: len(first.prompt) + len(first.output)] == first.prompt + first.output


def test_trajectories_are_calls_of_one_agent(tmp_path: Path) -> None:
    def said(text: str, at: int | None) -> dict[str, Any]:
        return {"role": "assistant", "content": text, "extra": {"response": {"created": at}}}

    good = {
        "instance_id": "i",
        "messages": [
            {"role": "system", "content": "s"},
            said("x" * 40, 100),
            {"role": "user", "content": "o"},
            said("y", 110),
        ],
    }
    path = lines(tmp_path / "t.jsonl", good, good, {"instance_id": "k", "messages": []}, "[]")
    trace, report = import_trace("mini-swe-agent-trajectories", path)
    assert (report.records, report.used, len(report.rejected)) == (4, 1, 3)
    first, second = trace.workflows[0].calls
    assert second.prompt[: len(first.prompt) + 1] == first.prompt + first.output
    assert 7 < second.delay < 8


def test_bfcl_needs_an_answer_to_each_turn(tmp_path: Path) -> None:
    for folder in ("possible_answer", "multi_turn_func_doc"):
        (tmp_path / folder).mkdir()
    (tmp_path / "multi_turn_func_doc" / "math_api.json").write_text("d" * 400)
    entries = [
        {"id": name, "question": [[{"role": "user", "content": "add them"}]], "involved_classes": [api]}
        for name, api in (("a", "MathAPI"), ("b", "MathAPI"), ("c", "TravelAPI"))
    ]
    lines(tmp_path / "BFCL_v4_multi_turn_base.json", *entries)
    answers = [{"id": name, "ground_truth": [["add(a=1,b=2)", "sub(a=1)"]]} for name in ("a", "c")]
    lines(tmp_path / "possible_answer" / "BFCL_v4_multi_turn_base.json", *answers)
    trace, report = import_trace("bfcl", tmp_path)
    assert (report.records, report.used, len(report.rejected)) == (3, 1, 2)
    calls = trace.workflows[0].calls
    assert [c.prompt_tokens for c in calls] == [102, 102 + 3 + 30, 102 + 3 + 30 + 2 + 30]
    assert [t.name for c in calls for t in c.tools] == ["add", "sub"]


@pytest.mark.parametrize("format", sorted(IMPORTERS))
def test_files_that_are_not_there_are_named(format: str, tmp_path: Path) -> None:
    with pytest.raises((TraceError, OSError), match="nothing-here"):
        import_trace(format, tmp_path / "nothing-here")


@pytest.mark.parametrize(
    "format", ["kv-cache-tester", "mini-swe-agent-steps", "mini-swe-agent-trajectories", "mooncake"]
)
def test_refusing_stops_at_the_first_broken_record(format: str, tmp_path: Path) -> None:
    path = lines(tmp_path / "t.jsonl", {"nothing": 1})
    with pytest.raises(TraceError, match="line 1"):
        import_trace(format, path, on_error="refuse")
    make: Callable[[], Imported] = lambda: import_trace(format, path)  # noqa: E731
    assert make().report.used == 0
    assert len(make().report.rejected) == 1


def test_unknown_formats_and_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no trace format 'x'"):
        import_trace("x", tmp_path)
    with pytest.raises(UsageError, match="on_error"):
        import_trace("mooncake", tmp_path, on_error="maybe")
