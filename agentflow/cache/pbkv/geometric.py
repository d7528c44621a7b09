"""torch-geometric's graph layers, as training uses them. Importing this module takes seconds."""

from __future__ import annotations

import warnings
from typing import Any

with warnings.catch_warnings():
    # Of torch.jit, which torch-geometric calls while it is imported, and of packages that it looks for.
    warnings.simplefilter("ignore")
    from torch_geometric.nn import RGCNConv, SAGEConv

__all__ = ["relational_convolution", "sage_convolution"]


def sage_convolution(width: int) -> Any:
    """SAGEConv (Hamilton et al., NeurIPS 2017) with the mean."""
    return SAGEConv(width, width)


def relational_convolution(width: int, relations: int) -> Any:
    """RGCNConv (Schlichtkrull et al., ESWC 2018)."""
    return RGCNConv(width, width, relations)
