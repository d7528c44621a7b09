"""What an agent is: its name, its private instructions, its tools, and the form of its answers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from pydantic import BaseModel

from agentflow.engine.base import Sampling
from agentflow.errors import BadSampling, UsageError

__all__ = ["Agent"]

#: LangGraph keeps these characters and names for itself.
_NAME = re.compile(r"[^|:\x00-\x1f]{1,128}")
_RESERVED = frozenset({"__start__", "__end__", "__root__", "__interrupt__"})
_SAMPLING_FIELDS = frozenset(f.name for f in fields(Sampling)) - {"json_schema", "forced_tokens"}


class Agent:
    """A role in a graph. Immutable; one agent may be used in several graphs.

    ``instructions`` are its private system prompt, the same at every call (which is what makes it cacheable).
    ``tools`` may be :func:`agentflow.tool` functions, LangChain or MCP tools, or plain functions with type
    hints and a docstring. ``output`` asks for structured answers: a pydantic model class, or a JSON schema of
    an object. ``sampling`` is a :class:`~agentflow.engine.base.Sampling` or a dict of its fields; what it
    leaves out is the chat model's choice. ``max_tool_rounds`` bounds how many times in one step the agent may
    answer with tool calls. ``adapter`` is the LoRA adapter that its calls run with, by the name that the engine knows.

    Raises :class:`~agentflow.errors.UsageError` at once for anything that could not work later.
    """

    __slots__ = ("_sampling", "adapter", "instructions", "max_tool_rounds", "name", "output", "tools")

    def __init__(
        self,
        name: str,
        instructions: str = "",
        *,
        tools: Iterable[Any] = (),
        output: type[BaseModel] | Mapping[str, Any] | None = None,
        sampling: Sampling | Mapping[str, Any] | None = None,
        max_tool_rounds: int = 8,
        adapter: str | None = None,
    ) -> None:
        self.name = _checked_name(name)
        if not isinstance(instructions, str):
            raise UsageError(f"agent {name!r}: instructions must be a string, not {type(instructions).__name__}")
        self.instructions = instructions
        self.tools = _checked_tools(name, tools)
        self.output = _checked_output(name, output)
        self._sampling = _checked_sampling(name, sampling)
        if isinstance(max_tool_rounds, bool) or not isinstance(max_tool_rounds, int) or max_tool_rounds < 1:
            raise UsageError(
                f"agent {name!r}: max_tool_rounds must be an integer of at least 1, got {max_tool_rounds!r}"
            )
        self.max_tool_rounds = max_tool_rounds
        if adapter is not None and (not isinstance(adapter, str) or not adapter):
            raise UsageError(f"agent {name!r}: adapter must be the name of a LoRA adapter, got {adapter!r}")
        self.adapter = adapter

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(self, name):  # set once: when made, copied or unpickled
            raise AttributeError(f"an Agent cannot be changed: make another one to have another {name.lstrip('_')}")
        super().__setattr__(name, value)

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampling values that this agent sets itself."""
        return dict(self._sampling)

    def __repr__(self) -> str:
        tools = f", tools={[tool_name(t) for t in self.tools]}" if self.tools else ""
        return f"Agent({self.name!r}{tools})"


def tool_name(tool: Any) -> str:
    """The name under which a model calls ``tool``; empty when it has none."""
    name = getattr(tool, "name", None) or getattr(tool, "__name__", None)
    return name if isinstance(name, str) else ""


def _checked_name(name: Any) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name) or not name.strip() or name in _RESERVED:
        raise UsageError(
            f"an agent's name must be 1 to 128 characters without '|', ':' or control characters,"
            f" and none of LangGraph's own names; got {name!r}"
        )
    return name


def _checked_tools(agent: str, tools: Any) -> tuple[Any, ...]:
    if isinstance(tools, str | bytes | Mapping) or not isinstance(tools, Iterable):
        raise UsageError(f"agent {agent!r}: tools must be a list of tools, not {type(tools).__name__}")
    found = tuple(tools)
    seen: set[str] = set()
    for tool in found:
        name = tool_name(tool)
        if not name or not (callable(tool) or hasattr(tool, "invoke")):
            raise UsageError(f"agent {agent!r}: {tool!r} is no tool: give a function or a LangChain tool")
        plain = not (hasattr(tool, "name") or hasattr(tool, "invoke"))
        if plain and not (getattr(tool, "__doc__", None) or "").strip():
            raise UsageError(f"agent {agent!r}: the tool {name!r} needs a docstring: it is what the model reads of it")
        if name in seen:
            raise UsageError(f"agent {agent!r}: two tools are called {name!r}; a model could not tell them apart")
        seen.add(name)
    return found


def _checked_output(agent: str, output: Any) -> type[BaseModel] | dict[str, Any] | None:
    if output is None:
        return None
    if isinstance(output, type) and issubclass(output, BaseModel):
        return output
    if isinstance(output, Mapping):
        schema = dict(output)
        if schema.get("type") == "object" or "properties" in schema:
            return schema
        raise UsageError(f"agent {agent!r}: the output schema must describe an object ({{'type': 'object', ...}})")
    raise UsageError(f"agent {agent!r}: output must be a pydantic model class or a JSON schema, not {output!r}")


def _checked_sampling(agent: str, sampling: Any) -> dict[str, Any]:
    if sampling is None:
        return {}
    if isinstance(sampling, Sampling):
        defaults = Sampling()
        if sampling.json_schema is not None or sampling.forced_tokens is not None:
            raise UsageError(f"agent {agent!r}: give the schema as output=, not in sampling")
        values = {n: getattr(sampling, n) for n in _SAMPLING_FIELDS if getattr(sampling, n) != getattr(defaults, n)}
    elif isinstance(sampling, Mapping):
        values = dict(sampling)
        if unknown := sorted(set(map(str, values)) - _SAMPLING_FIELDS):
            raise UsageError(
                f"agent {agent!r}: unknown sampling fields {unknown}; known are {sorted(_SAMPLING_FIELDS)}"
            )
        if isinstance(values.get("stop"), list | tuple):
            values["stop"] = tuple(values["stop"])
    else:
        raise UsageError(f"agent {agent!r}: sampling must be a Sampling or a dict, not {type(sampling).__name__}")
    try:
        Sampling(**values).check()
    except (BadSampling, TypeError) as error:
        raise BadSampling(f"agent {agent!r}: {error}") from None
    return values
