"""The executor: every call is answered, in order, whatever the others do."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.tools import StructuredTool, ToolException

from agentflow.errors import EngineDied, ToolFailure, UsageError
from agentflow.tools import TOOL_ERROR_KINDS, ToolExecutor, ToolOptions, error_kind, tool
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
    assert len(set(TOOL_ERROR_KINDS)) == len(TOOL_ERROR_KINDS) == 8
    assert error_kind(ToolMessage("x", tool_call_id="1", additional_kwargs={"agentflow_error_kind": "other"})) is None
