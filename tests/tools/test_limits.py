"""Time limits, retries and caps: each fires, and only then."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.messages import AIMessage
from langchain_core.tools import tool as langchain_tool

from agentflow.errors import UsageError
from agentflow.tools import ToolExecutor, ToolOptions, Transient, error_kind, tool
from agentflow.tools.threads import abandoned

Runner = Callable[..., Any]


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


@pytest.mark.parametrize("kind", ["thread", "loop"])
def test_a_tool_that_raises_an_interrupt_leaves_the_tools_of_other_runs_alone(kind: str) -> None:
    def interrupted(x: int) -> int:
        """Be interrupted."""
        raise KeyboardInterrupt

    async def interrupted_too(x: int) -> int:
        """Be interrupted."""
        raise KeyboardInterrupt

    bad = tool(interrupted if kind == "thread" else interrupted_too)
    with pytest.raises(KeyboardInterrupt):
        ToolExecutor([bad]).run(message((bad.name, {"x": 1})))
    assert ToolExecutor([add]).run(message(("add", {"a": 1, "b": 2})))[0].content == "3"


@pytest.mark.parametrize("options", [{"timeout": "5"}, {"retries": 1.5}, {"concurrency": "2"}, {"retries": None}])
def test_options_of_a_wrong_type_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(options))} must be"):
        ToolOptions(**options)
