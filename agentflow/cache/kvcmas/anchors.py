"""What is remembered of dense prefills: anchors, in a pool bounded in number per edge and in bytes.

An anchor holds, of one segment on one edge, the source's KV (the *base*) and what the target's has more (the
*delta*), keys de-rotated, both in truncated form.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from agentflow.cache.kvcmas.lowrank import LowRank, truncate, truncated_nbytes
from agentflow.cache.kvcmas.types import Edge

__all__ = ["Anchor", "AnchorPool", "Features", "anchor_nbytes", "make_anchor"]

#: How much the record of an anchor's use fades each time its edge gets a new one.
_FADE = 0.9
#: How many refusals of an edge another has to go without use before it gives way.
_PATIENCE = 3
#: Edges whose refusals are remembered.
_REMEMBERED = 4096


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
    def matrices(self) -> tuple[LowRank, LowRank, LowRank, LowRank]:
        """Keys and values of the base, then of the delta."""
        return self.base_keys, self.base_values, self.delta_keys, self.delta_values

    @property
    def nbytes(self) -> int:
        """Bytes of the four pairs of factors."""
        return sum(m.nbytes for m in self.matrices)

    @property
    def form(self) -> tuple[int, int]:
        """Layers, and features of each token."""
        left, right = self.base_keys
        return left.shape[0], (left if right is None else right).shape[-1]

    @property
    def finite(self) -> bool:
        """Whether no factor has a NaN or an infinity."""
        return all(bool(torch.isfinite(f).all()) for m in self.matrices for f in m if f is not None)

    @property
    def full_nbytes(self) -> int:
        """Bytes that the same anchor takes in full dimension, as KVComm keeps it."""
        total = 0
        for matrix in self.matrices:
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


def anchor_nbytes(source: Features, *, rank: int | None, base_rank: int | None) -> int:
    """Bytes of the anchor that :func:`make_anchor` would make."""
    lower = rank if base_rank is None else base_rank
    bases = sum(truncated_nbytes(matrix, lower) for matrix in source)
    return bases + 2 * truncated_nbytes(source.keys, rank)


class _Plan(NamedTuple):
    """What goes for a new anchor of an edge: anchors of the same tokens, those beyond the edge's number, and, for want
    of room, other anchors with their edges, and whole edges."""

    replaced: Sequence[Anchor]
    surplus: Sequence[Anchor]
    singles: Sequence[tuple[Edge, Anchor]]
    edges: Sequence[Edge]


class AnchorPool:
    """At most ``per_edge`` anchors on an edge, and ``max_bytes`` for all with what estimators hold ``beside`` them.

    An edge is of no use below ``least`` anchors, so with its first one it claims room for all of them, and none goes
    below by eviction. Room is made by the least used anchors that edges can spare. An edge that has fewer than
    ``least`` displaces whole edges too, the least recently used first, but only such as were not used since it was
    refused ``_PATIENCE`` times: edges in use stay, whatever their number, and edges out of use go. Else the anchor is
    refused. An anchor enters with the credit of one estimate that used nothing else. Adding costs O(anchors).
    """

    def __init__(self, *, per_edge: int = 10, max_bytes: int = 256 << 20, least: int = 1) -> None:
        self.per_edge = per_edge
        self.max_bytes = max_bytes
        self.least = max(1, min(least, per_edge))
        self.nbytes = 0
        self.full_nbytes = 0
        self.evicted = 0
        self.replaced = 0
        self.refused = 0
        #: Bytes of each edge's fit. An edge that lost anchors for want of room is not in it: its fit has to go.
        self.beside: dict[Edge, int] = {}
        self._fit_size = 0.0  # of the last fit, in anchors
        self._edges: dict[Edge, list[Anchor]] = {}
        self._made = 0
        self._now = 0
        self._touched: dict[Edge, int] = {}
        self._refusals: OrderedDict[Edge, deque[int]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._edges.values()))

    def of(self, edge: Edge) -> Sequence[Anchor]:
        """The edge's anchors, oldest first."""
        return self._edges.get(edge, ())

    @property
    def edges(self) -> Sequence[Edge]:
        """Edges that have anchors."""
        return tuple(self._edges)

    @property
    def short(self) -> int:
        """How many edges have anchors, but fewer than ``least``."""
        return sum(len(held) < self.least for held in self._edges.values())

    @property
    def form(self) -> tuple[int, int] | None:
        """Layers and features of the anchors, None when there are none."""
        return next(iter(self._edges.values()))[0].form if self._edges else None

    def has(self, edge: Edge, tokens: Sequence[int]) -> bool:
        """Whether the edge has an anchor of exactly these tokens."""
        wanted = tuple(tokens)
        return any(anchor.tokens == wanted for anchor in self.of(edge))

    def wants(self, edge: Edge, tokens: tuple[int, ...], nbytes: int) -> bool:
        """Whether :meth:`add` would take an anchor of this size; a refusal is noted."""
        if self._plan(edge, tokens, nbytes) is not None:
            return True
        self._refuse(edge)
        return False

    def add(self, edge: Edge, anchor: Anchor) -> Sequence[Edge]:
        """Take an anchor in, in place of one of the same tokens if there is one; the edges whose anchors changed.

        None changed when it was refused.
        """
        plan = self._plan(edge, anchor.tokens, anchor.nbytes)
        if plan is None:
            self._refuse(edge)
            return ()
        held = self._edges.setdefault(edge, [])
        for old in held:
            old.uses *= _FADE
        anchor.uses = max([anchor.uses, *(old.uses for old in plan.replaced)])
        self._made += 1
        anchor.order = self._made
        held.append(anchor)
        self.nbytes += anchor.nbytes
        self.full_nbytes += anchor.full_nbytes
        for old in (*plan.replaced, *plan.surplus):
            self._drop(edge, old)
        for home, old in plan.singles:
            self._drop(home, old)
            self.beside.pop(home, None)
        for home in plan.edges:
            self._drop_edge(home)
        self.replaced += len(plan.replaced)
        self.evicted += len(plan.surplus) + len(plan.singles)
        self._refusals.pop(edge, None)
        self._touch(edge)
        return tuple(dict.fromkeys([edge, *(home for home, _ in plan.singles), *plan.edges]))

    def fitted(self, edge: Edge, nbytes: int) -> None:
        """Note what an estimator holds for an edge."""
        self.beside[edge] = nbytes
        self._fit_size = nbytes * len(self.of(edge)) / max(1, sum(a.nbytes for a in self.of(edge)))

    def shrink(self, edge: Edge) -> Edge | None:
        """Drop the least used anchor that an edge can spare, or else all of ``edge``; the edge that lost, if any."""
        spare = [(home, anchor) for home in self._edges for anchor in self._spare(home)]
        if spare:
            home, victim = min(spare, key=lambda pair: _worth(pair[1]))
            self._drop(home, victim)
            self.beside.pop(home, None)
            self.evicted += 1
            return home
        if edge not in self._edges:
            return None
        self._drop_edge(edge)
        self._refuse(edge)
        return edge

    def use(self, edge: Edge, shares: Mapping[Anchor, float]) -> None:
        """Note how an estimate leaned on the edge's anchors: shares that sum to one."""
        self._touch(edge)
        for anchor, share in shares.items():
            anchor.uses += share

    def _plan(self, edge: Edge, tokens: tuple[int, ...], nbytes: int) -> _Plan | None:
        """How to make room, None when there is no way."""
        if self.per_edge < 1:
            return None
        held = self.of(edge)
        replaced = [a for a in held if a.tokens == tokens]
        kept = sorted((a for a in held if a.tokens != tokens), key=_worth)
        over = max(0, len(kept) + 1 - self.per_edge)
        surplus, kept = kept[:over], kept[over:]
        spare = {home: self._spare(home) for home in self._edges if home != edge}
        spare[edge] = kept[: max(0, len(kept) + 1 - self.least)]
        claims = {home: self._claim(home, [a.nbytes for a in self._edges[home]]) for home in self._edges}
        claims[edge] = self._claim(edge, [*(a.nbytes for a in kept), nbytes], more=True)
        needed = sum(claims.values()) - self.max_bytes
        sparable = sum(a.nbytes for anchors in spare.values() for a in anchors)
        gone: list[Edge] = []
        for home in self._idle(edge):
            if needed <= sparable:
                break
            gone.append(home)
            needed -= claims[home]
            sparable -= sum(a.nbytes for a in spare.pop(home))
        if needed > sparable:
            return None
        singles = []
        pairs = [(home, anchor) for home, anchors in spare.items() for anchor in anchors]
        for home, anchor in sorted(pairs, key=lambda pair: _worth(pair[1])):
            if needed <= 0:
                break
            singles.append((home, anchor))
            needed -= anchor.nbytes
        return _Plan(replaced, surplus, singles, gone)

    def _claim(self, edge: Edge, sizes: Sequence[int], *, more: bool = False) -> int:
        """Bytes of an edge with anchors of these sizes, those still missing, and its fit, which ``more`` enlarge."""
        expected = int(self._fit_size * max(sizes))
        fit = self.beside.get(edge, expected)
        return sum(sizes) + max(0, self.least - len(sizes)) * max(sizes) + (max(fit, expected) if more else fit)

    def _spare(self, edge: Edge) -> Sequence[Anchor]:
        """The least used anchors that an edge can do without."""
        held = self._edges[edge]
        return sorted(held, key=_worth)[: len(held) - self.least] if len(held) > self.least else ()

    def _idle(self, edge: Edge) -> Sequence[Edge]:
        """Edges that must give way to ``edge``, the least recently used first."""
        refusals = self._refusals.get(edge)
        if refusals is None or len(refusals) < _PATIENCE or len(self.of(edge)) >= self.least:
            return ()
        idle = [home for home, at in self._touched.items() if at < refusals[0] and home != edge]
        return sorted(idle, key=self._touched.__getitem__)

    def _refuse(self, edge: Edge) -> None:
        self._now += 1
        self.refused += 1
        self._refusals.setdefault(edge, deque(maxlen=_PATIENCE)).append(self._now)
        self._refusals.move_to_end(edge)
        if len(self._refusals) > _REMEMBERED:
            self._refusals.popitem(last=False)

    def _touch(self, edge: Edge) -> None:
        self._now += 1
        if edge in self._edges:
            self._touched[edge] = self._now

    def _drop(self, edge: Edge, anchor: Anchor) -> None:
        self._edges[edge].remove(anchor)
        self.nbytes -= anchor.nbytes
        self.full_nbytes -= anchor.full_nbytes

    def _drop_edge(self, edge: Edge) -> None:
        self.evicted += len(self._edges[edge])
        for anchor in tuple(self._edges[edge]):
            self._drop(edge, anchor)
        del self._edges[edge], self._touched[edge]
        self.beside.pop(edge, None)


def _worth(anchor: Anchor) -> tuple[float, int]:
    return anchor.uses, anchor.order
