"""Tool calls in a model's text: reading them in the spellings that models use, and forcing them by grammar.

Reading never raises: what looks like a call and cannot be read comes back as a :class:`BrokenCall`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

__all__ = ["BrokenCall", "ContentGate", "Parsed", "ParsedCall", "parse_tool_calls", "tool_call_schema"]

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
_MISTRAL = "[TOOL_CALLS]"
_MARKERS = (_OPEN, _PYTHON_TAG, _MISTRAL)
_FENCE = re.compile(r"^```(?:json)?\s*\n(.*?)\n?```$", re.DOTALL)
_NAME = re.compile(r'"name"\s*:\s*"([^"\\]{1,200})"')
#: Longest piece of unreadable text that a broken call quotes, in characters.
QUOTE_LIMIT = 4000


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A tool call that can be read. Whether the tool exists and takes these arguments is not known here."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class BrokenCall:
    """Text that was meant as a tool call. ``text`` begins with its marker; ``name`` is the tool, where legible."""

    text: str
    error: str
    name: str | None = None


class Parsed(NamedTuple):
    """A model's text taken apart: what is left for people to read, and the calls in order."""

    content: str
    calls: tuple[ParsedCall, ...] = ()
    broken: tuple[BrokenCall, ...] = ()


def parse_tool_calls(text: str) -> Parsed:
    """Take the tool calls out of ``text``.

    Read are ``<tool_call>{...}</tool_call>`` (Hermes, Qwen), ``<|python_tag|>{...}`` (Llama),
    ``[TOOL_CALLS][{...}]`` (Mistral), and a text that is nothing but JSON with a name and arguments. Cost is
    linear in the text.
    """
    if _OPEN in text:
        return _hermes(text)
    for marker in (_PYTHON_TAG, _MISTRAL):
        before, found, after = text.partition(marker)
        if found:
            calls, broken = _block(after, marker)
            return Parsed(before.rstrip(), calls, broken)
    return _bare(text)


class ContentGate:
    """Lets streamed text through as long as it cannot be the beginning of a tool call.

    All that :meth:`feed` returned is a prefix of the content that :func:`parse_tool_calls` finds in the whole.
    """

    def __init__(self) -> None:
        self._held = ""
        self._passed = 0
        self._shut = False

    @property
    def passed(self) -> int:
        """Characters let through so far."""
        return self._passed

    def feed(self, text: str) -> str:
        """Take new text in; what is certain to be content comes out."""
        self._held += text
        if self._shut:
            return ""
        start = self._held.lstrip()
        if self._passed == 0 and (not start or start[0] in "{[`"):
            return ""  # may be a bare call: known only at the end
        cut = len(self._held)
        for marker in _MARKERS:
            if (at := self._held.find(marker)) >= 0:
                self._shut = True
                cut = min(cut, at)
            else:
                cut = min(cut, len(self._held) - _overlap(self._held, marker))
        out = self._held[:cut].rstrip()
        self._held = self._held[len(out) :]
        self._passed += len(out)
        return out


def tool_call_schema(tools: Sequence[Mapping[str, Any]], name: str | None = None) -> dict[str, Any]:
    """A JSON schema for one call of tool ``name``, or of any of ``tools`` (OpenAI form).

    Definitions of the tools' schemas are moved to the root, where their references then point.
    """
    definitions: dict[str, Any] = {}
    options: list[dict[str, Any]] = []
    for number, tool in enumerate(t["function"] for t in tools):
        if name is not None and tool["name"] != name:
            continue
        parameters = dict(tool.get("parameters") or {"type": "object", "properties": {}})
        for keyword in ("$defs", "definitions"):
            for key, value in (parameters.pop(keyword, None) or {}).items():
                definitions[f"t{number}_{key}"] = _moved(value, number)
        options.append(
            {
                "type": "object",
                "properties": {"name": {"const": tool["name"]}, "arguments": _moved(parameters, number)},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    schema: dict[str, Any] = dict(options[0]) if len(options) == 1 else {"anyOf": options}
    if definitions:
        schema["$defs"] = definitions
    return schema


def _moved(schema: Any, number: int) -> Any:
    if isinstance(schema, list):
        return [_moved(s, number) for s in schema]
    if not isinstance(schema, Mapping):
        return schema
    out: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str):
            out[key] = re.sub(r"^#/(?:\$defs|definitions)/", f"#/$defs/t{number}_", value)
        else:
            out[key] = _moved(value, number)
    return out


def _hermes(text: str) -> Parsed:
    content: list[str] = []
    calls: list[ParsedCall] = []
    broken: list[BrokenCall] = []
    at = 0
    while (start := text.find(_OPEN, at)) >= 0:
        content.append(text[at:start])
        inner = start + len(_OPEN)
        end = text.find(_CLOSE, inner)
        following = text.find(_OPEN, inner)
        if end < 0 or 0 <= following < end:  # never closed, or closed only after the next one began
            end = following if following >= 0 else len(text)
            at = end
        else:
            at = end + len(_CLOSE)
        good, bad = _block(text[inner:end], _OPEN)
        calls += good
        broken += bad
    content.append(text[at:])
    return Parsed(_joined(content), tuple(calls), tuple(broken))


def _joined(content: list[str]) -> str:
    """Text around calls: as it came before the first one, without the blank lines between the calls."""
    rest = "\n".join(s for c in content[1:] if (s := c.strip()))
    return "\n".join(s for s in (content[0].rstrip(), rest) if s)


def _block(body: str, marker: str) -> tuple[tuple[ParsedCall, ...], tuple[BrokenCall, ...]]:
    """The calls in the text that follows a marker: one object, several, or a list of them."""
    calls: list[ParsedCall] = []
    try:
        for value in _values(body):
            items = value if isinstance(value, list) else [value]
            calls += [_call(item) for item in items]
        if not calls:
            raise ValueError("no JSON object where a call was expected")
    except (ValueError, RecursionError) as error:
        name = found.group(1) if (found := _NAME.search(body)) else None
        text = marker + body.strip()
        if len(text) > QUOTE_LIMIT:
            text = f"{text[:QUOTE_LIMIT]}..."
        return tuple(calls), (BrokenCall(text, str(error) or type(error).__name__, name),)
    return tuple(calls), ()


def _values(body: str) -> Iterator[Any]:
    decoder = json.JSONDecoder(strict=False)
    at = 0
    while True:
        while at < len(body) and body[at] in " \t\r\n;,":
            at += 1
        if at == len(body):
            return
        value, at = decoder.raw_decode(body, at)
        yield value


def _call(value: Any) -> ParsedCall:
    if not isinstance(value, dict):
        raise ValueError(f"a call is a JSON object, not {type(value).__name__}")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise ValueError("the call names no tool")
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        arguments = json.loads(arguments) if arguments.strip() else {}
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments are a JSON object, not {type(arguments).__name__}")
    return ParsedCall(name, arguments)


def _bare(text: str) -> Parsed:
    body = text.strip()
    if fenced := _FENCE.match(body):
        body = fenced.group(1).strip()
    if not body.startswith(("{", "[")):
        return Parsed(text.rstrip())
    try:
        value = json.loads(body, strict=False)
        items = value if isinstance(value, list) else [value]
        if not items or not all(
            isinstance(i, dict) and "name" in i and ("arguments" in i or "parameters" in i) for i in items
        ):
            return Parsed(text.rstrip())
        return Parsed("", tuple(_call(i) for i in items))
    except (ValueError, RecursionError):
        return Parsed(text.rstrip())


def _overlap(text: str, marker: str) -> int:
    """Length of the longest end of ``text`` that begins ``marker``."""
    for n in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:n]):
            return n
    return 0
