"""A tool executor as a graph node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from langchain_core.messages import AIMessage, ToolCall, ToolMessage
from langchain_core.runnables import Runnable, RunnableConfig

from agentflow.errors import UsageError

if TYPE_CHECKING:
    from agentflow.tools.executor import ToolExecutor

__all__ = ["ToolExecutorNode"]


class ToolExecutorNode(Runnable[Any, Any]):
    """Runs the tool calls of the newest ``AIMessage`` in the state and returns their answers as a state update.

    It takes what LangGraph's ``ToolNode`` takes: a state with messages (dict or object), a list of messages, a list
    of tool calls, or the payload that ``create_agent`` sends for a single call.
    """

    def __init__(self, executor: ToolExecutor, *, messages_key: str = "messages", name: str = "tools") -> None:
        self.executor = executor
        self.messages_key = messages_key
        self.name = name

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """Run the calls, blocking this thread."""
        calls, state, as_list = self._read(input)
        return self._update(self.executor.run(calls, state=state, config=config), as_list)

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """Run the calls."""
        calls, state, as_list = self._read(input)
        return self._update(await self.executor.arun(calls, state=state, config=config), as_list)

    def _read(self, given: Any) -> tuple[AIMessage | list[ToolCall], Any, bool]:
        if isinstance(given, Mapping) and given.get("__type") == "tool_call_with_context":
            return [given["tool_call"]], given["state"], False
        if isinstance(given, list):
            if given and isinstance(given[-1], dict) and given[-1].get("type") == "tool_call":
                return given, None, False
            messages = given
        elif isinstance(given, Mapping):
            messages = given.get(self.messages_key, [])
        else:
            messages = getattr(given, self.messages_key, [])
        for message in reversed(messages):
            if isinstance(message, AIMessage):
                return message, given, isinstance(given, list)
        raise UsageError(f"the tool node found no AIMessage under {self.messages_key!r} in its input")

    def _update(self, answers: list[Any], as_list: bool) -> Any:
        flat: list[Any] = []
        for answer in answers:
            flat.extend(answer) if isinstance(answer, list) else flat.append(answer)
        if all(isinstance(a, ToolMessage) for a in flat):
            return flat if as_list else {self.messages_key: flat}
        out: list[Any] = []
        to_parent: Any = None
        for answer in flat:
            if isinstance(answer, ToolMessage):
                out.append([answer] if as_list else {self.messages_key: [answer]})
            elif _sends_to_parent(answer):
                to_parent = answer if to_parent is None else replace(to_parent, goto=[*to_parent.goto, *answer.goto])
            else:
                out.append(answer)
        return out if to_parent is None else [*out, to_parent]


def _sends_to_parent(answer: Any) -> bool:
    """Whether this is a ``Command`` that sends tasks to the parent graph; only one such can leave a node."""
    graph = getattr(answer, "graph", None)
    return graph is not None and graph == getattr(answer, "PARENT", None) and isinstance(answer.goto, list)
