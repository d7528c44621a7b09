"""LangChain messages and the plain dicts that prompts are built of."""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import deepcopy
from functools import lru_cache
from typing import Any, Literal, TypeAlias

from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    InvalidToolCall,
    SystemMessage,
    ToolMessage,
)
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.messages.tool import ToolCall, ToolCallChunk

from agentflow.engine.base import Completion, new_id
from agentflow.engine.tool_calls import QUOTE_LIMIT, BrokenCall, Parsed, parse_tool_calls
from agentflow.errors import BadRequest

__all__ = ["Expected", "METADATA_RAW", "METADATA_TOKENS", "answer_chunk", "answer_message", "parsed", "to_dicts"]

#: Keys of an answer's ``response_metadata``: its token ids, and its text where the content is not all of it.
METADATA_TOKENS = "token_ids"
METADATA_RAW = "raw_text"
#: Content blocks of assistant messages that say again what other fields hold, or what is not for the model.
_SKIPPED = frozenset(
    {"tool_use", "tool_call", "tool_call_chunk", "invalid_tool_call", "function_call", "reasoning", "thinking"}
)

#: What an answer may hold: only text, text and tool calls, or (forced by grammar) one tool call.
Expected: TypeAlias = Literal["text", "calls", "call"]

parsed = lru_cache(maxsize=1024)(parse_tool_calls)


def to_dicts(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """The messages as OpenAI writes them, ready for ``PromptBuilder``.

    Raises :class:`~agentflow.errors.BadRequest` for content that is no text, naming the message.
    """
    return [_to_dict(m, number) for number, m in enumerate(messages)]


def _to_dict(message: BaseMessage, number: int) -> dict[str, Any]:
    role = _role(message)
    out: dict[str, Any] = {"role": role, "content": _content(message, role, number)}
    if isinstance(message, AIMessage):
        if message.tool_calls:
            out["tool_calls"] = [
                {"id": c["id"], "type": "function", "function": {"name": c["name"], "arguments": c["args"]}}
                for c in message.tool_calls
            ]
        if message.invalid_tool_calls:
            broken = "\n".join(c["args"] or "" for c in message.invalid_tool_calls)
            content = out["content"]
            out["content"] = [*([{"text": content}] if isinstance(content, str) else content), {"text": broken}]
        generated = _generated(message)
        if generated is not None:
            out["generated"] = generated
    elif isinstance(message, ToolMessage):
        out["tool_call_id"] = message.tool_call_id
    if message.name:
        out["name"] = message.name
    return out


def _role(message: BaseMessage) -> str:
    if isinstance(message, SystemMessage):
        return "system"
    if isinstance(message, HumanMessage):
        return "user"
    if isinstance(message, AIMessage):
        return "assistant"
    if isinstance(message, ToolMessage | FunctionMessage):
        return "tool"
    if isinstance(message, ChatMessage):
        return "system" if message.role == "developer" else message.role
    raise BadRequest(
        f"cannot send a {type(message).__name__} to a model: use a system, user, assistant or tool message"
    )


def _content(message: BaseMessage, role: str, number: int) -> str | list[dict[str, Any]]:
    if isinstance(message.content, str):
        return message.content
    parts: list[dict[str, Any]] = []
    for block in message.content:
        if isinstance(block, str):
            parts.append({"type": "text", "text": block})
            continue
        kind = block.get("type")
        if kind == "text" and isinstance(block.get("text"), str):
            parts.append({k: v for k, v in block.items() if k in ("type", "text", "slot", "producer")})
        elif not (role == "assistant" and kind in _SKIPPED):
            raise BadRequest(
                f"message {number} ({role}) holds content of type {kind!r}, and this model takes text only:"
                " leave it out, or put what the model needs of it into words"
            )
    return parts


def _generated(message: AIMessage) -> dict[str, Any] | None:
    """The answer as it was generated, where the message still says the same."""
    ids = message.response_metadata.get(METADATA_TOKENS)
    if not isinstance(ids, list) or not isinstance(message.content, str):
        return None
    raw = message.response_metadata.get(METADATA_RAW)
    if raw is None:
        same = not message.tool_calls and not message.invalid_tool_calls
        return {"text": message.content, "token_ids": ids} if same else None
    taken = parsed(raw)
    calls = [(c["name"], c["args"]) for c in message.tool_calls]
    if taken.content != message.content or calls != [(c.name, c.arguments) for c in taken.calls]:
        return None
    return {"text": raw, "token_ids": ids}


def answer_message(completion: Completion, raw: str, expected: Expected) -> AIMessage:
    """A completion as a message. ``raw`` is its text with special tokens."""
    taken = _take(completion, raw, expected)
    return AIMessage(
        content=_readable(taken, completion, raw),
        tool_calls=[
            # A copy: what was parsed is kept, and a message's arguments may be changed by whoever holds it.
            ToolCall(name=c.name, args=deepcopy(c.arguments), id=new_id("call"), type="tool_call")
            for c in taken.calls
        ],
        invalid_tool_calls=[
            InvalidToolCall(name=b.name, args=b.text, id=new_id("call"), error=b.error, type="invalid_tool_call")
            for b in taken.broken
        ],
        usage_metadata=_usage(completion),
        response_metadata=_metadata(completion, taken, raw),
    )


def answer_chunk(completion: Completion, raw: str, expected: Expected, *, passed: int) -> AIMessageChunk:
    """The last chunk of a streamed answer, of whose content ``passed`` characters were sent before."""
    taken = _take(completion, raw, expected)
    chunks = [
        ToolCallChunk(
            name=c.name,
            args=json.dumps(c.arguments, ensure_ascii=False),
            id=new_id("call"),
            index=i,
            type="tool_call_chunk",
        )
        for i, c in enumerate(taken.calls)
    ]
    # The text of a broken call begins with its marker, which no reader of partial JSON takes for a call.
    chunks += [
        ToolCallChunk(name=b.name, args=b.text, id=new_id("call"), index=len(chunks) + i, type="tool_call_chunk")
        for i, b in enumerate(taken.broken)
    ]
    return AIMessageChunk(
        content=_readable(taken, completion, raw)[passed:],
        tool_call_chunks=chunks,
        usage_metadata=_usage(completion),
        response_metadata=_metadata(completion, taken, raw),
        chunk_position="last",
    )


def _take(completion: Completion, raw: str, expected: Expected) -> Parsed:
    if expected == "text":
        return Parsed(completion.text)
    taken = parsed(raw)
    if expected == "call" and not taken.calls:
        why = "cut at max_tokens" if completion.finish == "length" else "the answer is no tool call"
        return Parsed("", (), taken.broken or (BrokenCall(f"<tool_call>{raw[:QUOTE_LIMIT]}", why),))
    return taken


def _readable(taken: Parsed, completion: Completion, raw: str) -> str:
    """The content of a message: what is left beside the calls, without special tokens."""
    return taken.content if taken.calls or taken.broken or raw == completion.text else completion.text


def _usage(completion: Completion) -> UsageMetadata:
    usage = completion.usage
    return UsageMetadata(
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        input_token_details=InputTokenDetails(cache_read=usage.cached),
    )


def _metadata(completion: Completion, taken: Parsed, raw: str) -> dict[str, Any]:
    timings = completion.timings
    metadata: dict[str, Any] = {
        "finish_reason": completion.finish,
        "model_name": completion.model,
        "model_provider": "agentflow",
        "request_id": completion.request_id,
        "timings": {"queue": timings.queue, "first_token": timings.first_token, "total": timings.total},
        "cached_tokens": {
            "device": completion.usage.cached_device,
            "host": completion.usage.cached_host,
            "corrected": completion.usage.corrected,
        },
        "decisions": [d.to_json() for d in completion.decisions],
        METADATA_TOKENS: list(completion.token_ids),
    }
    if raw != taken.content:
        metadata[METADATA_RAW] = raw
    return metadata
