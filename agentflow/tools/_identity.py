"""What makes two tool calls the same: the tool underneath and the arguments, if the answer depends on nothing else."""

from __future__ import annotations

import inspect
import itertools
import json
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from langchain_core.tools import BaseTool, StructuredTool, Tool
from langchain_core.tools.base import _get_runnable_config_param
from pydantic import BaseModel

from agentflow.tools.tool import AgentTool

__all__ = ["call_key", "hidden", "identity", "takes_more"]

T = TypeVar("T")

_SCALARS = frozenset({str, int, float, bool, type(None)})
#: Methods of tool classes that only pass on to the tool's own function.
_PASSING_ON = frozenset({AgentTool._arun, StructuredTool._run, StructuredTool._arun, Tool._run, Tool._arun})


class _OfEach(Generic[T]):
    """What ``make`` says of an object, kept for as long as the object lives. Looking up is O(1).

    Raises ``TypeError`` for objects that have no weak references.
    """

    def __init__(self, make: Callable[[Any], T]) -> None:
        self._make = make
        self._known: dict[int, tuple[weakref.ref[Any], T]] = {}

    def __call__(self, thing: Any) -> T:
        place = id(thing)
        known = self._known.get(place)
        if known is None:
            gone = weakref.ref(thing, lambda _: self._known.pop(place, None))
            known = self._known.setdefault(place, (gone, self._make(thing)))
        return known[1]


def call_key(name: str, arguments: Any) -> str:
    """Equal for equal calls of a tool; empty for arguments that are not plain JSON, of which that cannot be told."""
    try:
        return json.dumps([name, arguments], sort_keys=True) if _plain(arguments) else ""
    except (ValueError, RuntimeError):  # an integer too long to write; nested too deep or in a circle
        return ""


def identity(tool: BaseTool) -> str:
    """Equal for tools that are the same underneath: one function, or else one object; empty if that cannot be told.

    A function that is made a tool anew, or a tool with other options, stays the same.
    """
    try:
        if not isinstance(tool, StructuredTool | Tool) or type(tool) not in (AgentTool, StructuredTool, Tool):
            return _token(tool)
        schema: Any = tool.args_schema
        if not isinstance(schema, type) or schema.__module__.startswith("langchain_core."):
            schema = None  # it checks nothing, or was made from the function's signature
        return " ".join([tool.response_format, *map(_token, (tool.func, tool.coroutine, schema))])
    except TypeError:
        return ""


def takes_more(tool: BaseTool) -> bool:
    """Whether a tool is given more than the model's arguments: hidden ones, its call's id, the config, callbacks."""
    try:
        return _more(tool)
    except Exception:  # a tool that cannot be read may depend on anything
        return True


def hidden(tool: BaseTool) -> frozenset[str]:
    """Arguments of a tool that the model does not see, and must not set."""
    full = tool.get_input_schema()
    seen = tool.tool_call_schema
    if isinstance(tool.args_schema, dict) or not (isinstance(full, type) and issubclass(full, BaseModel)):
        return frozenset()
    shown = getattr(seen, "model_fields", full.model_fields)
    return (frozenset(full.model_fields) - frozenset(shown)) | tool._injected_args_keys


def _plain(value: Any) -> bool:
    """Whether a value is what JSON can hold, and comes back from it as it was."""
    kind = type(value)
    if kind is dict:
        return all(type(k) is str and _plain(v) for k, v in value.items())
    return all(map(_plain, value)) if kind is list else kind in _SCALARS


def _token(thing: Any) -> str:
    if thing is None:
        return "-"
    if inspect.ismethod(thing):  # made anew whenever it is asked for
        return f"{_token(thing.__self__)}.{_token(thing.__func__)}"
    return str(_number(thing))


def _takes_more(tool: BaseTool) -> bool:
    if hidden(tool) or tool._injected_args_keys:
        return True
    made_of = (getattr(tool, "func", None), getattr(tool, "coroutine", None), tool._run, tool._arun)
    functions = [f for f in made_of if f is not None and getattr(f, "__func__", f) not in _PASSING_ON]
    return any(
        _get_runnable_config_param(f) or {"callbacks", "run_manager"} & set(inspect.signature(f).parameters)
        for f in functions
    )


_numbers = itertools.count()
_number: _OfEach[int] = _OfEach(lambda _: next(_numbers))
_more: _OfEach[bool] = _OfEach(_takes_more)
