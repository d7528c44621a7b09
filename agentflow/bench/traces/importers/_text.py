"""Texts as token ids: by a tokenizer, or four bytes a token where there is none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from agentflow.bench.traces.spans import Ids

__all__ = ["Encode", "by_bytes", "encoder", "flat", "message_ids"]

#: From text to token ids.
Encode: TypeAlias = Callable[[str], Sequence[int]]

#: Bytes of UTF-8 that count as one token where there is no tokenizer.
BYTES_PER_TOKEN = 4


def by_bytes(text: str) -> Ids:
    """An id for every four bytes: texts that begin alike have ids that do. No real model's ids."""
    data = text.encode("utf-8", "surrogatepass")
    data += b"\0" * (-len(data) % BYTES_PER_TOKEN)
    return np.frombuffer(data, dtype="<u4").astype(np.int64)


def encoder(tokenizer: Encode | None) -> Callable[[str], Ids]:
    """``tokenizer`` with arrays as its result, :func:`by_bytes` for None."""
    if tokenizer is None:
        return by_bytes
    return lambda text: np.asarray(tokenizer(text), dtype=np.int64)


def flat(content: Any) -> str:
    """The text of a message's content: text, or a list of parts of which the texts count."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(str(p.get("text", "")) for p in content if isinstance(p, dict))
    return ""


def message_ids(encode: Callable[[str], Ids], message: Mapping[str, Any]) -> Ids:
    """A chat message as it stands in a prompt: role and text. Each is encoded by itself, so prompts only grow."""
    return encode(f"{message.get('role', 'user')}\n{flat(message.get('content'))}\n")
