"""A recording of a run is a trace with its token ids, order, delays and tools."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict

import pytest

from agentflow import Agent, AgentGraph, ScriptedEngine, shared, tool, tool_call
from agentflow.bench.traces.jsonl import read_trace
from agentflow.bench.traces.model import Trace, TraceCall, TraceTool
from agentflow.bench.traces.record import TraceRecorder, recording
from agentflow.bench.traces.spans import SpanTokens
from agentflow.engine.base import Call, Coordinates, Segment
from agentflow.errors import EngineClosed, ScriptError, TraceError
from agentflow.events import (
    AgentEnded,
    Event,
    StateSuperseded,
    ToolEnded,
    ToolStarted,
    WorkflowEnded,
    WorkflowStarted,
)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Scene:
    """A recorder on a scripted engine whose calls take a second each of a clock of our own."""

    def __init__(self) -> None:
        self.clock = Clock()

        def answer(call: Call) -> str:
            self.clock.now += 1
            return f"answer {call.request_id}"

        self.engine = ScriptedEngine(answer)
        self.recorder = TraceRecorder(self.engine, clock=self.clock)

    def call(self, request: str, text: str, **at: Any) -> None:
        ids = self.engine.tokenizer.encode(text)
        self.recorder.generate(Call(token_ids=ids, at=Coordinates(workflow="w", **at), request_id=request))

    def tell(self, kind: type[Event], **fields: Any) -> None:
        self.recorder.emit(kind(workflow="w", time=self.clock.now, **fields))

    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @property
    def calls(self) -> dict[str, TraceCall]:
        trace = self.recorder.trace()
        return {c.id: c for w in trace.workflows for c in w.calls}


def test_a_chain_with_tools() -> None:
    scene = Scene()
    scene.tell(WorkflowStarted, graph="g", tenant="t")
    scene.wait(2)
    scene.call("one", "a b", agent="planner")
    scene.tell(AgentEnded, agent="planner", next=("coder", "tester"))
    scene.wait(0.5)
    scene.tell(ToolStarted, agent="planner", tool="search", call_id="x")
    scene.wait(3)
    scene.tell(ToolEnded, agent="planner", tool="search", call_id="x", duration=3.0, outcome="error")
    scene.wait(0.25)
    scene.call("two", "a b c", agent="coder")
    scene.tell(StateSuperseded, request="one")
    scene.tell(WorkflowEnded, outcome="limit")
    trace = scene.recorder.trace()
    (flow,) = trace.workflows
    assert (flow.id, flow.graph, flow.tenant, flow.outcome, flow.arrival) == ("w", "g", "t", "limit", 0.0)
    one, two = flow.calls
    assert (one.wait_for, one.delay, one.tools, one.superseded) == ((), 2.0, (), True)
    assert (two.wait_for, two.delay, two.superseded) == (("one",), 3.75, False)
    assert two.tools == (TraceTool(name="search", start=0.5, duration=3.0, outcome="error"),)
    assert trace.edges == {"planner": ("coder", "tester")}
    assert trace.meta["missing"] == {}


def overlapping(scene: Scene, *calls: tuple[str, dict[str, Any], float, float]) -> dict[str, tuple[str, ...]]:
    """Record calls that start and end at given times, and say what each waited for."""
    for request, at, start, end in sorted(calls, key=lambda c: c[3]):
        ids = scene.engine.tokenizer.encode(request)
        call = Call(token_ids=ids, at=Coordinates(workflow="w", **at), request_id=request)
        scene.clock.now = end - 1
        completion = scene.engine.generate(call)
        scene.recorder._note(call, completion, start)
    return {k: c.wait_for for k, c in scene.calls.items()}


def test_a_join_waits_for_every_branch_and_a_branch_for_itself() -> None:
    waits = overlapping(
        Scene(),
        ("plan", {"agent": "p"}, 0, 1),
        ("a1", {"agent": "s", "branch": "a"}, 1, 2),
        ("b1", {"agent": "s", "branch": "b"}, 1, 4),
        ("a2", {"agent": "s", "branch": "a"}, 2, 3),
        ("b2", {"agent": "s", "branch": "b"}, 4.5, 5.5),
        ("join", {"agent": "j"}, 6, 7),
        ("end", {"agent": "p"}, 8, 9),
    )
    assert waits == {
        "plan": (),
        "a1": ("plan",),
        "b1": ("plan",),
        "a2": ("a1",),
        "b2": ("b1",),
        "join": ("a2", "b2"),
        "end": ("join",),
    }


def test_agents_side_by_side_without_branches_are_joined_too() -> None:
    waits = overlapping(Scene(), ("x", {"agent": "x"}, 0, 2), ("y", {"agent": "y"}, 0, 3), ("z", {"agent": "z"}, 3, 4))
    assert waits == {"x": (), "y": (), "z": ("x", "y")}


def test_tools_go_to_the_call_that_waited_for_them() -> None:
    scene = Scene()
    overlapping(
        scene,
        ("a1", {"agent": "a", "branch": "a"}, 0, 1),
        ("b1", {"agent": "b", "branch": "b"}, 0, 1),
        ("b2", {"agent": "b", "branch": "b"}, 4, 5),
        ("a2", {"agent": "a", "branch": "a"}, 5, 6),
    )
    for event in (
        ToolStarted(workflow="w", time=1.0, agent="a", tool="slow", call_id="1"),
        ToolEnded(workflow="w", time=3.0, agent="a", tool="slow", call_id="1", duration=2.0),
        ToolStarted(workflow="w", time=7.0, agent="a", tool="late", call_id="2"),
        ToolEnded(workflow="w", time=8.0, agent="a", tool="late", call_id="2", duration=1.0),
        ToolStarted(workflow="w", time=9.0, agent="a", tool="hung", call_id="3"),
    ):
        scene.recorder.emit(event)
    assert [t.name for t in scene.calls["a2"].tools] == ["slow"]
    assert scene.calls["b2"].tools == ()
    assert scene.recorder.trace().meta["missing"] == {"tools_left_over": 1, "tools_unfinished": 1}


def test_token_ids_and_segments_are_kept() -> None:
    scene = Scene()
    ids = scene.engine.tokenizer.encode("you plan . task : fly")
    call = Call(
        token_ids=ids,
        segments=(Segment("private", 0, 3), Segment("shared", 3, len(ids) - 3, "task", None)),
        request_id="r",
    )
    completion = scene.recorder.generate(call)
    trace = scene.recorder.trace()
    (flow,) = trace.workflows
    assert flow.id == "r"
    assert flow.calls[0].segments == (("private", 0, 3, None, None), ("shared", 3, len(ids) - 3, "task", None))
    made = SpanTokens(trace)
    assert made.ids(flow.calls[0].prompt) == ids
    assert tuple(made.ids(flow.calls[0].output)) == completion.token_ids


def one(engine: TraceRecorder, call: Call, how: str) -> str:
    async def astream() -> str:
        return "".join([c.text async for c in engine.astream(call)])

    if how == "generate":
        return engine.generate(call).text
    if how == "agenerate":
        return asyncio.run(engine.agenerate(call)).text
    return asyncio.run(astream()) if how == "astream" else "".join(c.text for c in engine.stream(call))


@pytest.mark.parametrize("how", ["generate", "agenerate", "stream", "astream"])
def test_every_way_to_call_is_recorded_and_passed_on(how: str) -> None:
    engine = ScriptedEngine(["hello there, this is long enough for two pieces", ValueError("broken")])
    recorder = TraceRecorder(engine)
    call = Call(token_ids=engine.tokenizer.encode("x"))
    assert one(recorder, call, how).startswith("hello there")
    with pytest.raises(ValueError, match="broken"):
        one(recorder, call, how)
    trace = recorder.trace()
    assert trace.calls == 1
    assert trace.meta["missing"] == {"calls_without_answer": 1}


async def test_streams_left_early_are_closed_in_the_engine_below() -> None:
    engine = ScriptedEngine(["one two three four five six seven eight nine ten eleven twelve"] * 2)
    recorder = TraceRecorder(engine)
    ids = engine.tokenizer.encode("x")
    stream = recorder.astream(Call(token_ids=ids, request_id="a"))
    await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    for _ in recorder.stream(Call(token_ids=ids, request_id="b")):
        break
    assert list(engine.aborted) == ["a", "b"]
    assert recorder.trace().meta["missing"] == {"calls_without_answer": 2}


def test_the_recorder_is_the_engine_it_wraps_in_all_else() -> None:
    engine = ScriptedEngine(["x"])
    recorder = TraceRecorder(engine)
    assert (recorder.model, recorder.context_length) == (engine.model, engine.context_length)
    assert recorder.tokenizer is engine.tokenizer
    assert recorder.calls is engine.calls  # what a particular engine offers beyond the protocol
    assert not hasattr(recorder, "_no_such_thing")
    with pytest.raises(ScriptError, match="left over"):
        recorder.close()
    with pytest.raises(EngineClosed):
        recorder.generate(Call(token_ids=[1]))


def test_a_recording_is_bounded() -> None:
    engine = ScriptedEngine(lambda _: "x")
    recorder = TraceRecorder(engine, max_calls=2)
    for _ in range(5):
        recorder.generate(Call(token_ids=engine.tokenizer.encode("x"), at=Coordinates(workflow="w")))
    for _ in range(40):
        recorder.emit(AgentEnded(workflow="w", agent="a"))
    trace = recorder.trace()
    assert trace.calls == 2
    assert trace.meta["missing"] == {"calls_over_limit": 3, "events_over_limit": 8}


class State(TypedDict, total=False):
    task: str
    plan: str
    code: str


@tool
def look_up(word: str) -> str:
    """Look a word up."""
    return f"{word}: a thing"


def record_graph(path: Path) -> tuple[Trace, list[Call]]:
    graph = AgentGraph(State)
    graph.add_agent(
        Agent("planner", "You plan.", tools=[look_up]), prompt=lambda s: [shared("task", s["task"])], writes="plan"
    )
    graph.add_agent(Agent("coder", "You code."), prompt=lambda s: [shared("plan", s["plan"])], writes="code")
    graph.add_edge("__start__", "planner")
    graph.add_edge("planner", "coder")
    engine = ScriptedEngine({"planner": [[tool_call("look_up", word="sky")], "fly"], "coder": ["import wings"]})
    with recording(engine, path, name="wings") as recorded:
        result = graph.compile(engine=recorded).run({"task": "fly there"})
    assert result.outcome == "done"
    return read_trace(path), list(engine.calls)


def test_a_graph_is_recorded_and_read_back(tmp_path: Path) -> None:
    trace, sent = record_graph(tmp_path / "run.jsonl.gz")
    (flow,) = trace.workflows
    assert trace.name == "wings"
    assert flow.outcome == "done"
    assert [c.agent for c in flow.calls] == ["planner", "planner", "coder"]
    assert [c.wait_for for c in flow.calls] == [(), (flow.calls[0].id,), (flow.calls[1].id,)]
    assert [t.name for t in flow.calls[1].tools] == ["look_up"]
    assert flow.calls[1].delay >= flow.calls[1].tools[0].duration
    assert flow.calls[0].prompt == flow.calls[1].prompt[: len(flow.calls[0].prompt)]
    made = SpanTokens(trace)
    assert [made.ids(c.prompt) for c in flow.calls] == [list(c.token_ids) for c in sent]
    assert any(kind == "shared" and slot == "plan" for kind, _, _, slot, _ in flow.calls[2].segments)


def test_a_failed_run_leaves_its_recording(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    engine = ScriptedEngine(["x"])

    def fail() -> None:
        with recording(engine, path) as recorded:
            recorded.generate(Call(token_ids=engine.tokenizer.encode("x")))
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        fail()
    assert read_trace(path).calls == 1


def test_a_recording_without_a_folder_fails_before_the_run(tmp_path: Path) -> None:
    ran: list[Callable[[], None]] = []
    with pytest.raises(TraceError, match="nothing was run"), recording(ScriptedEngine([]), tmp_path / "no" / "t"):
        ran.append(lambda: None)
    assert not ran
