"""One tool call from its first attempt to its outcome: slots, time limit, retries, events."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any
from uuid import uuid4

from langchain_core.messages import ToolCall
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import BaseTool, StructuredTool, Tool
from pydantic import BaseModel, ValidationError
from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt, wait_exponential_jitter

from agentflow.engine.context import current, current_run, handled_tool_run
from agentflow.errors import ToolFailure, UsageError
from agentflow.events import MAX_FIELD_CHARS, ToolEnded, ToolOutcome, ToolStarted
from agentflow.tools._identity import call_key, hidden, identity, takes_more
from agentflow.tools.errors import TOOL_ERROR_KINDS, ToolErrorKind
from agentflow.tools.slots import Slots
from agentflow.tools.threads import abandoned, in_thread
from agentflow.tools.tool import AgentTool, ToolOptions

__all__ = ["CallRun", "Outcome"]

log = logging.getLogger("agentflow.tools")

#: Seconds that a cancelled async tool gets for its clean-up before it is left to itself.
GRACE = 1.0


@dataclass(slots=True)
class Outcome:
    """What a call came to: a ``value``; or a failure for the model, with its kind; or an ``error`` to raise.

    ``ended`` is how events call it.
    """

    value: Any = None
    kind: ToolErrorKind | None = None
    text: str = ""
    error: BaseException | None = None
    ended: ToolOutcome = "ok"


class _TimeLimit(TimeoutError):
    """The executor's own time limit passed."""


class _Refused(Exception):
    """The call cannot be started now."""


class _SelfCancelled(Exception):
    """The tool raised ``CancelledError`` though nobody cancelled it."""


class CallRun:
    """One call, ready to run once. A ``quiet`` one emits no events.

    ``options`` are the tool's, but a call is pure only if it is known by its ``key`` and all of it is from the model.
    """

    def __init__(
        self,
        *,
        tool: BaseTool,
        call: ToolCall,
        injected: Mapping[str, Any],
        options: ToolOptions,
        limit: float,
        slots: Sequence[Slots],
        config: RunnableConfig | None,
        prefer_sync: bool,
        raises: tuple[type[BaseException], ...],
        max_abandoned: int,
        clock: Callable[[], float],
        quiet: bool = False,
    ) -> None:
        self.tool = tool
        self.call = call
        self._injected = injected
        self._limit = limit
        self._slots = slots
        self._config = config
        self._sync = _runs_sync(tool, prefer_sync)
        self._raises = raises
        self._max_abandoned = max_abandoned
        self._clock = clock
        self._quiet = quiet
        self._worked = 0.0
        self._started = False
        self._retryable = options.retryable
        self.options = options if not options.pure or self._comparable() else replace(options, pure=False)

    @cached_property
    def key(self) -> str:
        """Equal for equal calls of the same tool, in all executors; empty for a call that is compared with none."""
        called, underneath = call_key(self.tool.name, self.call["args"]), identity(self.tool)
        return f"{underneath} {called}" if called and underneath else ""

    @property
    def injects(self) -> bool:
        """Whether the tool gets arguments that the model did not give, so that its answer may depend on them."""
        return bool(self._injected) or takes_more(self.tool)

    @property
    def worked(self) -> float:
        """Seconds of the tool's own work so far."""
        return self._worked

    async def run(self) -> Outcome:
        """Run the call to its outcome, and tell how it ended. Raises nothing but ``CancelledError``."""
        try:
            outcome = await self.work()
        except asyncio.CancelledError:
            self.end("cancelled", self._worked)
            raise
        self.end(outcome.ended, self._worked)
        return outcome

    async def work(self) -> Outcome:
        """Like :meth:`run`, but :meth:`end` is left to whoever knows which try of a call counts."""
        name = self.tool.name
        try:
            value = await self._with_retries()
        except asyncio.CancelledError:
            raise
        except _SelfCancelled:
            text = f"tool {name!r} was cancelled before it had a result"
            return Outcome(kind="cancelled", text=text, ended="cancelled")
        except _TimeLimit:
            text = f"tool {name!r} gave no result within {self._limit:g} seconds"
            return Outcome(kind="timeout", text=text, ended="timeout")
        except _Refused as refused:
            return Outcome(kind="too_many", text=str(refused), ended="error")
        except BaseException as error:
            failure = self._failure(error)
            control_flow = failure.error is error and not isinstance(error, self._raises)
            failure.ended = "cancelled" if control_flow else "error"
            return failure
        return Outcome(value=value, ended="error" if getattr(value, "status", None) == "error" else "ok")

    def end(self, outcome: ToolOutcome, seconds: float) -> None:
        """Tell that the call is over after ``seconds`` of work, if it was told that it began."""
        if self._started:
            self._emit(ToolEnded, duration=seconds, outcome=outcome)

    def _comparable(self) -> bool:
        return bool(self.key) and not self.injects

    async def _with_retries(self) -> Any:
        options = self.options
        if options.retries == 0:
            return await self._attempt()
        retrying = AsyncRetrying(
            stop=stop_after_attempt(options.retries + 1),
            wait=wait_exponential_jitter(multiplier=options.retry_wait, jitter=options.retry_wait, max=30.0),
            retry=retry_if_exception(self._retryable),
            reraise=True,
        )
        result: Any = await retrying(self._attempt)
        return result

    async def _attempt(self) -> Any:
        async with AsyncExitStack() as stack:
            for slots in self._slots:
                await stack.enter_async_context(slots.hold())
            if self._sync and abandoned() >= self._max_abandoned:
                raise _Refused(
                    f"tool {self.tool.name!r} was not run: {abandoned()} earlier tool calls passed their time limit and"
                    " still run; try again later"
                )
            self._start()
            return await self._within_limit()

    async def _within_limit(self) -> Any:
        work = _Work(self._clock)
        task = asyncio.create_task(work.in_thread(self._invoke) if self._sync else work.on_loop(self._ainvoke))
        limit = None if self._limit == float("inf") else self._limit
        try:
            done, _ = await asyncio.wait({task}, timeout=limit)
        except asyncio.CancelledError:
            await self._stop(task)
            raise
        finally:
            self._worked += work.seconds()
        if not done:
            await self._stop(task)
            raise _TimeLimit
        if task.cancelled():
            raise _SelfCancelled
        return task.result()

    async def _stop(self, task: asyncio.Task[Any]) -> None:
        """Cancel an attempt and give it ``GRACE`` seconds; what it still does after that is nobody's business."""
        task.cancel()
        task.add_done_callback(_swallow)
        await asyncio.wait({task}, timeout=GRACE)
        if not task.done():
            log.warning("tool %r ignores being cancelled and is left running", self.tool.name)

    def _invoke(self) -> Any:
        call, config = self._prepared()
        return self.tool.invoke(call, config)

    async def _ainvoke(self) -> Any:
        call, config = self._prepared()
        return await self.tool.ainvoke(call, config)

    def _prepared(self) -> tuple[ToolCall, RunnableConfig]:
        """The call with injected arguments in and forged ones out, and a config with a run id of its own."""
        forged = hidden(self.tool)
        args = {k: v for k, v in self.call["args"].items() if k not in forged} | dict(self._injected)
        run_id = uuid4()
        handled_tool_run.set(run_id)
        config: RunnableConfig = {**(self._config or {}), "run_id": run_id}
        return ToolCall(name=self.call["name"], args=args, id=self.call["id"], type="tool_call"), config

    def _failure(self, error: BaseException) -> Outcome:
        name = self.tool.name
        if _passes_through(error, self._raises):
            return Outcome(error=error)
        if isinstance(error, ValidationError) and error.title == _schema_title(self.tool):
            unseen = hidden(self.tool)
            details = [d for d in error.errors(include_url=False) if not d["loc"] or d["loc"][0] not in unseen]
            if not details:
                return Outcome(
                    error=UsageError(
                        f"tool {name!r} wants the injected arguments {sorted(unseen)}, and nothing supplies them:"
                        " run it in a graph by agentflow.graph.tool_node, or give the ToolExecutor inject="
                    )
                )
            faults = "; ".join(f"{'.'.join(map(str, d['loc'])) or 'arguments'}: {d['msg']}" for d in details)
            text = (
                f"tool {name!r} was not run, its arguments are wrong: {faults}. It takes: {', '.join(self.tool.args)}"
            )
            return Outcome(kind="bad_arguments", text=text)
        log.debug("tool %r failed", name, exc_info=error)
        if isinstance(error, ToolFailure) and error.kind in TOOL_ERROR_KINDS:
            return Outcome(kind=error.kind, text=str(error))
        return Outcome(kind="error", text=f"tool {name!r} failed: {type(error).__name__}: {error}")

    def _start(self) -> None:
        if not self._started:
            self._started = True
            self._emit(ToolStarted)

    def _emit(self, event_type: type[ToolStarted | ToolEnded], **fields: Any) -> None:
        run = current_run.get()
        if run is None or self._quiet:
            return
        at = current.get()
        call_id = str(self.call["id"])[:MAX_FIELD_CHARS]
        tool = self.tool.name[:MAX_FIELD_CHARS]
        run.emit(event_type, agent=at.agent, step=at.step, tool=tool, call_id=call_id, **fields)


class _Work:
    """Measures how long the tool itself worked, up to now if it still does."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began: float | None = None
        self._ended: float | None = None

    def seconds(self) -> float:
        if self._began is None:
            return 0.0
        return (self._clock() if self._ended is None else self._ended) - self._began

    async def in_thread(self, function: Callable[[], Any]) -> Any:
        return await in_thread(partial(self._timed, function))

    async def on_loop(self, function: Callable[[], Any]) -> Any:
        self._began = self._clock()
        try:
            return await function()
        finally:
            self._ended = self._clock()

    def _timed(self, function: Callable[[], Any]) -> Any:
        self._began = self._clock()
        try:
            return function()
        except SystemExit as stop:
            raise RuntimeError(f"SystemExit: {stop.code}") from stop
        finally:
            self._ended = self._clock()


def _swallow(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()


def _runs_sync(tool: BaseTool, prefer_sync: bool) -> bool:
    """Whether a tool is called by its sync form, on a thread."""
    if isinstance(tool, StructuredTool | Tool):
        own_async = type(tool)._arun not in (AgentTool._arun, StructuredTool._arun, Tool._arun)
        has_async, has_sync = tool.coroutine is not None or own_async, tool.func is not None
    else:
        has_async, has_sync = type(tool)._arun is not BaseTool._arun, True
    return has_sync and (prefer_sync or not has_async)


def _schema_title(tool: BaseTool) -> str:
    schema = tool.args_schema
    if not (isinstance(schema, type) and issubclass(schema, BaseModel)):
        return ""
    return schema.model_config.get("title") or schema.__name__


def _passes_through(error: BaseException, raises: tuple[type[BaseException], ...]) -> bool:
    """Whether an error of a tool is not for the model: LangGraph's control flow, or the framework's own errors.

    LangGraph is asked only if the program has loaded it: otherwise nothing can have raised its errors.
    """
    if isinstance(error, (*raises, KeyboardInterrupt)):
        return True
    langgraph = sys.modules.get("langgraph.errors")
    if langgraph is None:
        return False
    return isinstance(error, langgraph.GraphBubbleUp) or bool(langgraph.is_invalid_resume(error))
