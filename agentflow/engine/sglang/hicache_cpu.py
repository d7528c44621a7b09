"""What HiCache needs to have a host tier beside a device tier that is itself ordinary memory.

SGLang ships three of its parts for accelerators only: a host allocator, stream operations, and the copy
between tiers. On the portable CPU platform they are plain memory, no-ops (copies there are done when the call
returns), and an indexed copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from agentflow.engine.sglang import cpu_platform

if TYPE_CHECKING:
    import torch

__all__ = ["allocate", "install", "transfer_kv_direct"]


def install() -> bool:
    """Put the missing parts in place. False, and nothing is changed, on another platform than ours."""
    if cpu_platform.activate() is None:
        return False
    import torch
    from sglang.srt.mem_cache.pool_host import common, mha

    common.ALLOC_MEMORY_FUNCS["cpu"] = allocate
    mha.transfer_kv_direct = transfer_kv_direct
    for name, operation in (("synchronize", _synchronize), ("query", _query)):
        if not hasattr(torch.cpu.Stream, name):
            setattr(torch.cpu.Stream, name, operation)
    return True


def allocate(dims: Sequence[int], *, dtype: torch.dtype, **_unused: Any) -> torch.Tensor:
    """Memory for a host pool. The other arguments of SGLang's allocators are about pinning."""
    import torch

    return torch.empty(tuple(dims), dtype=dtype, device="cpu")


def transfer_kv_direct(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copy the KV of tokens ``src_indices`` to ``dst_indices``, layer by layer.

    ``page_size`` does not matter here: indices name single tokens, and copies need no alignment.
    """
    src = src_indices.to("cpu")
    dst = dst_indices.to("cpu")
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst] = source[src]


def _synchronize(_stream: Any) -> None:
    return None


def _query(_stream: Any) -> bool:
    return True
