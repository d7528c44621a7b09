"""A portable CPU platform for SGLang: any x86-64 or arm64 CPU, with torch's own operations.

SGLang's own CPU engine needs kernels built for AMX, which no package index offers. This one has no kernels:
every fused operation takes its ``forward_native`` form. SGLang finds it by the entry point
``sglang.srt.platforms`` and only on machines without an accelerator.
"""

from __future__ import annotations

import os
from typing import Any

__all__ = ["PLATFORM_CLASS", "activate"]

#: Where SGLang finds the platform class. A string, so that activating imports no more than it must.
PLATFORM_CLASS = "agentflow.engine.sglang.cpu_platform:PortableCpuPlatform"


def activate() -> str | None:
    """The platform's name for SGLang, or None where an accelerator or SGLang's own CPU engine is to be used."""
    import torch

    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        return None
    accelerators = (
        torch.cuda,
        torch.xpu,
        getattr(torch, "npu", None),
        torch.backends.mps,
        getattr(torch, "musa", None),
    )
    if any(a is not None and a.is_available() for a in accelerators):
        return None
    return PLATFORM_CLASS


def __getattr__(name: str) -> Any:
    """Build the class on first use: its bases import torch and SGLang."""
    if name != "PortableCpuPlatform":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from sglang.srt.platforms.cpu import CpuDeviceMixin
    from sglang.srt.platforms.device_mixin import PlatformEnum
    from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

    class PortableCpuPlatform(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]
        """SGLang's CPU device operations (they must win over SRTPlatform's stubs), and no kernels at all."""

        _enum = PlatformEnum.OOT
        device_name = "cpu"
        device_type = "cpu"
        capabilities = PlatformCapabilities()

        def get_default_attention_backend(self) -> str:
            return "torch_native"

    globals()[name] = PortableCpuPlatform
    return PortableCpuPlatform
