"""Runs the tool calls of a message and answers each of them, whatever happens to the others."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, Protocol

from langchain_core.messages import AIMessage, InvalidToolCall, ToolCall, ToolMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import BaseTool

from agentflow.engine._portal import Portal
from agentflow.engine.guarded import guards_now
from agentflow.errors import EngineFailure, SetupError, UsageError, WorkflowStopped
from agentflow.tools._call import CallRun, Outcome
from agentflow.tools._guarded import Approver, call_key, permitted, run_guarded
from agentflow.tools.errors import error_message
from agentflow.tools.node import ToolExecutorNode
from agentflow.tools.output import clip_content
from agentflow.tools.slots import Slots
from agentflow.tools.tool import AgentTool, ToolOptions, tool

__all__ = ["Injector", "ToolExecutor"]

#: Longest error text that goes back to the model, in characters.
_MAX_ERROR = 2_000


class Injector(Protocol):
    """Gives a call the arguments that come from the program and not from the model, by parameter name."""

    def __call__(
        self, tool: BaseTool, call: ToolCall, state: Any, config: RunnableConfig | None
    ) -> Mapping[str, Any]: ...


#: What can be run: the message that asks for it, or the calls alone.
Calls = AIMessage | Sequence[ToolCall]


class ToolExecutor:
    """Runs tool calls and answers each with a ``ToolMessage``, in the order of the calls.

    A call that fails in an expected way (see :data:`~agentflow.tools.TOOL_ERROR_KINDS`) is answered with an error
    message that the model can read; its siblings are not touched. Raised instead are: LangGraph's control
    flow (``interrupt()`` in a tool), cancelling, errors of the set-up, the engine or the calling code, a policy that
    ends the workflow, and those named in ``raises``; siblings are let finish first, and cancelling stops them.

    ``tools`` are made by :func:`~agentflow.tools.tool`, or any LangChain tools (MCP tools are), or plain functions.
    ``timeout`` (seconds of a call's own work), ``concurrency`` (calls at once), ``max_output`` (characters) hold
    for tools that do not say otherwise; ``options`` gives foreign tools options by name. ``max_calls`` is how many
    calls of one message are run. ``max_abandoned`` refuses to start a sync tool while that many timed-out calls of this
    process still run. ``inject`` supplies injected arguments. ``approve`` asks a person whether a call may be made
    that a policy wants approved. ``clock`` measures durations, in seconds.

    Thread-safe; one executor may serve sync and async callers on several event loops at once.
    """

    def __init__(
        self,
        tools: Iterable[BaseTool | Callable[..., Any]],
        *,
        timeout: float = 60.0,
        concurrency: int = 16,
        max_output: int = 10_000,
        max_calls: int = 1_000,
        max_abandoned: int = 64,
        options: Mapping[str, ToolOptions] | None = None,
        raises: tuple[type[BaseException], ...] = (),
        inject: Injector | None = None,
        approve: Approver | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        ToolOptions(timeout=timeout, concurrency=concurrency, max_output=max_output)
        self.tools: dict[str, BaseTool] = {}
        for given in tools:
            made = given if isinstance(given, BaseTool) else tool(given)
            if made.name in self.tools:
                raise UsageError(f"two tools are called {made.name!r}: tool names must be unique")
            self.tools[made.name] = made
        unknown = sorted(set(options or {}) - set(self.tools))
        if unknown:
            raise UsageError(f"options are given for {unknown}, but the tools are {sorted(self.tools)}")
        self.timeout = timeout
        self.max_output = max_output
        self.max_calls = max_calls
        self.max_abandoned = max_abandoned
        self.raises: tuple[type[BaseException], ...] = (
            UsageError,
            SetupError,
            EngineFailure,
            WorkflowStopped,
            *raises,
        )
        self.inject = inject
        self.approve = approve
        self.clock = clock
        self.slots = Slots(concurrency)
        self._options = {name: _options_of(t, (options or {}).get(name)) for name, t in self.tools.items()}
        self._tool_slots = {name: _slots_of(t, self._options[name]) for name, t in self.tools.items()}

    def run(self, calls: Calls, *, state: Any = None, config: RunnableConfig | None = None) -> list[Any]:
        """Like :meth:`arun`, blocking this thread. Tools that have a sync form are run in it."""
        return _blocking(self._run_all(calls, state, config, prefer_sync=True))

    async def arun(self, calls: Calls, *, state: Any = None, config: RunnableConfig | None = None) -> list[Any]:
        """Run the calls of an ``AIMessage`` (or a list of calls) and return one answer for each, in order.

        Calls with broken JSON come after the others, as the message keeps them apart. An answer is a
        ``ToolMessage``, or what a tool returned instead: a LangGraph ``Command`` (or a list of them).
        ``state`` is the graph state, for ``inject``.
        """
        return await self._run_all(calls, state, config, prefer_sync=False)

    def node(self, *, messages_key: str = "messages", name: str = "tools") -> ToolExecutorNode:
        """A graph node, for ``graph.add_node("tools", executor.node())``, that takes and gives what LangGraph's
        ``ToolNode`` does."""
        return ToolExecutorNode(self, messages_key=messages_key, name=name)

    async def _run_all(
        self, calls: Calls, state: Any, config: RunnableConfig | None, *, prefer_sync: bool
    ) -> list[Any]:
        valid, invalid = _split(calls)
        jobs: list[CallRun | ToolMessage] = [
            self._prepare(i, call, state, config, prefer_sync) for i, call in enumerate(valid)
        ]
        first: dict[str, asyncio.Task[Outcome]] = {}
        tasks: list[asyncio.Task[Outcome] | None] = []
        refused = permitted(jobs, self.approve)
        try:
            for i, job in enumerate(jobs):
                if isinstance(job, CallRun) and refused[i] is None:
                    again = partial(self._prepare_again, i, valid[i], state, config, prefer_sync)
                    tasks.append(_start(job, first, again))
                else:
                    tasks.append(None)
            started = [t for t in tasks if t is not None]
            if started:
                await asyncio.wait(started)
        except asyncio.CancelledError:
            running = [t for t in tasks if t is not None]
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            raise
        outcomes = [t.result() if t is not None else no for t, no in zip(tasks, refused, strict=True)]
        for outcome in outcomes:
            if outcome is not None and outcome.error is not None:
                raise outcome.error
        answers: list[Any] = []
        for job, outcome in zip(jobs, outcomes, strict=True):
            answers.append(self._answer(job, outcome))
        answers.extend(_broken(i, call) for i, call in enumerate(invalid, len(valid)))
        return answers

    def _prepare_again(
        self, index: int, call: ToolCall, state: Any, config: RunnableConfig | None, prefer_sync: bool
    ) -> CallRun:
        """The call once more, for a second try that nobody hears of."""
        job = self._prepare(index, call, state, config, prefer_sync, quiet=True)
        assert isinstance(job, CallRun)
        return job

    def _prepare(
        self,
        index: int,
        call: ToolCall,
        state: Any,
        config: RunnableConfig | None,
        prefer_sync: bool,
        *,
        quiet: bool = False,
    ) -> CallRun | ToolMessage:
        name, call_id = call["name"], call["id"] or f"call-{index}"
        call = ToolCall(name=name, args=call["args"], id=call_id, type="tool_call")
        wanted = self.tools.get(name)
        if index >= self.max_calls:
            text = f"not run: this message has more than {self.max_calls} tool calls; make fewer at once"
            return error_message("too_many", text, tool=name, call_id=call_id)
        if wanted is None:
            text = f"there is no tool {name[:200]!r}; the tools are: {', '.join(self.tools) or '(none)'}"
            return error_message("unknown_tool", text, tool=name, call_id=call_id)
        given = self.inject(wanted, call, state, config) if self.inject is not None else {}
        return CallRun(
            tool=wanted,
            call=call,
            injected=given,
            options=self._options[name],
            limit=self._options[name].timeout or self.timeout,
            slots=[s for s in (self._tool_slots[name], self.slots) if s is not None],
            config=config,
            prefer_sync=prefer_sync,
            raises=self.raises,
            max_abandoned=self.max_abandoned,
            clock=self.clock,
            quiet=quiet,
        )

    def _answer(self, job: CallRun | ToolMessage, outcome: Outcome | None) -> Any:
        if isinstance(job, ToolMessage):
            return job
        assert outcome is not None
        name, call_id = job.tool.name, str(job.call["id"])
        if outcome.kind is not None:
            return error_message(outcome.kind, clip_content(outcome.text, _MAX_ERROR), tool=name, call_id=call_id)
        answer = outcome.value
        if isinstance(answer, ToolMessage):
            limit = self._options[name].max_output or self.max_output
            changes: dict[str, Any] = {"content": clip_content(answer.content, limit)}
            if job.options.pure:
                changes["tool_call_id"] = call_id
            return answer.model_copy(update=changes)
        return answer


def _split(calls: Calls) -> tuple[list[ToolCall], list[InvalidToolCall]]:
    if isinstance(calls, AIMessage):
        return list(calls.tool_calls), list(calls.invalid_tool_calls)
    return list(calls), []


def _start(
    job: CallRun, first: dict[str, asyncio.Task[Outcome]], again: Callable[[], CallRun]
) -> asyncio.Task[Outcome]:
    """Start a call; equal calls of a pure tool share the first one's task."""
    guards = guards_now()
    if not job.options.pure:
        return asyncio.create_task(run_guarded(job, again, guards) if guards else job.run())
    key = call_key(job.tool.name, job.call["args"])
    if key not in first:
        first[key] = asyncio.create_task(run_guarded(job, again, guards) if guards else job.run())
    return first[key]


def _broken(index: int, call: InvalidToolCall) -> ToolMessage:
    shown = (call.get("args") or "")[:200]
    text = f"not run: the arguments are not a JSON object ({call.get('error') or 'cannot be read'}): {shown}"
    return error_message(
        "bad_json", text, tool=call.get("name") or "unknown", call_id=call.get("id") or f"call-{index}"
    )


def _options_of(given: BaseTool, override: ToolOptions | None) -> ToolOptions:
    if override is not None:
        return override
    return given.options if isinstance(given, AgentTool) else ToolOptions()


def _slots_of(given: BaseTool, options: ToolOptions) -> Slots | None:
    if isinstance(given, AgentTool) and given.options is options:
        return given.slots
    return Slots(options.concurrency) if options.concurrency is not None else None


def _blocking(coro: Coroutine[Any, Any, list[Any]]) -> list[Any]:
    """Run ``coro`` on the loop thread that sync callers share, so that what async tools keep stays on one loop."""
    global _portal
    with _lock:
        if _portal is None:
            _portal = Portal("agentflow-tools")
        portal = _portal
    if not portal.owns_current_thread() and not _loop_is_blocked.get():
        return portal.run(coro)
    nested = Portal("agentflow-tools-nested")  # a tool's async code made a blocking call on the shared loop
    token = _loop_is_blocked.set(True)
    try:
        return nested.run(coro)
    finally:
        _loop_is_blocked.reset(token)
        nested.close()


def _forget_portal() -> None:
    """A forked child has no copy of the thread."""
    global _portal, _lock
    _portal, _lock = None, threading.Lock()


#: Whether this context was reached by a blocking call from the shared loop, which stands still until it returns.
_loop_is_blocked: ContextVar[bool] = ContextVar("agentflow_tools_loop_is_blocked", default=False)
_lock = threading.Lock()
_portal: Portal | None = None
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_portal)
