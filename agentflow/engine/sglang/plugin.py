"""What SGLang calls in each of its processes, through the entry point ``sglang.srt.plugins``."""

from __future__ import annotations

__all__ = ["register"]


def register() -> None:
    """Install the radix cache, the control methods and the CPU pieces of HiCache."""
    from agentflow.engine.sglang import hicache_cpu

    hicache_cpu.install()
