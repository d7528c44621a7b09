"""The prompts of a trace as block hashes: compact ids in order of first appearance."""

from __future__ import annotations

from agentflow.bench.traces.model import Content

__all__ = ["BlockIds"]

#: Part of a block: span id, and its tokens from and to.
_Piece = tuple[str, int, int]


class BlockIds:
    """Numbers blocks so that two prompts have an id in common where they agree up to that block's end.

    A last block that is not full is a block of its own.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._ids: dict[tuple[int, tuple[_Piece, ...]], int] = {}

    def of(self, content: Content) -> list[int]:
        """Ids of the blocks of a prompt."""
        ids: list[int] = []
        pieces: list[_Piece] = []
        room = self.block_size
        for span in content:
            at = 0
            while at < span.tokens:
                n = min(room, span.tokens - at)
                pieces.append((span.id, at, at + n))
                at, room = at + n, room - n
                if not room:
                    self._close(ids, pieces)
                    room = self.block_size
        if pieces:
            self._close(ids, pieces)
        return ids

    def _close(self, ids: list[int], pieces: list[_Piece]) -> None:
        key = (ids[-1] if ids else -1, tuple(pieces))
        ids.append(self._ids.setdefault(key, len(self._ids)))
        pieces.clear()
