"""The estimator of the KVCMAS paper: the weighted sum of the anchors' low-rank deltas, position by position.

Weights come from the distance between whole segments, one weight an anchor (a softmax with a fixed temperature on
distances relative to the segment's size, which makes thresholds mean the same on every model).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from agentflow.cache.kvcmas.anchors import Anchor, Features
from agentflow.cache.kvcmas.estimators import Fitted, Prediction, Query, entropy, match

__all__ = ["SegmentSum"]


@dataclass(frozen=True, slots=True)
class SegmentSum:
    """``temperature`` is in units of the squared relative distance."""

    temperature: float = 0.1

    def fit(self, anchors: Sequence[Anchor]) -> Fitted:
        """Nothing to prepare."""
        return _Fitted(tuple(anchors), self.temperature)


@dataclass(frozen=True, slots=True)
class _Fitted:
    anchors: tuple[Anchor, ...]
    temperature: float

    @property
    def nbytes(self) -> int:
        return 0

    def predict(self, query: Query) -> Prediction:
        apart = match(query, self.anchors).both
        weights = torch.softmax(-apart / self.temperature, 0)
        keys, values = (torch.zeros_like(f) for f in query.features)
        reach = torch.zeros(len(query.tokens), device=keys.device)
        for weight, anchor in zip(weights, self.anchors, strict=True):
            n = min(anchor.delta_keys.tokens, len(query.tokens))
            reach[:n] += weight
            for total, delta in ((keys, anchor.delta_keys), (values, anchor.delta_values)):
                left = delta.left[:, :n].float() * weight
                total[:, :n] += left if delta.right is None else left @ delta.right.float()
        covered = (1 / reach.clamp_min(1e-12))[None, :, None] * (reach > 0)[None, :, None]
        keys, values = keys * covered, values * covered
        keys[0], values[0] = 0, 0
        shares = dict(zip(self.anchors, weights.tolist(), strict=True))
        return Prediction(Features(keys, values), shares, float(apart.min()), entropy(weights))
