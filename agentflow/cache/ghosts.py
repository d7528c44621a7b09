"""Memory of what was evicted, to tell later which evictions were regretted.

A ghost is an evicted node without its KV: the tokens it held and the decision that evicted it. When a later
call computes tokens anew that a ghost held under the same prefix, the eviction is regretted.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["Ghosts", "Regret", "path_hash"]

Tokens = npt.NDArray[np.int64]
_BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, so that multiplication mod 2**64 loses nothing
_CHUNK = 4096


def _powers(n: int) -> npt.NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        return np.cumprod(np.concatenate([[np.uint64(1)], np.full(n, _BASE)]), dtype=np.uint64)


_POWERS = _powers(_CHUNK)


def path_hash(parent: int, tokens: Tokens) -> int:
    """Hash of a token path from the hash of its beginning and the tokens that follow.

    A polynomial mod 2**64, so that it does not depend on where the path is cut into nodes. About 2 us per
    thousand tokens.
    """
    value = np.uint64(parent)
    with np.errstate(over="ignore"):
        for start in range(0, len(tokens), _CHUNK):
            part = tokens[start : start + _CHUNK].astype(np.uint64) + np.uint64(1)
            n = len(part)
            value = value * _POWERS[n] + np.dot(part, _POWERS[:n][::-1])
    return int(value)


class Regret(NamedTuple):
    """Tokens that decision ``seq`` evicted and that had to be computed again."""

    seq: int
    tokens: int


class _Ghost(NamedTuple):
    tokens: Tokens
    end_hash: int
    seq: int


class Ghosts:
    """The newest ``limit`` evicted nodes, and at most ``token_limit`` of their tokens (8 bytes each)."""

    def __init__(self, limit: int = 8_192, token_limit: int = 2_000_000) -> None:
        self.limit = limit
        self.token_limit = token_limit
        self.tokens_held = 0
        self._ghosts: OrderedDict[tuple[int, int], _Ghost] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ghosts)

    def evicted(self, parent_hash: int, tokens: Tokens, seq: int) -> None:
        """Remember a node that decision ``seq`` evicted. ``tokens`` are its own, without its prefix's."""
        if not len(tokens):
            return
        key = (parent_hash, int(tokens[0]))
        self._forget(key)
        self._ghosts[key] = _Ghost(tokens, path_hash(parent_hash, tokens), seq)
        self.tokens_held += len(tokens)
        while len(self._ghosts) > self.limit or self.tokens_held > self.token_limit:
            self._forget(next(iter(self._ghosts)))

    def computed(self, parent_hash: int, tokens: Tokens) -> list[Regret]:
        """Tell that ``tokens`` were computed after the path of ``parent_hash``; returns what that regrets."""
        out: list[Regret] = []
        while len(tokens):
            ghost = self._forget((parent_hash, int(tokens[0])))
            if ghost is None:
                break
            n = min(len(ghost.tokens), len(tokens))
            differ = np.flatnonzero(ghost.tokens[:n] != tokens[:n])
            common = int(differ[0]) if len(differ) else n
            out.append(Regret(ghost.seq, common))
            if common < len(ghost.tokens):
                break
            parent_hash, tokens = ghost.end_hash, tokens[common:]
        return out

    def clear(self) -> None:
        """Forget all."""
        self._ghosts.clear()
        self.tokens_held = 0

    def _forget(self, key: tuple[int, int]) -> _Ghost | None:
        ghost = self._ghosts.pop(key, None)
        if ghost is not None:
            self.tokens_held -= len(ghost.tokens)
        return ghost
