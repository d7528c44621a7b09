"""A deterministic tokenizer without vocabulary files, for the scripted engine."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["ScriptedTokenizer", "render_tool_call"]

_SPECIAL = {"<|im_start|>": 1 << 25, "<|im_end|>": (1 << 25) + 1, "<|endoftext|>": (1 << 25) + 2}
_SPECIAL_TEXT = {i: s for s, i in _SPECIAL.items()}
_WORD = r" ?\w+| ?[^\w\s]|\n|[^\S\n]+"
_PIECE = re.compile(rf"<\|im_start\|>|<\|im_end\|>|<\|endoftext\|>|{_WORD}")
_PLAIN_PIECE = re.compile(_WORD)
_WIDTH = 3  # bytes per token, so that ids stay below 2**25
_OFFSET = (0, 0, 1 << 8, (1 << 8) + (1 << 16), (1 << 8) + (1 << 16) + (1 << 24))


def render_tool_call(name: str, arguments: Mapping[str, Any]) -> str:
    """A tool call as ChatML models of the Hermes and Qwen families write it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


class ScriptedTokenizer:
    """Tokens are up to three UTF-8 bytes of a word; ids are computed, so nothing is stored and all text fits.

    The chat template writes ``<|im_start|>role\\ncontent<|im_end|>\\n`` per message, tools in the system message.
    """

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The id of ``<|im_end|>``."""
        return frozenset({_SPECIAL["<|im_end|>"]})

    def pieces(self, text: str) -> list[str]:
        """``text`` cut into words, marks and special tokens; encoding them one by one equals encoding ``text``."""
        return _PIECE.findall(text)

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``; the three special tokens are recognised in it."""
        return self._ids(_PIECE.findall(text))

    def encode_plain(self, text: str) -> list[int]:
        """Ids of ``text``, in which nothing is a special token."""
        return self._ids(_PLAIN_PIECE.findall(text))

    def _ids(self, pieces: Sequence[str]) -> list[int]:
        ids: list[int] = []
        for piece in pieces:
            special = _SPECIAL.get(piece)
            if special is not None:
                ids.append(special)
                continue
            data = piece.encode("utf-8", "surrogatepass")
            for i in range(0, len(data), _WIDTH):
                part = data[i : i + _WIDTH]
                ids.append(_OFFSET[len(part)] + int.from_bytes(part, "big"))
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ``ids``; an id that this tokenizer never makes becomes U+FFFD."""
        out = bytearray()
        for i in ids:
            special = _SPECIAL_TEXT.get(i)
            if special is not None:
                out += b"" if skip_special_tokens else special.encode()
            elif 0 <= i < _OFFSET[4]:
                width = 1 if i < _OFFSET[2] else 2 if i < _OFFSET[3] else 3
                out += (i - _OFFSET[width]).to_bytes(width, "big")
            else:
                out += "\N{REPLACEMENT CHARACTER}".encode()
        return out.decode("utf-8", "replace")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The messages in ChatML."""
        out: list[str] = []
        rest = list(messages)
        if tools:
            system = ""
            if rest and rest[0]["role"] == "system":
                system = f"{rest.pop(0)['content']}\n\n"
            listed = "\n".join(json.dumps(t, ensure_ascii=False) for t in tools)
            out.append(f"<|im_start|>system\n{system}# Tools\n<tools>\n{listed}\n</tools><|im_end|>\n")
        for message in rest:
            parts = [message.get("content") or ""]
            for call in message.get("tool_calls") or ():
                function = call["function"]
                parts.append(render_tool_call(function["name"], function["arguments"]))
            body = "\n".join(p for p in parts if p)
            out.append(f"<|im_start|>{message['role']}\n{body}<|im_end|>\n")
        if add_generation_prompt:
            out.append("<|im_start|>assistant\n")
        return "".join(out)
