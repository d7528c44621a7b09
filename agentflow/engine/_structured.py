"""Structured output: a schema of any kind as a grammar, and the model's text back as an object of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.utils.function_calling import convert_to_json_schema
from pydantic import BaseModel, ValidationError

from agentflow.errors import OutputError, OutputInvalid, OutputTruncated, UsageError

__all__ = ["json_schema_of", "reader", "with_raw"]

_SCHEMA_KEYS = frozenset({"type", "anyOf", "allOf", "oneOf", "$ref", "enum", "const", "properties"})


def json_schema_of(schema: Any) -> dict[str, Any]:
    """The JSON schema of a pydantic class, TypedDict, or JSON schema (also in OpenAI's wrapping)."""
    if isinstance(schema, type) and issubclass(schema, BaseModel):
        return schema.model_json_schema()
    if isinstance(schema, Mapping):
        inner = schema.get("json_schema", schema)
        inner = inner.get("schema", inner)
        if inner.get("type") != "function" and not _SCHEMA_KEYS.isdisjoint(inner):
            return dict(inner)
    try:
        return convert_to_json_schema(schema)
    except (ValueError, TypeError, AttributeError) as error:
        raise UsageError(
            f"no schema for structured output: {schema!r}; give a pydantic class, a TypedDict or a JSON schema"
        ) from error


def reader(schema: Any, *, from_call: bool) -> Callable[[BaseMessage], Any]:
    """A function from answer to object: of the class for a pydantic class, else a dict.

    With ``from_call`` the object is the arguments of the answer's tool call. The function raises
    :class:`~agentflow.errors.OutputTruncated` or :class:`~agentflow.errors.OutputInvalid`.
    """

    def read(message: BaseMessage) -> Any:
        text = str(message.text)
        try:
            if from_call and isinstance(message, AIMessage) and message.tool_calls:
                return _validated(schema, message.tool_calls[0]["args"])
            if from_call and isinstance(message, AIMessage):
                text = "".join(c["args"] or "" for c in message.invalid_tool_calls) or text
                raise ValueError("the answer is no tool call")
            return _validated(schema, json.loads(text))
        except (ValueError, ValidationError, RecursionError) as error:
            raise _explained(error, text, message) from error

    return read


def with_raw(read: Callable[[BaseMessage], Any]) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """The same, from and to LangChain's ``include_raw`` form: an error is reported in it, not raised."""

    def read_raw(answer: Mapping[str, Any]) -> dict[str, Any]:
        raw = answer["raw"]
        try:
            return {"raw": raw, "parsed": read(raw), "parsing_error": None}
        except OutputError as error:
            return {"raw": raw, "parsed": None, "parsing_error": error}

    return read_raw


def _validated(schema: Any, value: Any) -> Any:
    if isinstance(schema, type) and issubclass(schema, BaseModel):
        return schema.model_validate(value)
    wanted = json_schema_of(schema)
    if wanted.get("type") == "object":
        if not isinstance(value, dict):
            raise ValueError(f"an object was asked for, not {type(value).__name__}")
        missing = [name for name in wanted.get("required", ()) if name not in value]
        if missing:
            raise ValueError(f"missing: {', '.join(missing)}")
    return value


def _explained(error: Exception, text: str, message: BaseMessage) -> OutputError:
    if message.response_metadata.get("finish_reason") == "length":
        return OutputTruncated(
            "the answer was cut at max_tokens before its JSON was complete: raise max_tokens, or ask for less"
            f" (it ends in {text[-60:]!r})",
            text=text,
        )
    reason = " ".join(str(error).split())
    return OutputInvalid(f"the answer does not fit the schema: {reason[:500]}", text=text)
