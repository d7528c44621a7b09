"""Which tokens of a prompt are filled with corrected KV, and which the model computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentflow.cache.kvcmas import Estimate, SegmentKV

__all__ = ["Fill", "FillPlan", "fills_of"]


@dataclass(frozen=True, slots=True)
class Fill:
    """KV for the positions ``kv.start`` to ``kv.end - 1``."""

    kv: SegmentKV

    @property
    def start(self) -> int:
        return self.kv.start

    @property
    def end(self) -> int:
        return self.kv.end


@dataclass(frozen=True, slots=True)
class FillPlan:
    """Fills of one prompt, sorted and apart from each other. ``start`` is where the cached prefix ended."""

    start: int
    fills: tuple[Fill, ...]

    @property
    def boundary(self) -> int | None:
        """The first filled position: from there on nothing is exact. None without fills."""
        return self.fills[0].start if self.fills else None

    @property
    def tokens(self) -> int:
        """Tokens that are filled."""
        return sum(f.end - f.start for f in self.fills)

    def within(self, first: int, end: int) -> list[SegmentKV]:
        """The fills' parts at positions ``first`` to ``end - 1``."""
        out = []
        for fill in self.fills:
            low, high = max(fill.start, first), min(fill.end, end)
            if low < high:
                out.append(fill.kv.part(low - fill.start, high - fill.start))
        return out

    def runs(self, first: int, end: int) -> list[tuple[int, int]]:
        """Positions from ``first`` to ``end - 1`` that are computed, as (first, end) of each run.

        The last position always is: its logits are wanted, and a chunk must compute something.
        """
        out: list[tuple[int, int]] = []
        at = first
        for part in self.within(first, end - 1):
            if part.start > at:
                out.append((at, part.start))
            at = part.end
        out.append((at, end))
        return out


def fills_of(estimate: Estimate, skip: int, recompute: bool = True) -> list[Fill]:
    """The estimate without its first ``skip`` tokens and without those that are to be computed."""
    out: list[Fill] = []
    at = skip
    tokens = estimate.kv.tokens
    runs: Sequence[tuple[int, int]] = estimate.runs if recompute else ()
    for first, end in (*runs, (tokens, tokens)):
        if first > at:
            out.append(Fill(estimate.kv.part(at, first)))
        at = max(at, end)
    return out
