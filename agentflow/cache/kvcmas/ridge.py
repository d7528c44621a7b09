"""Ridge regression of the delta on a low-dimensional view of the base, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from agentflow.cache.kvcmas.anchors import Anchor, Features
from agentflow.cache.kvcmas.estimators import Fitted, Prediction, Query, entropy, match
from agentflow.cache.kvcmas.lowrank import LowRank
from agentflow.cache.kvcmas.subspace import Subspace, principal

__all__ = ["Ridge", "design"]


@dataclass(frozen=True, slots=True)
class Ridge:
    """``penalty`` is relative to the mean square of a component."""

    components: int = 32
    penalty: float = 0.1
    seed: int = 0

    def fit(self, anchors: Sequence[Anchor]) -> Fitted:
        """Normal equations over all anchors' tokens by Cholesky; the deltas enter through their factors."""
        space = principal(anchors, self.components, seed=self.seed)
        gram: torch.Tensor | None = None
        keys, values = [], []
        for anchor in anchors:
            x = design(space.of_base(anchor))
            gram = x.mT @ x if gram is None else gram + x.mT @ x
            keys.append(_times(x, anchor.delta_keys))
            values.append(_times(x, anchor.delta_values))
        assert gram is not None
        size = gram.diagonal(dim1=1, dim2=2)
        level = self.penalty * size[:, :-1].mean(1, keepdim=True) * torch.ones_like(size) + 1e-9
        level[:, -1] = 1e-6 * size[:, -1]
        root = torch.linalg.cholesky(gram + torch.diag_embed(level))
        solved = [torch.cholesky_solve(torch.stack(part).sum(0), root) for part in (keys, values)]
        return _Fitted(tuple(anchors), space, solved[0], solved[1])


def design(view: torch.Tensor) -> torch.Tensor:
    """Regressors of each token: its view, and one."""
    return torch.cat([view, torch.ones_like(view[:, :, :1])], 2)


def _times(x: torch.Tensor, matrix: LowRank) -> torch.Tensor:
    part = x.mT @ matrix.left.float()
    return part if matrix.right is None else part @ matrix.right.float()


@dataclass(frozen=True, slots=True)
class _Fitted:
    anchors: tuple[Anchor, ...]
    space: Subspace
    keys: torch.Tensor
    values: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.space.nbytes + int(self.keys.nbytes + self.values.nbytes)

    def predict(self, query: Query) -> Prediction:
        x = design(self.space.of(query.features))
        keys, values = x @ self.keys, x @ self.values
        keys[0], values[0] = 0, 0
        apart = match(query, self.anchors).both
        even = 1 / len(self.anchors)
        weights = torch.softmax(-apart / 0.1, 0)
        return Prediction(
            Features(keys, values), dict.fromkeys(self.anchors, even), float(apart.min()), entropy(weights)
        )
