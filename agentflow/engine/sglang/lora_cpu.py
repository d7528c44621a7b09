"""What SGLang's LoRA needs to run on the portable CPU platform: its torch backend, without pinned memory.

SGLang pins the small tables of its torch backend, which only a machine with an accelerator can do. On a CPU they are
ordinary memory, which is where the backend reads them anyway.
"""

from __future__ import annotations

from typing import Any

from agentflow.engine.sglang import cpu_platform

__all__ = ["install"]

#: Modules of SGLang that ask torch for pinned tensors.
MODULES = ("sglang.srt.lora.layers", "sglang.srt.lora.backend.torch_backend")


def install() -> bool:
    """Have those modules make ordinary tensors. False, and nothing is changed, on another platform than ours."""
    if cpu_platform.activate() is None:
        return False
    from importlib import import_module

    import torch

    tensor: Any = torch.Tensor
    tensor.pin_memory = _as_it_is
    for name in MODULES:
        module: Any = import_module(name)
        if not isinstance(module.torch, _Unpinned):
            module.torch = _Unpinned(module.torch)
    return True


def _as_it_is(tensor: Any, *_device: Any) -> Any:
    return tensor


class _Unpinned:
    """Torch, with ``pin_memory`` ignored where tensors are made."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._torch, name)
        if name not in ("tensor", "empty", "zeros", "ones"):
            return found

        def unpinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
            return found(*args, **kwargs)

        return unpinned
