"""KVComm's estimator (arXiv 2510.12872), as its released code computes it.

Each position has its own weights over the anchors: a softmax over minus the mean absolute difference between the bases
there, over layers, heads and features, at temperature 1, for keys and values apart. Only anchors at least as long as
the segment take part. Differences are small numbers, so the weights are close to even.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from agentflow.cache.kvcmas.anchors import Anchor, Features
from agentflow.cache.kvcmas.estimators import Fitted, Prediction, Query, entropy

__all__ = ["KVComm"]


@dataclass(frozen=True, slots=True)
class KVComm:
    """``temperature`` 1 is the released one."""

    temperature: float = 1.0

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
        n = len(query.tokens)
        usable = [a for a in self.anchors if a.base_keys.tokens >= n]
        deltas = []
        if not usable:
            zero = Features(torch.zeros_like(query.features.keys), torch.zeros_like(query.features.values))
            even = 1 / len(self.anchors)
            return Prediction(zero, dict.fromkeys(self.anchors, even), 1.0, 1.0)
        for mine, name in zip(query.features, ("keys", "values"), strict=True):
            apart = torch.stack([(mine - getattr(a, f"base_{name}").dense()[:, :n]).abs().mean((0, 2)) for a in usable])
            weights = torch.softmax(-apart / self.temperature, 0)
            total = torch.zeros_like(mine)
            for weight, anchor in zip(weights, usable, strict=True):
                total += weight[None, :, None] * getattr(anchor, f"delta_{name}").dense()[:, :n]
            total[0] = 0
            deltas.append(total)
        # Its reuse decision: entropy of a softmax over the distances of whole segments, on values.
        whole = torch.stack([(query.features.values - a.base_values.dense()[:, :n]).norm() for a in usable])
        shares = torch.softmax(-whole, 0)
        size = query.features.values.norm().clamp_min(1e-12)
        return Prediction(
            Features(deltas[0], deltas[1]),
            dict(zip(usable, shares.tolist(), strict=True)),
            float((whole.min() / size).square()),
            entropy(shares),
        )
