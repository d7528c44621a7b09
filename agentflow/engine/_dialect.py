"""What a model's chat template can say, found out by trying, and the same message said otherwise where it cannot."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from agentflow.engine.base import Tokenizer
from agentflow.errors import BadRequest

__all__ = ["Dialect"]

_PROBE = "agentflow_probe"
_TOOL = {
    "type": "function",
    "function": {"name": _PROBE, "description": "d", "parameters": {"type": "object", "properties": {}}},
}
_CALL = {"id": "callprobe", "type": "function", "function": {"name": _PROBE, "arguments": {}}}
_USER = {"role": "user", "content": "u"}


class Dialect:
    """Rewrites messages for templates that know no tools, no tool messages or no system message.

    Each ability is probed once per model, by rendering a short conversation. ``tails`` of a role is the text
    that the template writes after a message's content.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tails: dict[str, str] = {}
        self._lock = threading.Lock()

    @cached_property
    def lists_tools(self) -> bool:
        """Whether the template writes the tools it is given."""
        return _PROBE in (self._try([_USER], tools=[_TOOL]) or "")

    @cached_property
    def writes_calls(self) -> bool:
        """Whether the template writes the calls of an assistant message."""
        asked = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
        return _PROBE in (self._try([_USER, asked]) or "")

    @cached_property
    def takes_tool_messages(self) -> bool:
        """Whether the template writes messages of role ``tool``."""
        asked = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
        answer = {"role": "tool", "content": _PROBE, "tool_call_id": "callprobe", "name": "t"}
        if not self.writes_calls:
            asked = {"role": "assistant", "content": "a"}
        return (self._try([_USER, asked, answer]) or "").count(_PROBE) >= (2 if self.writes_calls else 1)

    @cached_property
    def takes_system(self) -> bool:
        """Whether the template writes system messages."""
        return _PROBE in (self._try([{"role": "system", "content": _PROBE}, _USER]) or "")

    @cached_property
    def splits(self) -> bool:
        """Whether text tokenised piece by piece decodes to the text (some tokenizers begin each with a space)."""
        tokenizer = self._tokenizer
        return tokenizer.decode([*tokenizer.encode("a"), *tokenizer.encode("b")]) == "ab"

    def tail(self, role: str) -> str:
        """What the template writes after the content of a message of ``role``; empty where it cannot be told."""
        with self._lock:
            if role not in self._tails:
                before: list[dict[str, Any]] = [] if role in ("user", "system") else [_USER]
                text = self._try([*before, {"role": role, "content": _PROBE}], generation=False) or ""
                self._tails[role] = text.rpartition(_PROBE)[2] if _PROBE in text else ""
            return self._tails[role]

    def adapt(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
    ) -> tuple[list[dict[str, Any]], Sequence[Mapping[str, Any]] | None]:
        """The messages and tools to give to the template. Contents are lists of parts, before and after."""
        out = [dict(m) for m in messages]
        if tools and not self.lists_tools:
            _add_to_system(out, _tool_instructions(tools))
            tools = None
        for message in out:
            if message.get("tool_calls") and not self.writes_calls:
                written = "\n".join(_written(c) for c in message.pop("tool_calls"))
                glue = "\n" if any(p["text"] for p in message["content"]) else ""
                message["content"] = [*message["content"], {"text": glue + written}]
            if message["role"] == "tool" and not self.takes_tool_messages:
                message["role"] = "user"
                message["content"] = [
                    {"text": "<tool_response>\n"},
                    *message["content"],
                    {"text": "\n</tool_response>"},
                ]
        if any(m["role"] == "system" for m in out) and not self.takes_system:
            out = _without_system(out)
        return out, tools

    def _try(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        generation: bool = True,
    ) -> str | None:
        try:
            return self._tokenizer.render(messages, tools=tools, add_generation_prompt=generation)
        except BadRequest:
            return None


def _tool_instructions(tools: Sequence[Mapping[str, Any]]) -> str:
    listed = "\n".join(json.dumps(t, ensure_ascii=False) for t in tools)
    return (
        "You can call these tools:\n<tools>\n"
        f"{listed}\n</tools>\n"
        "To call one, answer with its name and arguments as JSON:\n"
        '<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>'
    )


def _written(call: Mapping[str, Any]) -> str:
    function = {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
    return f"<tool_call>\n{json.dumps(function, ensure_ascii=False)}\n</tool_call>"


def _add_to_system(messages: list[dict[str, Any]], text: str) -> None:
    if messages and messages[0]["role"] == "system":
        messages[0]["content"] = [*messages[0]["content"], {"text": "\n\n"}, {"text": text}]
    else:
        messages.insert(0, {"role": "system", "content": [{"text": text}]})


def _without_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each system message becomes the beginning of the user message that follows it, or a user message."""
    out: list[dict[str, Any]] = []
    waiting: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "system":
            waiting += [*message["content"], {"text": "\n\n"}]
        elif waiting and message["role"] == "user":
            out.append({**message, "content": [*waiting, *message["content"]]})
            waiting = []
        else:
            out += [{"role": "user", "content": waiting[:-1]}] if waiting else []
            waiting = []
            out.append(message)
    return [*out, {"role": "user", "content": waiting[:-1]}] if waiting else out
