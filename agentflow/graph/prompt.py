"""Prompts made of private and shared text.

An agent's prompt is its instructions, then messages whose content is a list of parts. A private part is plain
text. A shared part fills a named *slot* that several agents read (the question, the plan, the diff); the
engine keeps its token boundaries exact, so that KV of the same text can be found again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from langchain_core.messages import BaseMessage, HumanMessage, convert_to_messages

from agentflow.errors import UsageError

__all__ = ["Prompt", "PromptPart", "shared", "to_messages"]

#: Private text, or a shared part.
PromptPart: TypeAlias = str | dict[str, Any]
#: What a prompt function may return: text, parts of one user message, whole messages, or a mix of them.
Prompt: TypeAlias = str | dict[str, Any] | BaseMessage | Sequence[str | dict[str, Any] | BaseMessage]


def shared(slot: str, text: str, *, producer: str | None = None) -> dict[str, Any]:
    """A part of a prompt that fills the shared slot ``slot`` with ``text``.

    ``producer`` is the agent that wrote it, None for text from outside. In an :class:`AgentGraph` it may be
    left out when an agent writes the state key of the same name.
    """
    if not isinstance(slot, str) or not slot.strip():
        raise UsageError(f"a shared slot needs a name, got {slot!r}")
    if not isinstance(text, str):
        raise UsageError(f"shared slot {slot!r}: the text must be a string, not {type(text).__name__}")
    part: dict[str, Any] = {"type": "text", "text": text, "slot": slot}
    if producer is not None:
        part["producer"] = producer
    return part


def to_messages(prompt: Prompt, *, producers: Mapping[str, str] | None = None) -> list[BaseMessage]:
    """The messages that a prompt stands for; neighbouring parts become one user message.

    ``producers`` names the agent behind a slot whose part does not name one. Raises
    :class:`~agentflow.errors.UsageError` for anything that is no prompt, and for an empty one.
    """
    items: Sequence[Any] = prompt if isinstance(prompt, list | tuple) else [prompt]
    messages: list[BaseMessage] = []
    parts: list[PromptPart] = []
    for item in items:
        if isinstance(item, str):
            parts.append(item)
        elif isinstance(item, Mapping) and item.get("type") == "text" and isinstance(item.get("text"), str):
            parts.append(_with_producer(dict(item), producers or {}))
        elif isinstance(item, BaseMessage) or (isinstance(item, Mapping) and "role" in item):
            _close(parts, messages)
            messages.append(_message(item))
        else:
            got = f"{str(item)[:200]!r}" if isinstance(item, Mapping) else type(item).__name__
            raise UsageError(f"a prompt is made of strings, shared(...) parts and messages; got {got}")
    _close(parts, messages)
    if not messages:
        raise UsageError("the prompt is empty: return at least one non-empty string, part or message")
    return messages


def _message(item: BaseMessage | Mapping[str, Any]) -> BaseMessage:
    if isinstance(item, BaseMessage):
        return item
    try:
        return convert_to_messages([dict(item)])[0]
    except (ValueError, TypeError, KeyError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(f"a message of the prompt cannot be read, {str(item)[:200]}: {reason}") from error


def _with_producer(part: dict[str, Any], producers: Mapping[str, str]) -> dict[str, Any]:
    slot = part.get("slot")
    if slot is not None and part.get("producer") is None and slot in producers:
        part["producer"] = producers[slot]
    return part


def _close(parts: list[PromptPart], messages: list[BaseMessage]) -> None:
    """Turn the collected parts into one user message."""
    filled = [p for p in parts if (p if isinstance(p, str) else p.get("text"))]
    parts.clear()
    if not filled:
        return
    if all(isinstance(p, str) for p in filled):
        messages.append(HumanMessage("".join(str(p) for p in filled)))
        return
    content = [{"type": "text", "text": p} if isinstance(p, str) else p for p in filled]
    messages.append(HumanMessage(content=list(content)))
