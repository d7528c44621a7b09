"""A shared low-dimensional view of an edge's bases: principal components of [keys, values] by layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from agentflow.cache.kvcmas.anchors import Anchor, Features
from agentflow.cache.kvcmas.lowrank import LowRank

__all__ = ["Subspace", "principal"]

#: Tokens of all anchors together that the components are found from.
_SAMPLE = 2048
#: Width of the iterated span beyond the components, and rounds of iteration.
_OVERSAMPLE, _ROUNDS = 8, 3


class Subspace(NamedTuple):
    """Projections (layers, features, p) of keys and of values, whose sum is the view, and its mean (layers, 1, p)."""

    keys: torch.Tensor
    values: torch.Tensor
    mean: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of the three tensors."""
        return int(self.keys.nbytes + self.values.nbytes + self.mean.nbytes)

    def of(self, features: Features) -> torch.Tensor:
        """The view of full-dimension features, (layers, tokens, p)."""
        return features.keys @ self.keys + features.values @ self.values - self.mean

    def of_base(self, anchor: Anchor) -> torch.Tensor:
        """The view of an anchor's base, from its factors."""
        return anchor.base_keys.project(self.keys) + anchor.base_values.project(self.values) - self.mean


def principal(anchors: Sequence[Anchor], components: int, *, seed: int = 0) -> Subspace:
    """Principal components of the anchors' bases, keys and values each scaled to the same variance.

    By subspace iteration on the factors, from at most 2048 tokens, evenly drawn: O(tokens * rank * components) a layer,
    and nothing of full dimension is formed. Fewer components come back where there are fewer features.
    """
    step = max(1, -(-sum(a.base_keys.tokens for a in anchors) // _SAMPLE))
    halves = [
        _Stack([_thin(a.base_keys, step) for a in anchors]),
        _Stack([_thin(a.base_values, step) for a in anchors]),
    ]
    means = [h.mean() for h in halves]
    scales = [h.deviation(m) for h, m in zip(halves, means, strict=True)]
    features, layers = halves[0].features, means[0].shape[0]
    width = min(components + _OVERSAMPLE, 2 * features)
    made = torch.Generator().manual_seed(seed)
    span = torch.randn(layers, 2 * features, width, generator=made).to(means[0].device)
    seen = span[:, :1]
    for n in range(_ROUNDS + 1):
        span = torch.linalg.qr(span).Q
        parts = [span[:, :features] / scales[0], span[:, features:] / scales[1]]
        seen, other = (h.times(p) - m @ p for h, p, m in zip(halves, parts, means, strict=True))
        seen = seen + other  # (layers, tokens, width): what the span sees of each token
        if n < _ROUNDS:
            total = seen.sum(1, keepdim=True)
            back = [(h.transposed(seen) - m.mT @ total) / s for h, m, s in zip(halves, means, scales, strict=True)]
            span = torch.cat(back, 1)
    order = torch.linalg.eigh(seen.mT @ seen).eigenvectors.flip(-1)[..., :components]
    axes = span @ order
    keys, values = axes[:, :features] / scales[0], axes[:, features:] / scales[1]
    return Subspace(keys, values, means[0] @ keys + means[1] @ values)


class _Stack:
    """Anchors' matrices one above the other, (layers, all tokens, features), kept as factors."""

    def __init__(self, matrices: Sequence[LowRank]) -> None:
        self._matrices = matrices
        first = matrices[0]
        self.tokens = sum(m.tokens for m in matrices)
        self.features = int((first.left if first.right is None else first.right).shape[2])

    def mean(self) -> torch.Tensor:
        """Over tokens, (layers, 1, features)."""
        total = [_right(m.left.float().sum(1, keepdim=True), m) for m in self._matrices]
        return torch.stack(total).sum(0) / self.tokens

    def deviation(self, mean: torch.Tensor) -> torch.Tensor:
        """Root mean square of what is left without the mean, (layers, 1, 1)."""
        square = torch.stack([m.energy().sum(1) for m in self._matrices]).sum(0) / self.tokens
        left = (square - mean.square().sum((1, 2))).clamp_min(0) / self.features
        return left.sqrt().clamp_min(1e-12)[:, None, None]

    def times(self, thin: torch.Tensor) -> torch.Tensor:
        """This times (layers, features, width)."""
        return torch.cat([m.project(thin) for m in self._matrices], 1)

    def transposed(self, thin: torch.Tensor) -> torch.Tensor:
        """The transpose of this times (layers, all tokens, width)."""
        at, total = 0, []
        for m in self._matrices:
            part = m.left.float().mT @ thin[:, at : at + m.tokens]
            total.append(part if m.right is None else m.right.float().mT @ part)
            at += m.tokens
        return torch.stack(total).sum(0)


def _thin(matrix: LowRank, step: int) -> LowRank:
    return matrix if step == 1 else matrix._replace(left=matrix.left[:, ::step])


def _right(left: torch.Tensor, matrix: LowRank) -> torch.Tensor:
    return left if matrix.right is None else left @ matrix.right.float()
