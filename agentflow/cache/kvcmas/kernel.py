"""Token kernel: each token's delta from those of the anchors' tokens that look alike, layer by layer.

Nadaraya-Watson regression in a low-dimensional view of [keys, values]. Unlike the segment sum it does not care where
in an anchor a similar token stands, so anchors of unrelated segments help too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from agentflow.cache.kvcmas.anchors import Anchor, Features
from agentflow.cache.kvcmas.estimators import Fitted, Prediction, Query, entropy
from agentflow.cache.kvcmas.lowrank import LowRank
from agentflow.cache.kvcmas.subspace import Subspace, principal

__all__ = ["TokenKernel", "fold"]

#: Tokens that the bandwidth is measured on.
_PROBES = 128
#: The least factor on the bandwidth.
_CLOSEST = 0.02
#: First tokens of an anchor that are always among its landmarks: a segment's start changes most.
_HEAD = 8


@dataclass(frozen=True, slots=True)
class TokenKernel:
    """``bandwidth`` is in units of the median squared distance of a token to the nearest one of another anchor. For a
    stretch whose tokens are nearer to the landmarks than that it shrinks in proportion, so that a repeat or a near
    duplicate follows its twin instead of an average.

    ``place`` is the weight of where a token stands: the logarithm of its offset in the segment, in units of that
    distance's root, joins the view. At most ``landmarks`` of an edge's anchor tokens are kept in view, each anchor's
    first and the rest evenly drawn. Each stretch of ``nearest`` tokens is weighed against as many of these, those
    nearest to it as one layer sees them: weighing is nearly all of the cost.
    """

    components: int = 32
    bandwidth: float = 0.4
    place: float = 0.3
    landmarks: int = 2048
    nearest: int = 512
    seed: int = 0

    def fit(self, anchors: Sequence[Anchor]) -> Fitted:
        """Principal components, the landmarks' view in them, and the bandwidth of each layer."""
        space = principal(anchors, self.components, seed=self.seed)
        device = anchors[0].base_keys.left.device
        share = min(1.0, self.landmarks / sum(len(a.tokens) for a in anchors))
        rows = [_landmarks(len(a.tokens), int(share * len(a.tokens))).to(device) for a in anchors]
        views = [space.of_base(anchor)[:, row] for anchor, row in zip(anchors, rows, strict=True)]
        near = torch.nan_to_num(_nearest(views), posinf=1.0).clamp_min(1e-9)
        scale = self.place * near.sqrt()
        placed = torch.cat([_placed(view, row, scale) for view, row in zip(views, rows, strict=True)], 1)
        return _Fitted(tuple(anchors), tuple(rows), space, placed, near, scale, self.bandwidth * near, self.nearest)


def _landmarks(tokens: int, most: int) -> torch.Tensor:
    """Offsets of at most ``most`` of ``tokens`` tokens (at least one): the first, and others evenly."""
    most = max(1, min(most, tokens))
    head = min(_HEAD, most)
    rest = torch.linspace(head, tokens - 1, most - head).round().long()
    return torch.cat([torch.arange(head), rest])


def _placed(view: torch.Tensor, offsets: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The view with one more component: the logarithm of the offset, times ``scale`` (layers,)."""
    where = torch.log1p(offsets.to(view.device, torch.float32))
    return torch.cat([view, scale[:, None, None] * where[None, :, None]], 2)


def _nearest(views: Sequence[torch.Tensor]) -> torch.Tensor:
    """Median squared distance to the nearest token of another anchor (of the same, if alone), (layers,)."""
    everything = torch.cat(list(views), 1)
    owner = torch.cat([torch.full((v.shape[1],), n) for n, v in enumerate(views)]).to(everything.device)
    step = max(1, everything.shape[1] // _PROBES)
    apart = torch.cdist(everything[:, ::step], everything).square()
    own = owner[::step, None] == owner[None] if len(views) > 1 else torch.eye(len(owner), dtype=torch.bool)[::step]
    return apart.masked_fill(own.to(apart.device), float("inf")).amin(2).median(1).values


@dataclass(frozen=True, slots=True)
class _Fitted:
    anchors: tuple[Anchor, ...]
    rows: tuple[torch.Tensor, ...]
    space: Subspace
    views: torch.Tensor
    near: torch.Tensor
    scale: torch.Tensor
    width: torch.Tensor
    nearest: int

    @property
    def nbytes(self) -> int:
        own = (self.views, self.near, self.scale, self.width, *self.rows)
        return self.space.nbytes + sum(int(t.nbytes) for t in own)

    def predict(self, query: Query) -> Prediction:
        offsets = torch.arange(len(query.tokens), device=query.features.keys.device)
        view = _placed(self.space.of(query.features), offsets, self.scale)
        found = [
            self._weighed(part) for part in torch.split_with_sizes(view, _stretches(view.shape[1], self.nearest), 1)
        ]
        keys, values, apart, mass = zip(*found, strict=True)
        delta = Features(torch.cat(keys, 1), torch.cat(values, 1))
        delta.keys[0], delta.values[0] = 0, 0
        part_of = torch.stack(mass).sum(0) / (view.shape[0] * view.shape[1])
        shares = dict(zip(self.anchors, part_of.tolist(), strict=True))
        size = view.square().sum(2).mean(1).clamp_min(1e-12)
        distance = float((torch.cat(apart, 1).mean(1) / size).mean())
        return Prediction(delta, shares, distance, entropy(list(shares.values())))

    def _weighed(self, view: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Deltas of keys and of values of one stretch, squared distances (layers, tokens) to the nearest landmarks, and
        each anchor's mass of the weights."""
        views, rows = self._picked(view)
        delta_keys = [_only(a.delta_keys, r) for a, r in zip(self.anchors, rows, strict=True)]
        delta_values = [_only(a.delta_values, r) for a, r in zip(self.anchors, rows, strict=True)]
        lefts = [_beside(k, v) for k, v in zip(delta_keys, delta_values, strict=True)]
        width = (self.width * self._closeness(view, views))[:, None, None]
        logits = _asking(view) @ _logits(views, width).mT
        apart = (view.square().sum(2) - width[:, 0] * logits.amax(2)).clamp_min(0)
        weights = torch.split_with_sizes(torch.softmax(logits, 2), [m.shape[1] for m in lefts], 2)
        folded = [w @ left for w, left in zip(weights, lefts, strict=True)]
        cuts = [k.left.shape[2] for k in delta_keys]
        keys = fold([f[..., :cut] for f, cut in zip(folded, cuts, strict=True)], delta_keys)
        values = fold([f[..., cut:-1] for f, cut in zip(folded, cuts, strict=True)], delta_values)
        return keys, values, apart, torch.stack([f[..., -1].sum() for f in folded])

    def _picked(self, view: torch.Tensor) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """The landmarks to weigh a stretch against, (layers, landmarks, components + 1), and their rows of each anchor.

        A middle layer ranks them: first those that are the nearest one of some token, then by how little they miss it.
        """
        if self.views.shape[1] <= self.nearest:
            return self.views, self.rows
        layer = view.shape[0] // 2
        one = torch.ones(1, 1, device=view.device)
        near = _asking(view[layer]) @ _logits(self.views[layer], one).mT
        picked = (near - near.amax(1, keepdim=True)).amax(0).topk(self.nearest).indices.sort().values
        counts = torch.tensor([len(r) for r in self.rows], device=picked.device)
        ends = torch.searchsorted(picked, counts.cumsum(0))
        parts = torch.tensor_split(picked, ends[:-1].tolist())
        begins = (counts.cumsum(0) - counts).tolist()
        return self.views[:, picked], [r[p - b] for r, p, b in zip(self.rows, parts, begins, strict=True)]

    def _closeness(self, view: torch.Tensor, views: torch.Tensor) -> float:
        """Mean squared distance of some tokens to the nearest landmark, in units of that between anchors; at most 1."""
        some, one = view[:, :: max(1, view.shape[1] // _PROBES)], torch.ones(1, 1, 1, device=view.device)
        nearest = some.square().sum(2) - (_asking(some) @ _logits(views, one).mT).amax(2)
        return min(1.0, max(_CLOSEST, float((nearest.clamp_min(0).mean(1) / self.near).mean())))


def _stretches(tokens: int, most: int) -> list[int]:
    return [min(most, tokens - first) for first in range(0, tokens, most)]


def _logits(landmarks: torch.Tensor, width: torch.Tensor) -> torch.Tensor:
    """With :func:`_asking` a product that gives ``(2 q v - v v) / width``: minus squared distances over ``width``, but
    for the asking token's own square."""
    return torch.cat([landmarks, landmarks.square().sum(-1, keepdim=True)], -1) / width


def _asking(view: torch.Tensor) -> torch.Tensor:
    return torch.cat([2 * view, torch.full_like(view[..., :1], -1.0)], -1)


def _beside(keys: LowRank, values: LowRank) -> torch.Tensor:
    """Left factors of both and a column of ones, whose product with weights is their sum."""
    one = torch.ones_like(keys.left[..., :1], dtype=torch.float32)
    return torch.cat([keys.left.float(), values.left.float(), one], 2)


def _only(matrix: LowRank, rows: torch.Tensor) -> LowRank:
    return matrix if len(rows) == matrix.tokens else LowRank(matrix.left[:, rows], matrix.right)


def fold(parts: Sequence[torch.Tensor], matrices: Sequence[LowRank]) -> torch.Tensor:
    """The sum of parts (layers, tokens, rank) times the right factors of their matrices."""
    thin = [n for n, m in enumerate(matrices) if m.right is not None]
    total = [parts[n] for n, m in enumerate(matrices) if m.right is None]
    if thin:
        rights = [m.right.float() for m in matrices if m.right is not None]
        total.append(torch.cat([parts[n] for n in thin], 2) @ torch.cat(rights, 1))
    return torch.stack(total).sum(0) if len(total) > 1 else total[0]
