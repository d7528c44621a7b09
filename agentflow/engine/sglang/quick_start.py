"""What SGLang imports at its start and a CPU engine never uses, left out: about a quarter of the start-up time."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

__all__ = ["prepare"]

_ENTRY = re.compile(r"^EntryClass\s*=\s*(\[[^\]]*\]|\w+)", re.MULTILINE)


def prepare(model_path: str) -> None:
    """Call it before the first import of SGLang, in the engine's host process on a CPU.

    Kernels for NVIDIA GPUs are reported as not installed, and of SGLang's models only those that the model's
    architecture needs are loaded (by SGLang's own switch for that).
    """
    sys.modules.setdefault("flashinfer", None)  # type: ignore[arg-type]
    os.environ.setdefault("SGLANG_IS_FLASHINFER_AVAILABLE", "false")
    unneeded = _other_models(_architectures(Path(model_path)))
    if unneeded:
        os.environ.setdefault("SGLANG_DISABLED_MODEL_ARCHS", ",".join(unneeded))


def _architectures(folder: Path) -> set[str]:
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return set(config["architectures"])
    except (OSError, ValueError, KeyError, TypeError):
        return set()


def _other_models(architectures: set[str]) -> list[str]:
    """SGLang's model modules without these architectures; none when one of them is in no module."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations or not architectures:
        return []
    found: set[str] = set()
    others: list[str] = []
    for path in (Path(spec.submodule_search_locations[0]) / "srt" / "models").glob("*.py"):
        match = _ENTRY.search(path.read_text(encoding="utf-8", errors="replace"))
        here = set(re.findall(r"\w+", match[1])) & architectures if match else set()
        found |= here
        if not here:
            others.append(path.stem)
    return others if found == architectures else []
