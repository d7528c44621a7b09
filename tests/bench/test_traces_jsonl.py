"""The trace file: what goes in comes out, and what is broken is named."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentflow.bench.traces.generators import Plan, generate
from agentflow.bench.traces.jsonl import FORMAT, Skipped, TraceReader, TraceWriter, read_trace, write_trace
from agentflow.bench.traces.model import Span, Trace, TraceCall, TraceTool, TraceWorkflow
from agentflow.errors import TraceError, UsageError

names = st.text(max_size=8)
seconds = st.floats(min_value=0, max_value=1e9, allow_nan=False)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    pool = [Span(f"s{i}", draw(st.integers(0, 9))) for i in range(draw(st.integers(1, 12)))]
    content = st.lists(st.sampled_from(pool), max_size=9).map(tuple)
    workflows = []
    for w in range(draw(st.integers(0, 3))):
        calls: list[TraceCall] = []
        for c in range(draw(st.integers(0, 5))):
            earlier = [x.id for x in calls]
            grown = calls[-1].prompt + calls[-1].output if calls and draw(st.booleans()) else ()
            calls.append(
                TraceCall(
                    id=f"c{c}",
                    agent=draw(st.sampled_from(["a", "b", ""])),
                    prompt=grown + draw(content),
                    output=draw(content),
                    wait_for=tuple(draw(st.lists(st.sampled_from(earlier), max_size=2))) if earlier else (),
                    delay=draw(seconds),
                    tools=tuple(
                        TraceTool(name=n, start=a, duration=b, outcome=o)
                        for n, a, b, o in draw(st.lists(st.tuples(names, seconds, seconds, names), max_size=2))
                    ),
                    branch=draw(st.none() | names),
                    segments=tuple(
                        draw(
                            st.lists(
                                st.tuples(
                                    names, st.integers(0, 99), st.integers(0, 99), st.none() | names, st.none() | names
                                ),
                                max_size=3,
                            )
                        )
                    ),
                    superseded=draw(st.booleans()),
                )
            )
        workflows.append(
            TraceWorkflow(
                id=f"w{w}",
                calls=tuple(calls),
                arrival=draw(seconds),
                graph=draw(st.none() | names),
                tenant=draw(st.none() | names),
                outcome=draw(names),
            )
        )
    tokens = {
        s.id: tuple(draw(st.lists(st.integers(0, 2**31), min_size=s.tokens, max_size=s.tokens)))
        for s in draw(st.lists(st.sampled_from(pool), unique=True))
    }
    return Trace(
        name=draw(st.text()),
        workflows=tuple(workflows),
        edges={k: tuple(v) for k, v in draw(st.dictionaries(names, st.lists(names, max_size=3), max_size=3)).items()},
        tokens=tokens,
        meta=draw(st.dictionaries(st.text(), json_values, max_size=3)),
    )


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(trace=traces(), packed=st.booleans())
def test_what_is_written_is_read(tmp_path: Path, trace: Trace, packed: bool) -> None:
    path = tmp_path / ("t.jsonl.gz" if packed else "t.jsonl")
    write_trace(trace, path)
    assert read_trace(path) == trace


def test_generated_traces_survive_and_prompts_are_written_once(tmp_path: Path) -> None:
    trace = generate("swebench", Plan(workflows=20, rate=1.0))
    path = tmp_path / "t.jsonl"
    write_trace(trace, path)
    assert read_trace(path) == trace
    spans = sum(len(c.prompt) for w in trace.workflows for c in w.calls)
    written = sum(len(c["prompt"]) for line in path.read_text().splitlines()[1:] for c in json.loads(line)["calls"])
    assert written < spans / 5


def test_the_same_trace_gives_the_same_bytes(tmp_path: Path) -> None:
    trace = generate("hover", Plan(workflows=3))
    for name in ("a.jsonl.gz", "b.jsonl.gz"):
        write_trace(trace, tmp_path / name)
    assert (tmp_path / "a.jsonl.gz").read_bytes() == (tmp_path / "b.jsonl.gz").read_bytes()


def workflow(name: str, *spans: Span) -> TraceWorkflow:
    return TraceWorkflow(id=name, calls=(TraceCall(id="c", agent="a", prompt=spans, output=(Span(name + "o", 1),)),))


def test_token_ids_stand_on_the_first_line_that_uses_them(tmp_path: Path) -> None:
    span = Span("s", 2)
    path = tmp_path / "t.jsonl"
    trace = Trace(name="t", workflows=(workflow("a", span), workflow("b", span)), tokens={"s": (7, 8)})
    write_trace(trace, path)
    lines = [json.loads(x) for x in path.read_text().splitlines()]
    assert [x.get("tokens") for x in lines[1:]] == [{"s": [7, 8]}, None]


def broken(path: Path, number: int, line: str) -> None:
    """Replace a line, counted from 1, of a trace of five workflows."""
    trace = Trace(name="t", workflows=tuple(workflow(f"w{i}", Span(f"s{i}", 3)) for i in range(5)))
    write_trace(trace, path)
    lines = path.read_text().splitlines(keepends=True)
    lines[number - 1] = line
    path.write_text("".join(lines))


BROKEN = {
    "not JSON": '{"workflow": "w',
    "an object, not list": "[1]\n",
    "no field 'colour'": '{"workflow":"x","colour":1,"calls":[]}\n',
    "no workflow id": '{"calls":[]}\n',
    "calls must be a list": '{"workflow":"x"}\n',
    "a second workflow 'w0'": '{"workflow":"w0","calls":[]}\n',
    "numbers of spans": '{"workflow":"x","spans":[["s",1]],"calls":[{"id":"c","agent":"a","prompt":[1]}]}\n',
    "no field 'temperature'": '{"workflow":"x","calls":[{"id":"c","temperature":1}]}\n',
    "waits for ['d']": '{"workflow":"x","calls":[{"id":"c","agent":"a","prompt":[],"output":[],"wait_for":["d"]}]}\n',
    "delay must be seconds": '{"workflow":"x","calls":[{"id":"c","agent":"a","prompt":[],"output":[],"delay":-1}]}\n',
    "arrival must be seconds": '{"workflow":"x","arrival":NaN,"calls":[]}\n',
    "an earlier call": '{"workflow":"x","calls":[{"id":"c","agent":"a","like":[0,1],"prompt":[],"output":[]}]}\n',
    "3 tokens and 1 token ids": '{"workflow":"x","spans":[["z",3]],"tokens":{"z":[1]},"calls":[]}\n',
    "other token ids": '{"tokens":{"known":[2]}}\n',
}


@pytest.mark.parametrize("reason", BROKEN)
def test_a_broken_line_is_named_and_refused_or_skipped(tmp_path: Path, reason: str) -> None:
    path = tmp_path / "t.jsonl"
    broken(path, 4, BROKEN[reason])
    if reason == "other token ids":
        path.write_text(path.read_text().replace("\n", '\n{"tokens":{"known":[1]}}\n', 1))
    number = 5 if reason == "other token ids" else 4
    with pytest.raises(TraceError, match=f"line {number}: ") as raised:
        read_trace(path)
    assert reason in str(raised.value)
    skipped: list[Skipped] = []
    trace = read_trace(path, on_error="skip", skipped=skipped)
    assert [s.line for s in skipped] == [number]
    assert reason in skipped[0].reason
    last = ["w3", "w4"] if BROKEN[reason].endswith("\n") else ["w4"]  # without a line end it swallows its neighbour
    assert [w.id for w in trace.workflows] == ["w0", "w1", *last]


def test_bytes_that_are_no_text_are_one_broken_line(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    broken(path, 3, "?\n")
    path.write_bytes(path.read_bytes().replace(b"?\n", b'{"workflow":"\xff"}\n'))
    skipped: list[Skipped] = []
    assert len(read_trace(path, on_error="skip", skipped=skipped).workflows) == 4
    assert [s.line for s in skipped] == [3]


def test_a_packed_file_cut_short_keeps_what_came_before(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.gz"
    write_trace(generate("hover", Plan(workflows=300)), path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(TraceError, match="cut short"):
        read_trace(path)
    skipped: list[Skipped] = []
    kept = len(read_trace(path, on_error="skip", skipped=skipped).workflows)
    assert 50 < kept < 300
    assert skipped[-1].line > kept


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("", "not a header"),
        ("not json\n", "not a header"),
        ('{"workflow":"x","calls":[]}\n', "not a header"),
        (json.dumps({"format": FORMAT}) + "\n", "no version"),
        (json.dumps({"format": FORMAT, "version": 2}) + "\n", "version 2 of the format"),
        (json.dumps({"format": FORMAT, "version": 1, "edges": []}) + "\n", "not of the described form"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_even_when_lines_are_skipped(
    tmp_path: Path, header: str, message: str
) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(header)
    with pytest.raises(TraceError, match=message):
        read_trace(path, on_error="skip")


def test_files_that_are_not_there_or_not_packed(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no such file"):
        read_trace(tmp_path / "none.jsonl")
    plain = tmp_path / "t.jsonl.gz"
    plain.write_text("{}")
    with pytest.raises(TraceError, match="broken"):
        read_trace(plain)
    with pytest.raises(UsageError, match="on_error"):
        TraceReader(plain, on_error="ignore")  # type: ignore[arg-type]


def test_reading_goes_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    broken(path, 5, "broken\n")
    reader = iter(TraceReader(path))
    assert [next(reader).id for _ in range(3)] == ["w0", "w1", "w2"]
    with pytest.raises(TraceError, match="line 5"):
        next(reader)


def test_a_failed_writer_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("old")

    def fail() -> None:
        with TraceWriter(path, name="t") as writer:
            writer.write(workflow("w"))
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        fail()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_cannot_be_read_back_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    call = TraceCall(id="c", agent="a", prompt=(Span("s", 1), Span("s", 2)), output=())
    late = TraceCall(id="c", agent="a", prompt=(), output=(), wait_for=("d",))
    for calls, message in (((call,), "two lengths"), ((late,), "come not before"), ((late, late), "waits|two calls")):
        with pytest.raises(TraceError, match=message):
            write_trace(Trace(name="t", workflows=(TraceWorkflow(id="w", calls=calls),)), path)
    with pytest.raises(TraceError, match="JSON"):
        write_trace(Trace(name="t", workflows=(), meta={"x": float("nan")}), path)
    with pytest.raises(TraceError, match="JSON"):
        write_trace(Trace(name="t", workflows=(), meta={"x": object()}), path)
    assert list(tmp_path.iterdir()) == []


def test_packed_files_are_gzip(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.gz"
    write_trace(Trace(name="t", workflows=()), path)
    assert json.loads(gzip.decompress(path.read_bytes()))["format"] == FORMAT
