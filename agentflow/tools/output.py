"""Long tool output, cut in the middle."""

from __future__ import annotations

from typing import Any

__all__ = ["clip", "clip_content"]


def clip(text: str, limit: int) -> str:
    """``text`` cut to its first and last ``limit // 2`` characters, with a line between that says how much is gone."""
    if len(text) <= limit:
        return text
    head = limit // 2
    tail = limit - head
    gone = len(text) - limit
    return f"{text[:head]}\n[... {gone} characters left out ...]\n{text[len(text) - tail :]}"


def clip_content(content: Any, limit: int) -> Any:
    """Message content with each of its texts clipped; blocks that hold no text are left as they are."""
    if isinstance(content, str):
        return clip(content, limit)
    if not isinstance(content, list):
        return content
    out: list[Any] = []
    for block in content:
        if isinstance(block, str):
            out.append(clip(block, limit))
        elif isinstance(block, dict) and isinstance(block.get("text"), str):
            out.append({**block, "text": clip(block["text"], limit)})
        else:
            out.append(block)
    return out
