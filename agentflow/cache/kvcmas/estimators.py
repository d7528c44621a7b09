"""What an estimator is: from the source's KV of a segment to what the target's has more.

Estimators have two halves. :meth:`Estimator.fit` looks at an edge's anchors, off the critical path, and returns a
:class:`Fitted`, whose :meth:`~Fitted.predict` runs when a request waits. Everything is by layer, with de-rotated keys.
The delta of layer 0 is always zero: its keys and values depend on the token alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from agentflow.cache.kvcmas.anchors import Anchor, Features

__all__ = ["Estimator", "Fitted", "Matching", "Prediction", "Query", "entropy", "match"]


class Query(NamedTuple):
    """A segment as the source has it, in float32."""

    tokens: tuple[int, ...]
    features: Features


@dataclass(frozen=True, slots=True)
class Prediction:
    """The delta, float32, and how far the anchors were.

    ``shares`` is each anchor's part in it, summing to one. ``distance`` is that to the nearest anchors, relative to
    the size of what is matched (0: an exact repeat); ``entropy`` that of the matching weights, between 0 and 1.
    """

    delta: Features
    shares: Mapping[Anchor, float]
    distance: float
    entropy: float


class Fitted(Protocol):
    """An estimator that has seen an edge's anchors."""

    @property
    def nbytes(self) -> int:
        """Bytes of what it holds besides the anchors."""
        ...

    def predict(self, query: Query) -> Prediction:
        """The delta of a segment. O(tokens) matrix products, no loop over tokens."""
        ...


class Estimator(Protocol):
    """A way to estimate deltas from anchors."""

    def fit(self, anchors: Sequence[Anchor]) -> Fitted:
        """Prepare for ``anchors`` (at least one)."""
        ...


class Matching(NamedTuple):
    """Squared distances of a segment to each anchor, relative to its own size, (anchors,); and the size."""

    keys: torch.Tensor
    values: torch.Tensor

    @property
    def both(self) -> torch.Tensor:
        """The mean of the two."""
        return (self.keys + self.values) / 2


def match(query: Query, anchors: Sequence[Anchor]) -> Matching:
    """How far a segment's base is from each anchor's, position by position from the first, over those both have.

    Works on the factors: with orthonormal rows in ``right``, ``|X - A R|^2 = |X|^2 - 2 <X R^T, A> + |A|^2``.
    """
    rows = []
    for anchor in anchors:
        n = min(anchor.base_keys.tokens, len(query.tokens))
        row = []
        for mine, theirs in zip(query.features, (anchor.base_keys, anchor.base_values), strict=True):
            x, left = mine[:, :n], theirs.left[:, :n].float()
            seen = x if theirs.right is None else x @ theirs.right.float().mT
            size = x.square().sum((1, 2))
            apart = size - 2 * (seen * left).sum((1, 2)) + left.square().sum((1, 2))
            row.append((apart / size.clamp_min(1e-12)).mean())
        rows.append(torch.stack(row))
    keys, values = torch.stack(rows).clamp_min(0).unbind(1)
    return Matching(keys, values)


def entropy(weights: Sequence[float] | torch.Tensor) -> float:
    """Entropy of weights that sum to one, divided by that of equal weights: 0 for a single choice, 1 for none.

    One weight alone gives 0.
    """
    p = torch.as_tensor(weights, dtype=torch.float64)
    if p.numel() < 2:
        return 0.0
    return float(-(p * p.clamp_min(1e-300).log()).sum() / torch.log(torch.tensor(float(p.numel()))))
