"""The executor: every call is answered, in order, whatever the others do."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.tools import StructuredTool, ToolException
from langchain_core.tools import tool as langchain_tool

from agentflow.errors import EngineDied, ToolFailure, UsageError
from agentflow.tools import TOOL_ERROR_KINDS, ToolExecutor, ToolOptions, Transient, error_kind, tool
from agentflow.tools.threads import abandoned

Runner = Callable[..., Any]


@pytest.fixture(params=["sync", "async"])
def run(request: pytest.FixtureRequest) -> Runner:
    """Runs calls by the sync twin on a thread without a loop, or by the async twin on a fresh loop."""

    def sync(executor: ToolExecutor, calls: Any, **kwargs: Any) -> list[Any]:
        return executor.run(calls, **kwargs)

    def by_loop(executor: ToolExecutor, calls: Any, **kwargs: Any) -> list[Any]:
        return asyncio.run(executor.arun(calls, **kwargs))

    return sync if request.param == "sync" else by_loop


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """An event on which hung tools wait; it opens when the test ends, so that no thread outlives it for long."""
    event = threading.Event()
    yield event
    event.set()


def message(*calls: tuple[str, dict[str, Any]]) -> AIMessage:
    return AIMessage(content="", tool_calls=[{"name": n, "args": a, "id": f"id{i}"} for i, (n, a) in enumerate(calls)])


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool
async def double(x: int) -> int:
    """Twice x."""
    await asyncio.sleep(0)
    return 2 * x


def test_sync_and_async_tools_answer_in_call_order(run: Runner) -> None:
    answers = run(ToolExecutor([add, double]), message(("double", {"x": 4}), ("add", {"a": 1, "b": 2})))
    assert [(a.content, a.tool_call_id, a.name, a.status) for a in answers] == [
        ("8", "id0", "double", "success"),
        ("3", "id1", "add", "success"),
    ]


def test_no_calls_give_no_answers(run: Runner) -> None:
    assert run(ToolExecutor([add]), AIMessage(content="hello")) == []


def test_unknown_miscalled_broken_and_raising_tools_are_answered_beside_a_good_one(run: Runner) -> None:
    @tool
    def fails() -> str:
        """Fail."""
        raise ZeroDivisionError("by zero")

    asked = message(
        ("nothing", {}), ("add", {"a": "x"}), ("fails", {}), ("add", {"a": 1, "b": 2}), ("add", {"a": 5, "b": 5})
    )
    asked.invalid_tool_calls = [
        {"name": "add", "args": '{"a": 1,', "id": "bad", "error": "cut", "type": "invalid_tool_call"}
    ]
    answers = run(ToolExecutor([add, fails]), asked)

    assert [error_kind(a) for a in answers] == ["unknown_tool", "bad_arguments", "error", None, None, "bad_json"]
    assert [a.tool_call_id for a in answers] == ["id0", "id1", "id2", "id3", "id4", "bad"]
    assert [a.status for a in answers] == ["error", "error", "error", "success", "success", "error"]
    assert "add, fails" in answers[0].content
    assert "a: " in answers[1].content
    assert "b: Field required" in answers[1].content
    assert "ZeroDivisionError: by zero" in answers[2].content
    assert (answers[3].content, answers[4].content) == ("3", "10")
    assert '{"a": 1,' in answers[5].content


def test_calls_without_ids_or_names_are_answered(run: Runner) -> None:
    asked = AIMessage(
        content="",
        tool_calls=[{"name": "add", "args": {"a": 1, "b": 1}, "id": None}],
        invalid_tool_calls=[{"name": None, "args": None, "id": None, "error": None, "type": "invalid_tool_call"}],
    )
    answers = run(ToolExecutor([add]), asked)
    assert [a.content for a in answers[:1]] == ["2"]
    assert error_kind(answers[1]) == "bad_json"
    assert len({a.tool_call_id for a in answers}) == 2


@pytest.mark.parametrize("kind", ["thread", "loop"])
def test_a_hung_tool_times_out_and_its_fast_sibling_is_kept(run: Runner, gate: threading.Event, kind: str) -> None:
    @tool(timeout=0.05)
    def hung_thread() -> str:
        """Hang."""
        gate.wait()
        return "late"

    @tool(timeout=0.05)
    async def hung_loop() -> str:
        """Hang."""
        await asyncio.Event().wait()
        return "late"

    answers = run(ToolExecutor([hung_thread, hung_loop, add]), message((f"hung_{kind}", {}), ("add", {"a": 1, "b": 2})))
    assert [error_kind(a) for a in answers] == ["timeout", None]
    assert "0.05 seconds" in answers[0].content
    assert answers[1].content == "3"


def test_the_executors_time_limit_holds_for_tools_without_one(run: Runner, gate: threading.Event) -> None:
    @langchain_tool
    def foreign() -> str:
        """A LangChain tool."""
        gate.wait()
        return "late"

    assert error_kind(run(ToolExecutor([foreign], timeout=0.05), message(("foreign", {})))[0]) == "timeout"
    options = {"foreign": ToolOptions(timeout=0.05)}
    assert error_kind(run(ToolExecutor([foreign], options=options), message(("foreign", {})))[0]) == "timeout"


@pytest.mark.parametrize("is_async", [False, True])
async def test_an_async_tool_that_ignores_cancelling_does_not_hold_the_answers(
    is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentflow.tools._call.GRACE", 0.05)
    stop = threading.Event()

    @tool(timeout=0.05)
    async def stubborn() -> str:
        """Never give up."""
        while not stop.is_set():
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                ignored.append(1)
        return "late"

    ignored: list[int] = []
    executor, asked = ToolExecutor([stubborn, add]), message(("stubborn", {}), ("add", {"a": 1, "b": 2}))
    answers = await executor.arun(asked) if is_async else executor.run(asked)
    assert ignored
    assert [error_kind(a) for a in answers] == ["timeout", None]
    stop.set()


def test_timed_out_threads_are_counted_and_bounded(run: Runner, gate: threading.Event) -> None:
    before = abandoned()
    released = threading.Event()

    @tool(timeout=0.05)
    def hung() -> str:
        """Hang."""
        gate.wait()
        released.set()
        return "late"

    executor = ToolExecutor([hung, double], max_abandoned=before + 2)
    assert [error_kind(a) for a in run(executor, message(("hung", {}), ("hung", {})))] == ["timeout", "timeout"]
    assert abandoned() == before + 2
    answers = run(executor, message(("hung", {}), ("double", {"x": 1})))
    assert [error_kind(a) for a in answers] == ["too_many", None]
    gate.set()
    assert released.wait(10)
    deadline = threading.Event()
    for _ in range(1000):
        if abandoned() == before:
            break
        deadline.wait(0.01)
    assert abandoned() == before


def test_a_timed_out_thread_does_not_keep_the_interpreter_alive() -> None:
    code = (
        "import time\n"
        "from agentflow.tools import tool, ToolExecutor\n"
        "@tool(timeout=0.05)\n"
        "def hang() -> str:\n"
        "    'Hang.'\n"
        "    time.sleep(1000)\n"
        "call = {'name': 'hang', 'args': {}, 'id': '1', 'type': 'tool_call'}\n"
        "print(ToolExecutor([hang]).run([call])[0].content)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "Error (timeout)" in done.stdout
    assert done.stderr == ""


async def test_a_sync_tool_never_blocks_the_event_loop() -> None:
    beats_enough = threading.Event()

    @tool(timeout=30)
    def blocks() -> str:
        """Block until the loop has beaten a hundred times."""
        return "freed" if beats_enough.wait(20) else "the loop stood still"

    async def heart() -> None:
        for _ in range(100):
            await asyncio.sleep(0.001)
        beats_enough.set()

    beating = asyncio.create_task(heart())
    answers = await ToolExecutor([blocks]).arun(message(("blocks", {}), ("blocks", {})))
    await beating
    assert [a.content for a in answers] == ["freed", "freed"]


@pytest.mark.parametrize("is_async", [False, True])
def test_transient_errors_are_retried_up_to_the_limit(run: Runner, is_async: bool) -> None:
    tries: list[int] = []

    def flaky(succeed_at: int) -> str:
        """Succeed at last."""
        tries.append(1)
        if len(tries) < succeed_at:
            raise Transient("not yet")
        return f"after {len(tries)}"

    async def aflaky(succeed_at: int) -> str:
        """Succeed at last."""
        return flaky(succeed_at)

    made = tool(name="flaky", retries=2, retry_wait=0.0)(aflaky if is_async else flaky)
    assert run(ToolExecutor([made]), message(("flaky", {"succeed_at": 3})))[0].content == "after 3"
    tries.clear()
    answer = run(ToolExecutor([made]), message(("flaky", {"succeed_at": 9})))[0]
    assert len(tries) == 3
    assert error_kind(answer) == "error"
    assert "not yet" in answer.content


def test_other_errors_are_not_retried(run: Runner) -> None:
    tries: list[int] = []

    @tool(retries=5, retry_wait=0.0)
    def broken() -> str:
        """Raise."""
        tries.append(1)
        raise ValueError("no")

    @tool(retries=5, retry_wait=0.0, retry_on=ValueError)
    def declared() -> str:
        """Raise."""
        tries.append(1)
        raise ValueError("no")

    run(ToolExecutor([broken]), message(("broken", {})))
    assert len(tries) == 1
    run(ToolExecutor([declared]), message(("declared", {})))
    assert len(tries) == 1 + 6


@pytest.mark.parametrize(("pure", "tries"), [(False, 1), (True, 3)])
def test_a_time_limit_is_retried_only_for_pure_tools(run: Runner, pure: bool, tries: int) -> None:
    seen: list[int] = []

    @tool(timeout=0.02, retries=2, retry_wait=0.0, pure=pure)
    async def slow() -> str:
        """Hang."""
        seen.append(1)
        await asyncio.Event().wait()
        return "late"

    assert error_kind(run(ToolExecutor([slow]), message(("slow", {})))[0]) == "timeout"
    assert len(seen) == tries


def test_equal_calls_of_a_pure_tool_run_once(run: Runner) -> None:
    seen: list[str] = []

    @tool(pure=True)
    def look(what: str) -> str:
        """Look."""
        seen.append(what)
        return what.upper()

    asked = message(("look", {"what": "a"}), ("look", {"what": "b"}), ("look", {"what": "a"}))
    answers = run(ToolExecutor([look]), asked)
    assert [(a.content, a.tool_call_id) for a in answers] == [("A", "id0"), ("B", "id1"), ("A", "id2")]
    assert sorted(seen) == ["a", "b"]


class Meter:
    """How many calls are inside at once, and at most were."""

    def __init__(self) -> None:
        self.inside = 0
        self.most = 0
        self.lock = threading.Lock()

    def __enter__(self) -> None:
        with self.lock:
            self.inside += 1
            self.most = max(self.most, self.inside)

    def __exit__(self, *exc: object) -> None:
        with self.lock:
            self.inside -= 1


@pytest.mark.parametrize("is_async", [False, True])
def test_concurrency_caps_hold_and_are_reached(run: Runner, is_async: bool) -> None:
    meter, both = Meter(), threading.Barrier(2, timeout=20)

    def work() -> str:
        """Work; two at a time meet at the barrier, so fewer than two would break it."""
        with meter:
            both.wait()
        return "ok"

    together: list[asyncio.Event] = []

    async def awork() -> str:
        """Work; two at a time meet."""
        with meter:
            if together:
                together.pop().set()
            else:
                together.append(event := asyncio.Event())
                await asyncio.wait_for(event.wait(), 20)
        return "ok"

    capped = tool(name="work", concurrency=2)(awork if is_async else work)
    free = tool(name="work")(awork if is_async else work)
    for executor in (ToolExecutor([capped]), ToolExecutor([free], concurrency=2)):
        meter.most = 0
        answers = run(executor, message(*[("work", {})] * 10))
        assert [a.content for a in answers] == ["ok"] * 10
        assert meter.most == 2


def test_a_tools_cap_holds_across_executors_threads_and_loops() -> None:
    meter = Meter()

    @tool(concurrency=1)
    def single() -> str:
        """Alone."""
        with meter:
            threading.Event().wait(0.002)
        return "ok"

    def worker(executor: ToolExecutor, is_async: bool) -> None:
        asked = message(*[("single", {})] * 5)
        out = asyncio.run(executor.arun(asked)) if is_async else executor.run(asked)
        results.extend(a.content for a in out)

    results: list[str] = []
    threads = [threading.Thread(target=worker, args=(ToolExecutor([single]), i % 2 == 0)) for i in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(30)
    assert results == ["ok"] * 30
    assert meter.most == 1


@pytest.mark.parametrize("is_async", [False, True])
def test_a_tool_that_runs_its_own_executor_does_not_wait_for_itself(run: Runner, is_async: bool) -> None:
    def nested(depth: int) -> str:
        """Call yourself."""
        return executor.run(message(("nested", {"depth": depth - 1})))[0].content + "." if depth else "end"

    async def anested(depth: int) -> str:
        """Call yourself, blocking, from async code."""
        return nested(depth)

    executor = ToolExecutor([tool(name="nested", concurrency=1)(anested if is_async else nested)], concurrency=1)
    assert run(executor, message(("nested", {"depth": 3})))[0].content == "end..."


def test_500_calls_in_one_message(run: Runner) -> None:
    asked = message(*[("add" if i % 2 else "double", {"a": i, "b": i, "x": i}) for i in range(500)])
    answers = run(ToolExecutor([add, double]), asked)
    assert [a.content for a in answers] == [str(2 * i) for i in range(500)]


def test_calls_beyond_max_calls_are_answered_but_not_run(run: Runner) -> None:
    answers = run(ToolExecutor([add], max_calls=2), message(*[("add", {"a": 1, "b": 1})] * 4))
    assert [error_kind(a) for a in answers] == [None, None, "too_many", "too_many"]


def test_long_output_keeps_head_and_tail(run: Runner) -> None:
    @tool
    def speak() -> str:
        """Speak."""
        return "H" * 500 + "x" * 5000 + "T" * 500

    content = run(ToolExecutor([speak], max_output=1000), message(("speak", {})))[0].content
    assert content.startswith("H" * 500)
    assert content.endswith("T" * 500)
    assert "5000 characters left out" in content
    short = speak.with_options(max_output=100)
    assert len(run(ToolExecutor([short], max_output=1000), message(("speak", {})))[0].content) < 150


def test_a_tools_own_cancelling_and_exit_are_answered(run: Runner) -> None:
    @tool
    async def gives_up() -> str:
        """Cancel yourself."""
        raise asyncio.CancelledError

    @tool
    def exits() -> str:
        """Exit."""
        sys.exit(3)

    @tool
    async def aexits() -> str:
        """Exit."""
        sys.exit(3)

    answers = run(ToolExecutor([gives_up, exits, aexits]), message(("gives_up", {}), ("exits", {}), ("aexits", {})))
    assert [error_kind(a) for a in answers] == ["cancelled", "error", "error"]


def test_engine_and_usage_errors_are_raised_after_siblings_finished(run: Runner) -> None:
    done: list[int] = []

    @tool
    def subagent() -> str:
        """Call an engine that died."""
        raise EngineDied("gone")

    @tool
    async def sibling() -> str:
        """Finish."""
        for _ in range(20):
            await asyncio.sleep(0.001)
        done.append(1)
        return "ok"

    with pytest.raises(EngineDied, match="gone"):
        run(ToolExecutor([subagent, sibling]), message(("subagent", {}), ("sibling", {})))
    assert done == [1]


def test_errors_named_in_raises_are_raised(run: Runner) -> None:
    @tool
    def fails() -> str:
        """Fail."""
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run(ToolExecutor([fails], raises=(KeyError,)), message(("fails", {})))


def test_a_tool_failure_keeps_its_kind_and_langchains_handlers_work(run: Runner) -> None:
    @tool
    def failing() -> str:
        """Fail in a known way."""
        raise ToolFailure("page 9 of 3", kind="bad_arguments", tool="failing")

    def handled() -> str:
        """Fail with LangChain's own error handling."""
        raise ToolException("told")

    foreign = StructuredTool.from_function(handled, handle_tool_error=True)
    answers = run(ToolExecutor([failing, foreign]), message(("failing", {}), ("handled", {})))
    assert (error_kind(answers[0]), answers[0].content) == ("bad_arguments", "Error (bad_arguments): page 9 of 3")
    assert (error_kind(answers[1]), answers[1].status, answers[1].content) == (None, "error", "told")


def test_a_validation_error_inside_a_tool_is_an_error_of_the_tool(run: Runner) -> None:
    from pydantic import BaseModel

    class Row(BaseModel):
        n: int

    @tool
    def parse() -> str:
        """Parse bad data."""
        return str(Row(n="x"))  # type: ignore[arg-type]

    assert error_kind(run(ToolExecutor([parse]), message(("parse", {})))[0]) == "error"


async def test_cancelling_stops_async_tools_and_leaves_threads_behind(gate: threading.Event) -> None:
    started, cleaned = asyncio.Event(), []
    loop = asyncio.get_running_loop()

    @tool
    async def waits() -> str:
        """Wait."""
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.append(1)
        return "late"

    @tool
    def hangs() -> str:
        """Hang."""
        loop.call_soon_threadsafe(started.set)
        gate.wait()
        return "late"

    before = abandoned()
    running = asyncio.create_task(ToolExecutor([waits, hangs]).arun(message(("waits", {}), ("hangs", {}))))
    await asyncio.wait_for(started.wait(), 20)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert cleaned == [1]
    assert abandoned() == before + 1
    assert len(asyncio.all_tasks()) == 1


async def test_cancelled_waiters_give_their_slots_back() -> None:
    opened = asyncio.Event()

    @tool(concurrency=1)
    async def one() -> str:
        """Wait for the gate."""
        await opened.wait()
        return "ok"

    executor = ToolExecutor([one])
    first = asyncio.create_task(executor.arun(message(("one", {}))))
    await asyncio.sleep(0.01)
    waiting = asyncio.create_task(executor.arun(message(*[("one", {})] * 5)))
    await asyncio.sleep(0.01)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    opened.set()
    assert (await asyncio.wait_for(first, 20))[0].content == "ok"
    assert (await asyncio.wait_for(executor.arun(message(("one", {}))), 20))[0].content == "ok"


def test_context_variables_reach_sync_tools(run: Runner) -> None:
    from contextvars import ContextVar

    var: ContextVar[str] = ContextVar("var", default="unset")

    @tool
    def read() -> str:
        """Read."""
        return var.get()

    @tool
    async def aread() -> str:
        """Read."""
        return var.get()

    token = var.set("mine")
    answers = run(ToolExecutor([read, aread]), message(("read", {}), ("aread", {})))
    var.reset(token)
    assert [a.content for a in answers] == ["mine", "mine"]


def test_the_sync_twin_works_inside_a_running_loop() -> None:
    async def main() -> list[Any]:
        return ToolExecutor([add, double]).run(message(("add", {"a": 1, "b": 2}), ("double", {"x": 2})))

    assert [a.content for a in asyncio.run(main())] == ["3", "4"]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(["add", "double", "fails", "nothing", "bad"]), max_size=30))
def test_every_call_is_answered_once_in_order(names: list[str]) -> None:
    @tool
    def fails(i: int) -> str:
        """Fail."""
        raise ValueError(str(i))

    asked = message(
        *[("add", {"a": "no"}) if n == "bad" else (n, {"a": i, "b": 0, "x": i, "i": i}) for i, n in enumerate(names)]
    )
    expected = {"add": None, "double": None, "fails": "error", "nothing": "unknown_tool", "bad": "bad_arguments"}
    answers = asyncio.run(ToolExecutor([add, double, fails], concurrency=3).arun(asked))
    assert [a.tool_call_id for a in answers] == [f"id{i}" for i in range(len(names))]
    assert [error_kind(a) for a in answers] == [expected[n] for n in names]
    assert all(isinstance(a, ToolMessage) for a in answers)


def test_wrong_set_up_is_refused() -> None:
    with pytest.raises(UsageError, match="unique"):
        ToolExecutor([add, add])
    with pytest.raises(UsageError, match="options are given"):
        ToolExecutor([add], options={"sub": ToolOptions()})
    for bad in ({"timeout": 0}, {"concurrency": 0}, {"max_output": 0}):
        with pytest.raises(UsageError):
            ToolExecutor([add], **bad)  # type: ignore[arg-type]


def test_error_kinds_are_closed() -> None:
    assert len(set(TOOL_ERROR_KINDS)) == len(TOOL_ERROR_KINDS) == 7
    assert error_kind(ToolMessage("x", tool_call_id="1", additional_kwargs={"agentflow_error_kind": "other"})) is None
