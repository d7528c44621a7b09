"""Events of tool calls, with the tool's own time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from agentflow.engine.base import Coordinates
from agentflow.engine.context import current, current_run, handled_tool_run
from agentflow.engine.scripted import ScriptedEngine
from agentflow.engine.workflow import WorkflowRun
from agentflow.events import ToolEnded, ToolStarted
from agentflow.tools import ToolExecutor, Transient, tool

Calls = list[Any]


def calls(*names: str) -> Calls:
    return [{"name": n, "args": {}, "id": f"id{i}", "type": "tool_call"} for i, n in enumerate(names)]


class Clock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(params=["sync", "async"])
def observed(request: pytest.FixtureRequest) -> Callable[[ToolExecutor, Calls], WorkflowRun]:
    """Runs calls as an agent named ``coder`` at step 7 and returns the workflow run that saw them."""

    def go(executor: ToolExecutor, asked: Calls) -> WorkflowRun:
        run = WorkflowRun(ScriptedEngine([]), "w1")
        tokens = current_run.set(run), current.set(Coordinates(workflow="w1", agent="coder", step=7))
        try:
            if request.param == "sync":
                executor.run(asked)
            else:
                asyncio.run(executor.arun(asked))
        finally:
            current_run.reset(tokens[0])
            current.reset(tokens[1])
        return run

    return go


def ended(run: WorkflowRun) -> dict[str, ToolEnded]:
    return {e.call_id: e for e in run.events if isinstance(e, ToolEnded)}


def test_a_call_emits_started_and_ended_with_its_coordinates(observed: Any) -> None:
    clock = Clock()

    @tool
    def work() -> str:
        """Work for three seconds."""
        clock.now += 3
        return "ok"

    run = observed(ToolExecutor([work], clock=clock), calls("work"))
    first, last = run.events
    assert isinstance(first, ToolStarted)
    assert isinstance(last, ToolEnded)
    assert (first.workflow, first.agent, first.step, first.tool, first.call_id) == ("w1", "coder", 7, "work", "id0")
    assert (last.agent, last.tool, last.call_id, last.outcome, last.duration) == ("coder", "work", "id0", "ok", 3.0)
    assert run.agents["coder"].tools["work"].calls == 1
    assert run.agents["coder"].tool_seconds == 3.0


@pytest.mark.parametrize("is_async", [False, True])
def test_waiting_for_a_slot_and_pauses_between_retries_do_not_count(observed: Any, is_async: bool) -> None:
    clock = Clock()
    tries: list[int] = []

    def work() -> str:
        """Work for a second; fail first."""
        tries.append(1)
        clock.now += 1
        if len(tries) == 1:
            raise Transient("again")
        return "ok"

    async def awork() -> str:
        """Work for a second; fail first."""
        return work()

    made = tool(name="work", concurrency=1, retries=1, retry_wait=0.01)(awork if is_async else work)
    run = observed(ToolExecutor([made], clock=clock), calls("work", "work", "work"))
    assert sorted(e.duration for e in ended(run).values()) == [1.0, 1.0, 2.0]
    assert sum(isinstance(e, ToolStarted) for e in run.events) == 3


def test_outcomes(observed: Any) -> None:
    gate = threading.Event()

    @tool
    def fails() -> str:
        """Fail."""
        raise ValueError("no")

    @tool(timeout=0.05)
    def hangs() -> str:
        """Hang."""
        gate.wait()
        return "late"

    @tool
    async def gives_up() -> str:
        """Cancel yourself."""
        raise asyncio.CancelledError

    @tool
    def needs(x: int) -> str:
        """Take x."""
        return str(x)

    executor = ToolExecutor([fails, hangs, gives_up, needs])
    run = observed(executor, calls("fails", "hangs", "gives_up", "needs", "unheard_of"))
    gate.set()
    outcomes = {k: e.outcome for k, e in ended(run).items()}
    assert outcomes == {"id0": "error", "id1": "timeout", "id2": "cancelled", "id3": "error"}
    assert 0 < ended(run)["id1"].duration < 10
    assert "unheard_of" not in run.agents["coder"].tools


async def test_a_cancelled_call_ends_as_cancelled() -> None:
    run = WorkflowRun(ScriptedEngine([]), "w1")
    current_run.set(run)
    begun = asyncio.Event()

    @tool
    async def waits() -> str:
        """Wait."""
        begun.set()
        await asyncio.Event().wait()
        return "late"

    running = asyncio.create_task(ToolExecutor([waits], concurrency=1).arun(calls("waits", "waits")))
    await begun.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    kinds = [(type(e).__name__, getattr(e, "outcome", None)) for e in run.events]
    assert kinds == [("ToolStarted", None), ("ToolEnded", "cancelled")]


def test_without_a_run_tools_work_and_emit_nothing() -> None:
    assert current_run.get() is None

    @tool
    def work() -> str:
        """Work."""
        return "ok"

    assert ToolExecutor([work]).run(calls("work"))[0].content == "ok"


def test_callback_handlers_can_tell_calls_that_emit_their_own_events(observed: Any) -> None:
    from langchain_core.callbacks import BaseCallbackHandler
    from langchain_core.tools import tool as langchain_tool

    handled: dict[str, bool] = {}

    class Handler(BaseCallbackHandler):
        run_inline = True

        def on_tool_start(self, serialized: Any, input_str: str, *, run_id: Any, **kwargs: Any) -> None:
            handled[serialized["name"]] = handled_tool_run.get() == run_id

    @langchain_tool
    def inner() -> str:
        """A foreign tool."""
        return "in"

    @tool
    def outer() -> str:
        """Call a foreign tool by LangChain's own means."""
        return str(inner.invoke({}))

    @tool
    async def aouter() -> str:
        """Call nothing."""
        return "out"

    made = [outer, aouter]
    for t in made:
        t.callbacks = [Handler()]
    inner.callbacks = [Handler()]
    observed(ToolExecutor(made), calls("outer", "aouter"))
    assert handled == {"outer": True, "aouter": True, "inner": False}


@pytest.mark.parametrize("policies", [(), ("hedging", "memo")], ids=["no policy", "policies"])
def test_a_call_that_is_stopped_ends_once_as_cancelled(policies: tuple[str, ...]) -> None:
    run = WorkflowRun(ScriptedEngine([], policies=policies), "w1")

    async def stopped() -> None:
        begun = asyncio.Event()

        @tool(pure=True)
        async def wait() -> str:
            """Wait."""
            begun.set()
            await asyncio.Event().wait()
            return "late"

        current_run.set(run)
        running = asyncio.create_task(ToolExecutor([wait]).arun(calls("wait")))
        await begun.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(stopped())
    assert [e.outcome for e in run.events if isinstance(e, ToolEnded)] == ["cancelled"]
