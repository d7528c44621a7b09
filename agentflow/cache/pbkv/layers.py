"""The graph layers in plain torch, with the parameters of torch-geometric's SAGEConv and RGCNConv.

Training uses torch-geometric's own. A trained predictor needs no more than these, so that no engine loads
torch-geometric, which takes seconds; a test holds the two to the same results.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

__all__ = ["Drawn", "Dropout", "MeanConvolution", "RelationalConvolution"]

#: What torch draws first weights with, here and in torch-geometric.
_DRAWS = (nn.init.kaiming_uniform_, nn.init.uniform_, nn.init.normal_, Tensor.uniform_, Tensor.normal_)


class Drawn(TorchFunctionMode):
    """Within it this thread draws first weights from ``generator``, and leaves the process's own alone."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self._generator = generator

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DRAWS:
            kwargs["generator"] = self._generator
        return func(*args, **kwargs)


class Dropout(nn.Module):
    """torch's dropout, which draws from ``generator``."""

    def __init__(self, p: float, generator: torch.Generator) -> None:
        super().__init__()
        self.p = p
        self.generator = generator

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.p:
            return x
        kept = 1.0 - self.p
        return x * torch.empty_like(x).bernoulli_(kept, generator=self.generator).div_(kept)


def _spread(edges: Tensor, agents: int) -> Tensor:
    """The matrix that gives every target of ``edges`` (2, e) the mean of its sources."""
    out = torch.zeros(agents, agents)
    out[edges[1], edges[0]] = 1.0
    return out / out.sum(1, keepdim=True).clamp(min=1.0)


class MeanConvolution(nn.Module):
    """SAGEConv with the mean: W_l * mean of the neighbours + b + W_r * own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lin_l = nn.Linear(width, width)
        self.lin_r = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return cast(Tensor, self.lin_l(_spread(edges, len(x)) @ x) + self.lin_r(x))


class RelationalConvolution(nn.Module):
    """RGCNConv: the sum over relations of W_r * mean of the neighbours by that relation, + W * own + b."""

    def __init__(self, width: int, relations: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(relations, width, width))
        self.root = nn.Parameter(torch.empty(width, width))
        self.bias = nn.Parameter(torch.zeros(width))
        nn.init.xavier_uniform_(self.weight)
        nn.init.xavier_uniform_(self.root)

    def forward(self, x: Tensor, edges: Tensor, kinds: Tensor) -> Tensor:
        out = x @ self.root + self.bias
        for relation, weight in enumerate(self.weight):
            out = out + _spread(edges[:, kinds == relation], len(x)) @ x @ weight
        return out
