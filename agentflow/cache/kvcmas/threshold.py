"""When an estimate is good enough: a bound on its uncertainty, fixed or found from a target."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from math import inf, isfinite, isnan

__all__ = ["Threshold"]


class Threshold:
    """Accepts uncertainties up to :attr:`tau`. A higher tau reuses more.

    Give one of three: ``tau`` fixed; ``target_reuse``, the share of segments to accept, kept by the quantile of the
    last ``window`` uncertainties; ``target_kl``, nats: the largest tau under which the corrected calls that were run
    again densely had a mean KL within it, once there are ``enough`` of them (until then everything is accepted, for
    without reuse nothing is learned). None of them: everything is accepted. Each call costs O(window) at most.
    """

    def __init__(
        self,
        *,
        tau: float | None = None,
        target_reuse: float | None = None,
        target_kl: float | None = None,
        window: int = 256,
        enough: int = 12,
    ) -> None:
        self.target_reuse = target_reuse
        self.target_kl = target_kl
        self._fixed = tau
        self._enough = enough
        self._recent: deque[float] = deque(maxlen=window)
        self._ordered: list[float] = []
        self._outcomes: deque[tuple[float, float]] = deque(maxlen=window)
        self._by_kl = float("inf")

    @property
    def tau(self) -> float:
        """The bound now in force."""
        if self._fixed is not None:
            return self._fixed
        if self.target_reuse is not None and self._ordered:
            rank = round(self.target_reuse * len(self._ordered))
            return self._ordered[rank - 1] if rank > 0 else -1.0
        return self._by_kl

    def accepts(self, uncertainty: float) -> bool:
        """Whether to use an estimate; also notes the uncertainty. One that is not finite is refused, and not noted."""
        if not isfinite(uncertainty):
            return False
        if len(self._recent) == self._recent.maxlen:
            del self._ordered[bisect_left(self._ordered, self._recent[0])]
        self._recent.append(uncertainty)
        insort(self._ordered, uncertainty)
        return uncertainty <= self.tau

    def outcome(self, uncertainty: float, kl: float) -> None:
        """A corrected call was run again densely: what its uncertainty had been, and the KL found. NaN is worst."""
        if self.target_kl is None or not isfinite(uncertainty):
            return
        self._outcomes.append((uncertainty, inf if isnan(kl) else kl))
        if len(self._outcomes) < self._enough:
            return
        ordered = sorted(self._outcomes)
        bound = self.target_kl * (1 + 1e-9)  # sums round
        total, best = 0.0, 0.0 if ordered[0][0] > 0 else -1.0
        for n, (u, value) in enumerate(ordered, 1):
            total += value
            tied = n < len(ordered) and ordered[n][0] == u  # tau takes all of a tie or none
            if not tied and total / n <= bound:
                best = u
        everything = total / len(ordered) <= bound
        self._by_kl = float("inf") if everything else best
