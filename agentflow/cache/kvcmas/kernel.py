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

__all__ = ["TokenKernel", "shares_of", "spread"]

#: Tokens that the bandwidth is measured on.
_PROBES = 256


@dataclass(frozen=True, slots=True)
class TokenKernel:
    """``bandwidth`` is in units of the median squared distance of a token to the nearest one of another anchor.

    ``place`` is the weight of where a token stands: the logarithm of its offset in the segment, in units of that
    distance's root, joins the view.
    """

    components: int = 32
    bandwidth: float = 0.4
    place: float = 0.3
    seed: int = 0

    def fit(self, anchors: Sequence[Anchor]) -> Fitted:
        """Principal components, the anchors' view in them, and the bandwidth of each layer."""
        space = principal(anchors, self.components, seed=self.seed)
        views = [space.of_base(anchor) for anchor in anchors]
        near = _nearest(views).clamp_min(1e-9)
        scale = self.place * near.sqrt()
        placed = torch.cat([_placed(view, scale) for view in views], 1)
        return _Fitted(tuple(anchors), space, placed, scale, self.bandwidth * near)


def _placed(view: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The view with one more component: the logarithm of the offset, times ``scale`` (layers,)."""
    where = torch.log1p(torch.arange(view.shape[1], dtype=torch.float32, device=view.device))
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
    space: Subspace
    views: torch.Tensor
    scale: torch.Tensor
    width: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.space.nbytes + int(self.views.nbytes + self.scale.nbytes + self.width.nbytes)

    def predict(self, query: Query) -> Prediction:
        view = _placed(self.space.of(query.features), self.scale)
        apart = view.square().sum(2, keepdim=True) + self.views.square().sum(2)[:, None] - 2 * view @ self.views.mT
        weights = torch.softmax(-apart / self.width[:, None, None], 2)
        nearest = apart.amin(2).clamp_min(0)
        keys = spread(weights, [a.delta_keys for a in self.anchors])
        values = spread(weights, [a.delta_values for a in self.anchors])
        keys[0], values[0] = 0, 0
        shares = shares_of(weights, self.anchors)
        distance = float((nearest.mean(1) / view.square().sum(2).mean(1).clamp_min(1e-12)).mean())
        return Prediction(Features(keys, values), shares, distance, entropy(list(shares.values())))


def shares_of(weights: torch.Tensor, anchors: Sequence[Anchor]) -> dict[Anchor, float]:
    """Each anchor's part in weights (layers, tokens, all anchors' tokens)."""
    mass = torch.split_with_sizes(weights.mean((0, 1)), [len(a.tokens) for a in anchors])
    return {anchor: float(m.sum()) for anchor, m in zip(anchors, mass, strict=True)}


def spread(weights: torch.Tensor, matrices: Sequence[LowRank]) -> torch.Tensor:
    """Weights (layers, tokens, all anchors' tokens) times the anchors' matrices, through their factors."""
    lefts: list[torch.Tensor] = []
    rights: list[torch.Tensor] = []
    total: torch.Tensor | None = None
    at = 0
    for matrix in matrices:
        part = weights[:, :, at : at + matrix.tokens] @ matrix.left.float()
        at += matrix.tokens
        if matrix.right is None:
            total = part if total is None else total + part
        else:
            lefts.append(part)
            rights.append(matrix.right.float())
    if lefts:
        product = torch.cat(lefts, 2) @ torch.cat(rights, 1)
        total = product if total is None else total + product
    assert total is not None
    return total
