"""What is remembered of dense prefills: anchors, in a pool bounded in number per edge and in bytes.

An anchor holds, of one segment on one edge, the source's KV (the *base*) and what the target's has more (the
*delta*), keys de-rotated, both in truncated form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from agentflow.cache.kvcmas.lowrank import LowRank, truncate
from agentflow.cache.kvcmas.types import Edge

__all__ = ["Anchor", "AnchorPool", "Features", "make_anchor"]

#: How much the record of an anchor's use fades each time its edge gets a new one.
_FADE = 0.9


class Features(NamedTuple):
    """De-rotated keys and values of a segment, each (layers, tokens, KV heads * head size)."""

    keys: torch.Tensor
    values: torch.Tensor


@dataclass(slots=True, eq=False)
class Anchor:
    """One segment's base and delta on an edge. ``uses`` is how much estimates leaned on it lately."""

    tokens: tuple[int, ...]
    base_keys: LowRank
    base_values: LowRank
    delta_keys: LowRank
    delta_values: LowRank
    uses: float = 1.0
    order: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the four pairs of factors."""
        return sum(m.nbytes for m in (self.base_keys, self.base_values, self.delta_keys, self.delta_values))

    @property
    def full_nbytes(self) -> int:
        """Bytes that the same anchor takes in full dimension, as KVComm keeps it."""
        total = 0
        for matrix in (self.base_keys, self.base_values, self.delta_keys, self.delta_values):
            layers, tokens, rank = matrix.left.shape
            features = rank if matrix.right is None else matrix.right.shape[-1]
            total += layers * tokens * features * matrix.left.element_size()
        return total


def make_anchor(
    tokens: Sequence[int],
    source: Features,
    target: Features,
    *,
    rank: int | None = 32,
    base_rank: int | None = None,
    seed: int = 0,
) -> Anchor:
    """Truncated SVDs of source and target - source; four batched decompositions over the layers.

    ``rank`` is that of the differences and, unless ``base_rank`` is given, of the bases; None keeps full dimension.
    """
    dtype = source.keys.dtype
    lower = rank if base_rank is None else base_rank
    delta_keys = (target.keys.float() - source.keys.float()).to(dtype)
    delta_values = (target.values.float() - source.values.float()).to(dtype)
    return Anchor(
        tuple(tokens),
        truncate(source.keys, lower, seed=seed),
        truncate(source.values, lower, seed=seed),
        truncate(delta_keys, rank, seed=seed),
        truncate(delta_values, rank, seed=seed),
    )


class AnchorPool:
    """At most ``per_edge`` anchors on an edge and ``max_bytes`` in all; the least used goes first.

    An anchor enters with the credit of one estimate that used nothing else. Adding costs O(anchors).
    """

    def __init__(self, *, per_edge: int = 10, max_bytes: int = 256 << 20) -> None:
        self.per_edge = per_edge
        self.max_bytes = max_bytes
        self.nbytes = 0
        self.full_nbytes = 0
        self.evicted = 0
        self.replaced = 0
        self._edges: dict[Edge, list[Anchor]] = {}
        self._made = 0

    def __len__(self) -> int:
        return sum(map(len, self._edges.values()))

    def of(self, edge: Edge) -> Sequence[Anchor]:
        """The edge's anchors, oldest first."""
        return self._edges.get(edge, ())

    @property
    def edges(self) -> Sequence[Edge]:
        """Edges that have anchors."""
        return tuple(self._edges)

    def has(self, edge: Edge, tokens: Sequence[int]) -> bool:
        """Whether the edge has an anchor of exactly these tokens."""
        wanted = tuple(tokens)
        return any(anchor.tokens == wanted for anchor in self.of(edge))

    def add(self, edge: Edge, anchor: Anchor) -> set[Edge]:
        """Take an anchor in, in place of one of the same tokens if there is one; the edges whose anchors changed.

        An anchor larger than the whole pool is not kept.
        """
        if anchor.nbytes > self.max_bytes or self.per_edge < 1:
            return set()
        changed = {edge}
        held = self._edges.setdefault(edge, [])
        for old in held:
            old.uses *= _FADE
        for old in [a for a in held if a.tokens == anchor.tokens]:
            anchor.uses = max(anchor.uses, old.uses)
            self._drop(edge, old)
            self.replaced += 1
        while len(held) >= self.per_edge:
            self._drop(edge, min(held, key=_worth))
            self.evicted += 1
        while self.nbytes + anchor.nbytes > self.max_bytes and (home := self.shrink()) is not None:
            changed.add(home)
        self._made += 1
        anchor.order = self._made
        self._edges.setdefault(edge, held).append(anchor)
        self.nbytes += anchor.nbytes
        self.full_nbytes += anchor.full_nbytes
        return changed

    def shrink(self) -> Edge | None:
        """Drop the least used anchor of all; its edge, or None when there was no anchor."""
        found = [(anchor, edge) for edge, anchors in self._edges.items() for anchor in anchors]
        if not found:
            return None
        victim, home = min(found, key=lambda pair: _worth(pair[0]))
        self._drop(home, victim)
        self.evicted += 1
        return home

    def use(self, shares: Mapping[Anchor, float]) -> None:
        """Note how an estimate leaned on anchors: shares that sum to one."""
        for anchor, share in shares.items():
            anchor.uses += share

    def _drop(self, edge: Edge, anchor: Anchor) -> None:
        held = self._edges[edge]
        held.remove(anchor)
        if not held:
            del self._edges[edge]
        self.nbytes -= anchor.nbytes
        self.full_nbytes -= anchor.full_nbytes


def _worth(anchor: Anchor) -> tuple[float, int]:
    return anchor.uses, anchor.order
