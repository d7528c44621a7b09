"""The mean delta of each token id: the simplest estimator that looks at tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from agentflow.cache.kvcmas.anchors import Anchor, Features
from agentflow.cache.kvcmas.estimators import Fitted, Prediction, Query, entropy
from agentflow.cache.kvcmas.kernel import fold
from agentflow.cache.kvcmas.lowrank import LowRank

__all__ = ["TokenId"]


@dataclass(frozen=True, slots=True)
class TokenId:
    """A segment's first ``head`` tokens take the mean over the anchors' tokens at the same offset, since the start of
    a segment changes most; others the mean over tokens of their id, or over all where the id is new."""

    head: int = 4

    def fit(self, anchors: Sequence[Anchor]) -> Fitted:
        """An index of the anchors' tokens."""
        groups = torch.cat([self.groups(a.tokens) for a in anchors])
        return _Fitted(tuple(anchors), groups, self)

    def groups(self, tokens: Sequence[int]) -> torch.Tensor:
        """What a token shares its delta with, (tokens,): even numbers stand for offsets, odd ones for ids."""
        out = 2 * torch.tensor(tokens) + 1
        first = min(self.head, len(out))
        out[:first] = 2 * torch.arange(first)
        return out


@dataclass(frozen=True, slots=True)
class _Fitted:
    anchors: tuple[Anchor, ...]
    groups: torch.Tensor
    method: TokenId

    @property
    def nbytes(self) -> int:
        return int(self.groups.nbytes)

    def predict(self, query: Query) -> Prediction:
        """Sums over the anchors' tokens of each group that the segment has: O(tokens) in time and memory."""
        groups, row = torch.unique(self.method.groups(query.tokens), return_inverse=True)
        place = torch.searchsorted(groups, self.groups).clamp_max(len(groups) - 1)
        place = torch.where(groups[place] == self.groups, place, -1)
        rest = self.groups % 2 == 1
        rest = rest if bool(rest.any()) else ~rest
        counts = torch.bincount(place[place >= 0], minlength=len(groups))
        row = torch.where(counts[row] > 0, row, len(groups))  # one more group, for what no anchor has
        counts = torch.cat([counts, rest.sum()[None]]).clamp_min(1)
        lengths = [len(a.tokens) for a in self.anchors]
        parts = list(zip(self.anchors, *(torch.split_with_sizes(t, lengths) for t in (place, rest)), strict=True))
        delta = []
        for matrices in ([a.delta_keys for a in self.anchors], [a.delta_values for a in self.anchors]):
            sums = [_sums(m, at, others, counts) for m, (_, at, others) in zip(matrices, parts, strict=True)]
            delta.append(fold(sums, matrices)[:, row.to(sums[0].device)])
            delta[-1][0] = 0
        wanted = torch.bincount(row, minlength=len(counts)) / len(row) / counts
        shares = {a: float(wanted[:-1][at[at >= 0]].sum() + wanted[-1] * others.sum()) for a, at, others in parts}
        known = float((row < len(groups)).float().mean())
        return Prediction(Features(*delta), shares, 1 - known, entropy(list(shares.values())))


def _sums(matrix: LowRank, place: torch.Tensor, rest: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """An anchor's part in the mean of each group, and last in that of ``rest``, (layers, groups + 1, rank)."""
    left = matrix.left.float()
    device = left.device
    out = left.new_zeros(left.shape[0], len(counts), left.shape[2])
    out.index_add_(1, place[place >= 0].to(device), left[:, (place >= 0).to(device)])
    out[:, -1] = left[:, rest.to(device)].sum(1)
    return out / counts.to(device)[:, None]
