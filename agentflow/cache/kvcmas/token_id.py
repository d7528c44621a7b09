"""The mean delta of each token id: the simplest estimator that looks at tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from agentflow.cache.kvcmas.anchors import Anchor, Features
from agentflow.cache.kvcmas.estimators import Fitted, Prediction, Query, entropy
from agentflow.cache.kvcmas.kernel import spread

__all__ = ["TokenId"]


@dataclass(frozen=True, slots=True)
class TokenId:
    """A segment's first ``head`` tokens take the mean over the anchors' tokens at the same offset, since the start of
    a segment changes most; others the mean over tokens of their id, or over all where the id is new."""

    head: int = 4

    def fit(self, anchors: Sequence[Anchor]) -> Fitted:
        """An index of the anchors' tokens."""
        ids = torch.cat([torch.tensor(a.tokens) for a in anchors])
        offsets = torch.cat([torch.arange(len(a.tokens)) for a in anchors])
        return _Fitted(tuple(anchors), ids, offsets, self.head)


@dataclass(frozen=True, slots=True)
class _Fitted:
    anchors: tuple[Anchor, ...]
    ids: torch.Tensor
    offsets: torch.Tensor
    head: int

    @property
    def nbytes(self) -> int:
        return int(self.ids.nbytes + self.offsets.nbytes)

    def predict(self, query: Query) -> Prediction:
        tokens = torch.tensor(query.tokens)
        inner = self.offsets >= self.head
        same = (tokens[:, None] == self.ids[None]) & inner[None]
        here = torch.arange(len(tokens))
        same = torch.where((here < self.head)[:, None], here[:, None] == self.offsets[None], same)
        known = same.any(1)
        same = torch.where(known[:, None], same, (inner if bool(inner.any()) else ~inner)[None])
        weights = (same.float() / same.sum(1, keepdim=True)).to(query.features.keys.device)[None]
        keys = spread(weights, [a.delta_keys for a in self.anchors])
        values = spread(weights, [a.delta_values for a in self.anchors])
        keys[0], values[0] = 0, 0
        parts = torch.split_with_sizes(weights[0].mean(0), [len(a.tokens) for a in self.anchors])
        shares = {a: float(part.sum()) for a, part in zip(self.anchors, parts, strict=True)}
        return Prediction(
            Features(keys, values), shares, 1 - float(known.float().mean()), entropy(list(shares.values()))
        )
