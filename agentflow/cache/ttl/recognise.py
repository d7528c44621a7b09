"""Which tool an answer calls, read from its text: for clients that only send requests."""

from __future__ import annotations

import json
import re
from typing import Any

from agentflow.cache.ttl.tools import ToolKey

__all__ = ["command_word", "recognise_tool"]

_FENCE = re.compile(r"```[ \t]*(?:bash|sh|shell|console|zsh)[ \t]*\r?\n(.*?)```", re.DOTALL | re.IGNORECASE)
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=(?:\"[^\"]*\"|'[^']*'|\S*)\s+")
#: Words that run another command, which is the one that counts.
_WRAPPERS = frozenset({"sudo", "time", "env", "nohup", "exec", "command", "nice", "stdbuf", "xargs"})
_LIMIT = 65_536
_MAX_NAME = 128


def recognise_tool(text: str) -> ToolKey | None:
    """The tool that ``text`` calls, None when it calls none or it is not clear which.

    Understood are a fenced bash block (exactly one: the tool is ``bash``, its variant the command), and JSON
    objects with a name and arguments, bare, in ``<tool_call>`` tags or fenced, and OpenAI's ``tool_calls``. Of
    several JSON calls the first counts. Only the last 65,536 characters are read. Never raises.
    """
    text = text[-_LIMIT:]
    blocks = _FENCE.findall(text)
    if blocks:
        word = command_word(blocks[0]) if len(blocks) == 1 else None
        return ToolKey("bash", word) if word is not None else None
    return _json_call(text)


def command_word(command: str) -> str | None:
    """What a shell command runs: its first word after ``cd``, assignments and wrappers; for ``python -m`` the module.

    None for a command without any word.
    """
    parts = [p for p in re.split(r"&&|\|\||;|\n|\|", command) if p.strip() and not p.strip().startswith("#")]
    fallback: str | None = None
    for part in parts:
        part = part.strip()
        while (found := _ASSIGNMENT.match(part)) is not None:
            part = part[found.end() :]
        words = part.split()
        while words and words[0] in _WRAPPERS:
            words = words[1:]
            while words and (words[0].startswith("-") or "=" in words[0]):
                words = words[1:]
        if not words:
            continue
        word = words[0].rsplit("/", 1)[-1][:_MAX_NAME]
        if word == "timeout" and len(words) > 2:
            word = words[2].rsplit("/", 1)[-1][:_MAX_NAME]
        if word.startswith("python") and len(words) > 2 and words[1] == "-m":
            word = words[2][:_MAX_NAME]
        if word not in ("cd", "export", "source", ".", "set"):
            return word or None
        fallback = fallback or word
    return fallback


def _json_call(text: str) -> ToolKey | None:
    decoder = json.JSONDecoder()
    at = 0
    for _ in range(64):  # a text full of braces costs no more than that many tries
        at = text.find("{", at)
        if at < 0:
            return None
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            at += 1
            continue
        found = _call_in(value)
        if found is not None:
            return found
        at = end
    return None


def _call_in(value: Any) -> ToolKey | None:
    if not isinstance(value, dict):
        return None
    calls = value.get("tool_calls")
    if isinstance(calls, list) and calls:
        return _call_in(calls[0])
    function = value.get("function")
    if isinstance(function, dict):
        return _call_in(function)
    name = value.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME:
        return None
    arguments = next((value[k] for k in ("arguments", "parameters", "args", "input") if k in value), None)
    if arguments is None:
        return None
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return ToolKey(name)
    command = arguments.get("command", arguments.get("cmd")) if isinstance(arguments, dict) else None
    return ToolKey(name, command_word(command[:_LIMIT]) if isinstance(command, str) else None)
