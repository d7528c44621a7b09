"""KVCMAS: reuse one agent's KV of a shared segment, corrected, under another agent's prefix.

``types`` says what goes in and out, ``rope`` moves keys to other positions, ``corrector`` ties the parts together.
Needs torch; importing this package does not load it.
"""

from __future__ import annotations

from agentflow.cache.kvcmas.types import CONTEXT_FREE, Correction, Edge, Estimate, Refusal, SegmentKV

__all__ = ["CONTEXT_FREE", "Correction", "Edge", "Estimate", "Refusal", "SegmentKV"]
