"""The closed set of ways in which a tool call fails, and the messages that tell the model about it."""

from __future__ import annotations

from typing import Any, Literal, get_args

from langchain_core.messages import ToolMessage

__all__ = ["TOOL_ERROR_KINDS", "ToolErrorKind", "Transient", "error_kind", "error_message"]

ToolErrorKind = Literal[
    "unknown_tool", "bad_json", "bad_arguments", "timeout", "cancelled", "error", "too_many", "refused"
]

#: ``unknown_tool`` no tool has that name; ``bad_json`` the arguments are no JSON object; ``bad_arguments`` they do
#: not fit the schema; ``timeout`` the time limit passed; ``cancelled`` the tool cancelled itself; ``error`` it raised;
#: ``too_many`` the call was not run because of a limit; ``refused`` a policy or a person did not allow it.
TOOL_ERROR_KINDS: tuple[ToolErrorKind, ...] = get_args(ToolErrorKind)

_KEY = "agentflow_error_kind"


class Transient(Exception):
    """Raise it (or a subclass) in a tool for a failure that may pass when tried again."""


def error_message(kind: ToolErrorKind, text: str, *, tool: str, call_id: str) -> ToolMessage:
    """The answer to a failed call: ``text`` for the model, marked with its kind for programs."""
    return ToolMessage(
        content=f"Error ({kind}): {text}",
        name=tool,
        tool_call_id=call_id,
        status="error",
        additional_kwargs={_KEY: kind},
    )


def error_kind(message: Any) -> ToolErrorKind | None:
    """How the call that ``message`` answers failed; None for a success, or a failure that the tool itself told."""
    kind = message.additional_kwargs.get(_KEY) if isinstance(message, ToolMessage) else None
    return kind if kind in TOOL_ERROR_KINDS else None
