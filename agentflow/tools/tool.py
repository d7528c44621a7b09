"""``@tool``: a function as a LangChain tool that carries how it wants to be run."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, TypeVar, overload

from langchain_core.callbacks import AsyncCallbackManagerForToolRun
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import BaseTool, StructuredTool
from langchain_core.tools.base import ArgsSchema
from pydantic import Field, PrivateAttr

from agentflow.errors import UsageError
from agentflow.tools.errors import Transient
from agentflow.tools.slots import Slots

__all__ = ["AgentTool", "ToolOptions", "tool"]

F = TypeVar("F", bound=Callable[..., Any])


#: Options that are numbers, and of which type.
_NUMBERS: dict[str, Any] = {
    "timeout": int | float,
    "retries": int,
    "retry_wait": int | float,
    "concurrency": int,
    "max_output": int,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOptions:
    """How a tool is run by a :class:`~agentflow.tools.ToolExecutor`. None takes the executor's value.

    ``timeout`` in seconds bounds each attempt's own work (``float("inf")`` for no limit). ``retries`` attempts
    follow a failed one if its error is one of ``retry_on``, after about ``retry_wait`` seconds, doubled each time.
    ``concurrency`` caps how many calls of the tool run at once, in all executors together. ``max_output`` is in
    characters. A ``pure`` tool has no effects and the same answer for the same arguments: a call that passed
    its time limit counts as retryable, and equal calls in one message run once.
    """

    timeout: float | None = None
    retries: int = 0
    retry_on: tuple[type[BaseException], ...] = (Transient, ConnectionError)
    retry_wait: float = 0.2
    concurrency: int | None = None
    max_output: int | None = None
    pure: bool = False

    def __post_init__(self) -> None:
        for name, wanted in _NUMBERS.items():
            value = getattr(self, name)
            optional = value is None and name not in ("retries", "retry_wait")
            if not optional and (isinstance(value, bool) or not isinstance(value, wanted)):
                what = "an integer" if wanted is int else "a number"
                raise UsageError(f"{name} must be {what}, got {value!r}")
        if self.timeout is not None and not self.timeout > 0:
            raise UsageError(f"timeout must be above 0 seconds, got {self.timeout!r}")
        if self.retries < 0 or self.retry_wait < 0:
            raise UsageError(f"retries and retry_wait must not be negative, got {self.retries} and {self.retry_wait}")
        if self.concurrency is not None and self.concurrency < 1:
            raise UsageError(f"concurrency must be at least 1, got {self.concurrency}")
        if self.max_output is not None and self.max_output < 1:
            raise UsageError(f"max_output must be at least 1 character, got {self.max_output}")

    def retryable(self, error: BaseException) -> bool:
        """Whether another attempt may follow this error."""
        return isinstance(error, self.retry_on) or (self.pure and isinstance(error, TimeoutError))


class AgentTool(StructuredTool):
    """A LangChain tool with :class:`ToolOptions`. They hold where a ``ToolExecutor`` runs it; elsewhere, in
    LangGraph's own ``ToolNode`` say, it is a plain ``StructuredTool``."""

    options: ToolOptions = Field(default_factory=ToolOptions, exclude=True, repr=False)
    _slots: Slots | None = PrivateAttr(default=None)

    def model_post_init(self, context: Any, /) -> None:
        super().model_post_init(context)
        if self.options.concurrency is not None:
            self._slots = Slots(self.options.concurrency)

    async def _arun(
        self,
        *args: Any,
        config: RunnableConfig,
        run_manager: AsyncCallbackManagerForToolRun | None = None,
        **kwargs: Any,
    ) -> Any:
        try:
            return await super()._arun(*args, config=config, run_manager=run_manager, **kwargs)
        except SystemExit as stop:  # LangChain runs this in a task, which would end the whole event loop with it
            raise RuntimeError(f"SystemExit: {stop.code}") from stop

    @property
    def slots(self) -> Slots | None:
        """The cap on this tool's calls, None for no cap."""
        return self._slots

    def with_options(self, **changes: Any) -> Self:
        """A copy of the tool with other options; a changed ``concurrency`` is a cap of its own."""
        copied = self.model_copy(update={"options": replace(self.options, **changes)})
        if "concurrency" in changes:
            limit = copied.options.concurrency
            copied._slots = Slots(limit) if limit is not None else None
        return copied


@overload
def tool(function: Callable[..., Any], /) -> AgentTool: ...


@overload
def tool(
    *,
    name: str | None = None,
    description: str | None = None,
    args_schema: ArgsSchema | None = None,
    response_format: Literal["content", "content_and_artifact"] = "content",
    return_direct: bool = False,
    parse_docstring: bool = False,
    timeout: float | None = None,
    retries: int = 0,
    retry_on: type[BaseException] | tuple[type[BaseException], ...] | None = None,
    retry_wait: float = 0.2,
    concurrency: int | None = None,
    max_output: int | None = None,
    pure: bool = False,
) -> Callable[[Callable[..., Any]], AgentTool]: ...


def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    args_schema: ArgsSchema | None = None,
    response_format: Literal["content", "content_and_artifact"] = "content",
    return_direct: bool = False,
    parse_docstring: bool = False,
    retry_on: type[BaseException] | tuple[type[BaseException], ...] | None = None,
    **options: Any,
) -> AgentTool | Callable[[Callable[..., Any]], AgentTool]:
    """Make a sync or async function a tool: ``@tool`` or ``@tool(timeout=10, retries=2, ...)``.

    The name, the description and the schema of the arguments come from the function's name, docstring and
    signature, the way LangChain reads them (``parse_docstring`` takes the arguments' descriptions from a
    Google-style docstring). The other options are those of :class:`ToolOptions`.
    Raises :class:`~agentflow.errors.UsageError` for a value that makes no sense, or a function with
    neither a docstring nor a ``description``.
    """
    if retry_on is not None:
        options["retry_on"] = retry_on if isinstance(retry_on, tuple) else (retry_on,)
    built = ToolOptions(**options)

    def decorate(function: Callable[..., Any]) -> AgentTool:
        if isinstance(function, BaseTool) or not callable(function):
            raise UsageError(f"@tool takes a function, not {type(function).__name__}: give LangChain tools as they are")
        is_async = inspect.iscoroutinefunction(function)
        try:
            made = AgentTool.from_function(
                None if is_async else function,
                function if is_async else None,
                name=name,
                description=description,
                return_direct=return_direct,
                args_schema=args_schema,
                response_format=response_format,
                parse_docstring=parse_docstring,
                options=built,
            )
        except ValueError as error:
            raise UsageError(f"{getattr(function, '__name__', function)!s} cannot be a tool: {error}") from error
        assert isinstance(made, AgentTool)
        return made

    return decorate if function is None else decorate(function)
