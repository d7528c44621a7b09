"""KVCMAS: reuse one agent's KV of a shared segment, corrected, under another agent's prefix.

``types`` says what goes in and out, ``rope`` moves keys to other positions, ``corrector`` ties the parts together:
``anchors`` (what is remembered of dense prefills), the estimators, ``recompute``, ``threshold`` and ``guard``. Needs
torch; importing this package does not load it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agentflow.cache.kvcmas.types import CONTEXT_FREE, Correction, Edge, Estimate, Refusal, SegmentKV

if TYPE_CHECKING:
    from agentflow.cache.kvcmas.corrector import Corrector
    from agentflow.cache.kvcmas.rope import Rope, unsupported

__all__ = [
    "CONTEXT_FREE",
    "Correction",
    "Corrector",
    "Edge",
    "Estimate",
    "Refusal",
    "Rope",
    "SegmentKV",
    "unsupported",
]

_WITH_TORCH = {"Corrector": "corrector", "Rope": "rope", "unsupported": "rope"}


def __getattr__(name: str) -> Any:
    if name in _WITH_TORCH:
        from importlib import import_module

        return getattr(import_module(f"{__name__}.{_WITH_TORCH[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
