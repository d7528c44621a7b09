"""A shared low-dimensional view of an edge's bases: principal components of [keys, values] by layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from agentflow.cache.kvcmas.anchors import Anchor, Features
from agentflow.cache.kvcmas.lowrank import truncate

__all__ = ["Subspace", "principal"]

#: Tokens of all anchors together that the components are found from.
_SAMPLE = 2048


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

    From at most 2048 tokens, evenly drawn: temporary memory is bounded by layers * 2048 * 2 * features floats.
    """
    total = sum(a.base_keys.tokens for a in anchors)
    step = max(1, -(-total // _SAMPLE))
    halves = []
    for name in ("base_keys", "base_values"):
        rows = []
        for anchor in anchors:
            matrix = getattr(anchor, name)
            rows.append(matrix._replace(left=matrix.left[:, ::step]).dense())
        halves.append(torch.cat(rows, 1))
    means = [h.mean(1, keepdim=True) for h in halves]
    scales = [
        (h - m).square().mean((1, 2), keepdim=True).sqrt().clamp_min(1e-12) for h, m in zip(halves, means, strict=True)
    ]
    joint = torch.cat([(h - m) / s for h, m, s in zip(halves, means, scales, strict=True)], 2)
    found = truncate(joint, components, seed=seed)
    features = joint.shape[2]
    # Few tokens or features are kept whole: their span is small enough for an exact decomposition.
    right = found.right if found.right is not None else torch.linalg.svd(joint, full_matrices=False).Vh
    axes = right[:, :components].mT
    keys, values = axes[:, : features // 2] / scales[0], axes[:, features // 2 :] / scales[1]
    return Subspace(keys, values, means[0] @ keys + means[1] @ values)
