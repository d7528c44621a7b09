"""The quality guard: turns correction off for an edge whose corrected calls drift from dense ones."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import fmean

from agentflow.cache.kvcmas.types import Edge

__all__ = ["Guard", "Verdict"]


@dataclass(slots=True)
class Verdict:
    """What is known of an edge's quality. ``off`` since ``reason``; ``skipped`` calls since then."""

    kl: deque[float]
    agreement: deque[float]
    off: bool = False
    reason: str = ""
    skipped: int = 0
    times_off: int = 0
    terms: dict[str, float] = field(default_factory=dict)


class Guard:
    """Over the last ``window`` checks of an edge, at least ``enough``: mean KL at most ``max_kl`` nats and mean
    agreement at least ``min_agreement``, or the edge is off.

    An edge that is off comes back on trial after ``rest`` calls that would have used it, with its record wiped; each
    time it goes off again the rest doubles, up to ``64 * rest``. At most ``edges`` are remembered, oldest forgotten.
    """

    def __init__(
        self,
        *,
        max_kl: float = 0.1,
        min_agreement: float = 0.8,
        window: int = 16,
        enough: int = 4,
        rest: int = 64,
        edges: int = 4096,
    ) -> None:
        self.max_kl = max_kl
        self.min_agreement = min_agreement
        self.enough = enough
        self.rest = rest
        self._window = window
        self._edges = edges
        self._known: dict[Edge, Verdict] = {}

    def allows(self, edge: Edge) -> bool:
        """Whether the edge may be used now. Counts the call when it may not, and ends the rest when it is over."""
        found = self._known.get(edge)
        if found is None or not found.off:
            return True
        found.skipped += 1
        if found.skipped < self.rest * 2 ** min(found.times_off - 1, 6):
            return False
        found.off, found.skipped = False, 0
        found.kl.clear()
        found.agreement.clear()
        return True

    def check(self, edge: Edge, kl: float, agreement: float) -> bool:
        """Note one comparison with a dense run; True when the edge is off afterwards. NaN counts as the worst."""
        kl, agreement = (math.inf if math.isnan(kl) else kl), (0.0 if math.isnan(agreement) else agreement)
        found = self._known.get(edge)
        if found is None:
            if len(self._known) >= self._edges:
                del self._known[next(iter(self._known))]
            found = self._known[edge] = Verdict(deque(maxlen=self._window), deque(maxlen=self._window))
        found.kl.append(kl)
        found.agreement.append(agreement)
        if found.off or len(found.kl) < self.enough:
            return found.off
        mean_kl, mean_agreement = fmean(found.kl), fmean(found.agreement)
        bad_kl, bad_agreement = mean_kl > self.max_kl, mean_agreement < self.min_agreement
        if bad_kl or bad_agreement:
            found.off, found.skipped = True, 0
            found.times_off += 1
            found.reason = "KL above its bound" if bad_kl else "agreement below its bound"
            found.terms = {"kl": mean_kl, "agreement": mean_agreement, "checks": float(len(found.kl))}
        return found.off

    def verdict(self, edge: Edge) -> Verdict | None:
        """What is known of an edge, if anything."""
        return self._known.get(edge)

    @property
    def off(self) -> int:
        """How many edges are off."""
        return sum(v.off for v in self._known.values())
