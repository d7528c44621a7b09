"""Which calls are the same: what a pure tool answered is given to nobody who asked another tool or something else."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import numpy as np
import pytest
from langchain_core.callbacks import CallbackManagerForToolRun, Callbacks
from langchain_core.messages import ToolMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import BaseTool, InjectedToolArg, InjectedToolCallId, StructuredTool
from pydantic import BaseModel

from agentflow.engine.context import current_run
from agentflow.engine.scripted import ScriptedEngine
from agentflow.engine.workflow import WorkflowRun
from agentflow.tools import ToolExecutor, ToolOptions, tool
from agentflow.tools._identity import call_key, identity

Runner = Callable[..., Any]
PURE = ToolOptions(pure=True)


def calls(name: str, *arguments: dict[str, Any]) -> list[Any]:
    return [{"name": name, "args": a, "id": f"id{i}", "type": "tool_call"} for i, a in enumerate(arguments)]


@contextmanager
def policies(*names: str) -> Iterator[WorkflowRun]:
    """A workflow under policies of the framework."""
    run = WorkflowRun(ScriptedEngine([], policies=names), "w")
    token = current_run.set(run)
    try:
        yield run
    finally:
        current_run.reset(token)


def searching(where: str) -> BaseTool:
    @tool(pure=True)
    def search(q: str) -> str:
        """Search."""
        return f"{where}: {q}"

    return search


# -- the tool ---------------------------------------------------------------------------------------------


def test_a_tool_of_the_same_name_gets_no_answer_of_another(run: Runner) -> None:
    with policies("memo"):
        for where in ("public", "internal", "public"):
            assert run(ToolExecutor([searching(where)]), calls("search", {"q": "x"}))[0].content == f"{where}: x"


def test_methods_of_two_objects_are_two_tools(run: Runner) -> None:
    class Index:
        def __init__(self, name: str) -> None:
            self.name = name

        def search(self, q: str) -> str:
            """Search."""
            return f"{self.name}: {q}"

    one, two = Index("one"), Index("two")
    with policies("memo"):
        for index in (one, two, one):
            executor = ToolExecutor([index.search], options={"search": PURE})
            assert run(executor, calls("search", {"q": "x"}))[0].content == f"{index.name}: x"
    assert identity(tool(one.search)) == identity(tool(one.search)) != identity(tool(two.search))


def test_a_schema_with_other_defaults_makes_another_tool(run: Runner) -> None:
    class Short(BaseModel):
        limit: int = 1

    class Long(BaseModel):
        limit: int = 9

    def listing(limit: int) -> str:
        """List."""
        return "x" * limit

    with policies("memo"):
        for schema, length in ((Short, 1), (Long, 9)):
            made = StructuredTool.from_function(listing, args_schema=schema)
            executor = ToolExecutor([made], options={"listing": PURE})
            assert len(run(executor, calls("listing", {}))[0].content) == length


def test_one_function_stays_one_tool_when_it_is_wrapped_again_or_has_other_options(run: Runner) -> None:
    ran: list[str] = []

    def look(what: str) -> str:
        """Look."""
        ran.append(what)
        return what.upper()

    made = tool(pure=True)(look)
    executors = [
        ToolExecutor([look], options={"look": PURE}),
        ToolExecutor([look], options={"look": PURE}),
        ToolExecutor([made]),
        ToolExecutor([made.with_options(timeout=5, concurrency=2)]),
    ]
    with policies("memo"):
        assert [run(e, calls("look", {"what": "a"}))[0].content for e in executors] == ["A"] * 4
    assert ran == ["a"]


def test_a_tool_that_is_gone_leaves_its_identity_to_no_other() -> None:
    seen: set[str] = set()
    for _ in range(200):
        made = searching("x")
        assert identity(made) not in seen
        seen.add(identity(made))
        del made
        gc.collect(0)


# -- what the model did not give ---------------------------------------------------------------------------


def by_config(q: str, config: RunnableConfig) -> str:
    """Look up for the user."""
    return f"{config['configurable']['user']}: {q}"


async def by_config_async(q: str, config: RunnableConfig) -> str:
    """Look up for the user."""
    return f"{config['configurable']['user']}: {q}"


class ByConfig(BaseTool):
    name: str = "by_class"
    description: str = "Look up for the user."

    def _run(self, q: str, config: RunnableConfig) -> str:
        return by_config(q, config)


@pytest.mark.parametrize(
    "made", [tool(pure=True)(by_config), tool(pure=True)(by_config_async), ByConfig()], ids=lambda made: made.name
)
def test_an_answer_for_one_user_is_not_given_to_another(run: Runner, made: BaseTool) -> None:
    executor = ToolExecutor([made], options={made.name: PURE})
    with policies("memo"):
        for user in ("alice", "bob"):
            answers = run(executor, calls(made.name, {"q": "me"}), config={"configurable": {"user": user}})
            assert answers[0].content == f"{user}: me"


def test_calls_that_know_their_own_id_are_not_the_same(run: Runner) -> None:
    @tool(pure=True)
    def ticket(q: str, call_id: Annotated[str, InjectedToolCallId]) -> str:
        """Give a ticket."""
        return call_id

    answers = run(ToolExecutor([ticket]), calls("ticket", {"q": "x"}, {"q": "x"}))
    assert [a.content for a in answers] == ["id0", "id1"]


def test_tools_that_are_given_more_are_asked_every_time(run: Runner) -> None:
    ran: list[str] = []

    @tool(pure=True)
    def calling(q: str, callbacks: Callbacks = None) -> str:
        """Run something that reports to the callbacks."""
        ran.append("calling")
        return q

    @tool(pure=True)
    def hiding(q: str, user: Annotated[str, InjectedToolArg] = "nobody") -> str:
        """Read for a user."""
        ran.append("hiding")
        return q

    class Managed(BaseTool):
        name: str = "managed"
        description: str = "Report to the run."

        def _run(self, q: str, run_manager: CallbackManagerForToolRun | None = None) -> str:
            ran.append("managed")
            return q

    executor = ToolExecutor([calling, hiding, Managed()], options={"managed": PURE})
    for name in executor.tools:
        run(executor, calls(name, {"q": "x"}, {"q": "x"}))
    assert ran == ["calling", "calling", "hiding", "hiding", "managed", "managed"]


def test_a_pure_call_past_its_limit_is_tried_again_whatever_it_is_given(run: Runner) -> None:
    tries: list[int] = []

    @tool(pure=True, timeout=0.05, retries=1, retry_wait=0.0)
    async def slow(config: RunnableConfig) -> str:
        """Answer the second time."""
        tries.append(1)
        if len(tries) == 1:
            await asyncio.Event().wait()
        return "here"

    assert run(ToolExecutor([slow]), calls("slow", {}))[0].content == "here"


# -- the arguments -----------------------------------------------------------------------------------------


class Labelled:
    def __init__(self, value: int) -> None:
        self.value = value

    def __repr__(self) -> str:
        return "Labelled"


ONE, OTHER = np.zeros(5_000), np.zeros(5_000)
OTHER[2_500] = 7.0


@pytest.mark.parametrize(
    ("one", "other"),
    [(ONE, OTHER), ({1: "a"}, {"1": "a"}), (Labelled(1), Labelled(2)), ([1], (1,))],
    ids=["arrays", "number and text as key", "objects of one repr", "list and tuple"],
)
@pytest.mark.parametrize("names", [(), ("memo",)], ids=["no policy", "memo"])
def test_arguments_that_look_alike_are_not_the_same(run: Runner, one: Any, other: Any, names: tuple[str, ...]) -> None:
    seen: list[Any] = []

    @tool(pure=True)
    def take(what: Any) -> str:
        """Take."""
        seen.append(what)
        return "taken"

    with policies(*names):
        run(ToolExecutor([take], concurrency=1), calls("take", {"what": one}, {"what": other}))
    assert [id(s) for s in seen] == [id(one), id(other)]


@pytest.mark.parametrize("names", [(), ("memo", "safety")], ids=["no policy", "policies"])
@pytest.mark.parametrize("pure", [False, True])
def test_arguments_that_cannot_be_compared_fail_no_call(run: Runner, names: tuple[str, ...], pure: bool) -> None:
    @tool(pure=pure)
    def take(what: Any) -> str:
        """Take."""
        return "taken"

    round_: dict[str, Any] = {}
    round_["x"] = [round_]
    strange: list[Any] = [{1: 2, "b": 3}, round_, {(1, 2): 3}, {1, 2}]
    with policies(*names):
        answers = run(ToolExecutor([take]), calls("take", *[{"what": s} for s in strange]))
    assert [a.content for a in answers] == ["taken"] * len(strange)


def test_keys_of_plain_arguments() -> None:
    deep: dict[str, Any] = {}
    for _ in range(5_000):
        deep = {"x": deep}
    distinct = [
        1,
        1.0,
        True,
        None,
        "1",
        [1],
        {"a": 1},
        {"a": [1]},
        0.1,
        -0.0,
        0.0,
        10**30,
        float("nan"),
        float("inf"),
        "",
    ]
    assert len({call_key("t", {"x": value}) for value in distinct}) == len(distinct)
    assert call_key("t", {"a": 1, "b": 2}) == call_key("t", {"b": 2, "a": 1}) != call_key("u", {"a": 1, "b": 2})
    assert [call_key("t", {"x": value}) for value in (deep, 10**5_000, np.float64(1.0), b"x", object())] == [""] * 5


def test_a_message_of_a_shared_answer_has_the_id_of_each_call(run: Runner) -> None:
    @tool(pure=True)
    def made(q: str) -> Any:
        """Make a message."""
        return ToolMessage(q, tool_call_id="any")

    answers = run(ToolExecutor([made]), calls("made", {"q": "x"}, {"q": "x"}))
    assert [a.tool_call_id for a in answers] == ["id0", "id1"]
