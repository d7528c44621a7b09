"""What the figures were measured on."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

__all__ = ["machine"]


def machine() -> dict[str, Any]:
    """Processor, cores, memory and versions, JSON-ready; nothing that names the machine or its user."""
    facts: dict[str, Any] = {
        "processor": _from("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": platform.system(),
        "python": platform.python_version(),
    }
    memory = _from("/proc/meminfo", "MemTotal").split(" ")[0]
    if memory.isdigit():
        facts["memory_gb"] = round(int(memory) / 1024**2, 1)
    for package in ("agentflow", "sglang", "torch"):
        try:
            facts[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return facts


def _from(file: str, name: str) -> str:
    """The value of the first line ``name : value`` of a file; empty where there is none."""
    try:
        for line in Path(file).read_text(encoding="utf-8").splitlines():
            key, _, text = line.partition(":")
            if key.strip() == name:
                return text.strip()
    except OSError:
        pass
    return ""
