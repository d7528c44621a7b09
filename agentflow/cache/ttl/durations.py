"""How long tools take: distributions of durations from what was seen, tools still running included.

A tool that still runs, was cancelled, or hit its time limit after ``d`` seconds shows only that it takes longer
than ``d``: a right-censored observation. Leaving those out makes slow tools look fast, counting them as ``d``
too. The Kaplan-Meier estimator counts them for as long as they were watched.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["Curve", "Distribution", "Exponential", "Hull", "Samples", "product"]

Floats = npt.NDArray[np.float64]


class Distribution(Protocol):
    """Probability that something returns within a time, in seconds."""

    def cdf(self, tau: float) -> float:
        """P(duration <= tau)."""
        ...

    def candidates(self) -> Floats:
        """Times at which it is worth to look, ascending."""
        ...


@dataclass(frozen=True, slots=True)
class Exponential:
    """The prior for tools of which too little is known: exponential with ``mean`` seconds."""

    mean: float = 1.0

    def cdf(self, tau: float) -> float:
        return -math.expm1(-tau / self.mean) if tau > 0 else 0.0

    def candidates(self) -> Floats:
        """Its 1/64 quantiles, for products with others; alone it has a closed form (see ``tau_star``)."""
        return -self.mean * np.log1p(-np.arange(1, 64) / 64.0)


class Hull:
    """The points of a curve that can be best: the upper convex hull of (seconds paid, probability), from (0, 0) on.

    ``seconds`` is what a time-to-live costs at each of ``times``. Making it is O(n), asking it O(log n).
    """

    __slots__ = ("_chances", "_seconds", "_slopes", "_times")

    def __init__(self, times: Floats, seconds: Floats, chances: Floats) -> None:
        kept_times, kept_seconds, kept_chances = [0.0], [0.0], [0.0]
        #: Slopes of the hull's edges with their sign turned, so that they ascend.
        slopes: list[float] = []
        for time, paid, chance in zip(times.tolist(), seconds.tolist(), chances.tolist(), strict=True):
            while chance > (below := kept_chances[-1]):
                before = kept_seconds[-1]
                slope = -math.inf if paid <= before else (below - chance) / (paid - before)
                if slopes and slope <= slopes[-1]:
                    kept_times.pop()
                    kept_seconds.pop()
                    kept_chances.pop()
                    slopes.pop()
                    continue
                kept_times.append(time)
                kept_seconds.append(paid)
                kept_chances.append(chance)
                slopes.append(slope)
                break
        self._slopes, self._times, self._seconds, self._chances = slopes, kept_times, kept_seconds, kept_chances

    def best(self, benefit: float, cost: float) -> tuple[float, float, float]:
        """Time, probability and gain at the first of the best points; ``benefit`` must be above 0."""
        place = bisect_left(self._slopes, -cost / benefit)
        chance = self._chances[place]
        return self._times[place], chance, chance * benefit - cost * self._seconds[place]


class Curve:
    """A step function: ``cdf`` is ``values[i]`` from ``times[i]`` on, 0 before the first; both ascend.

    It does not change, so what is asked again and again is kept with it.
    """

    __slots__ = ("_asked", "_hulls", "times", "values")

    def __init__(self, times: Floats, values: Floats) -> None:
        self.times = times
        self.values = values
        self._asked = 0
        self._hulls: dict[bool, Hull] = {}

    def hull(self, held: bool) -> Hull | None:
        """Its hull, over the seconds until the return where ``held``, else over the time itself; None when it was
        never asked before: looking through all points once is cheaper than making a hull."""
        self._asked += 1
        if self._asked == 1:
            return None
        found = self._hulls.get(held)
        if found is None:
            found = self._hulls[held] = Hull(self.times, self.held() if held else self.times, self.values)
        return found

    def held(self) -> Floats:
        """E[min(duration, t)] at each of ``times``: the area under the survival function up to there."""
        steps = np.diff(self.times, prepend=0.0)
        survival = 1.0 - np.concatenate([[0.0], self.values[:-1]])
        return np.asarray(np.cumsum(steps * survival))

    def cdf(self, tau: float) -> float:
        place = int(np.searchsorted(self.times, tau, side="right"))
        return float(self.values[place - 1]) if place else 0.0

    def candidates(self) -> Floats:
        return self.times

    @classmethod
    def empirical(cls, durations: Iterable[float]) -> Curve:
        """The empirical CDF; infinite durations (that never return) keep it below 1."""
        ordered = np.sort(np.array(list(durations), dtype=np.float64))
        last = np.flatnonzero(np.append(ordered[1:] != ordered[:-1], True)) if len(ordered) else np.arange(0)
        times = ordered[last]
        values = (last + 1) / max(1, len(ordered))
        finite = int(np.searchsorted(times, np.inf))
        return cls(times[:finite], values[:finite])

    @classmethod
    def kaplan_meier(cls, durations: Sequence[float], censored: Sequence[bool]) -> Curve:
        """The Kaplan-Meier estimate of the CDF: 1 - prod over times t of (1 - returned(t) / watched(t)).

        What is censored at a time counts as watched at it. O(n log n).
        """
        times = np.asarray(durations, dtype=np.float64)
        cut = np.asarray(censored, dtype=bool)
        order = np.argsort(times, kind="stable")
        times, cut = times[order], cut[order]
        distinct, first = np.unique(times, return_index=True)
        if not len(distinct):
            return cls(distinct, distinct)
        watched = len(times) - first
        returned = np.add.reduceat((~cut).astype(np.int64), first)
        survival = np.cumprod(1.0 - returned / watched)
        keep = (returned > 0) & np.isfinite(distinct)
        return cls(distinct[keep], 1.0 - survival[keep])


def product(parts: Sequence[Distribution]) -> Distribution:
    """The time until all of several independent ones have returned."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, Curve) and all(part is first for part in parts):
        return Curve(first.times, first.values ** len(parts))
    times = np.unique(np.concatenate([p.candidates() for p in parts]))
    values = np.ones(len(times))
    for part in parts:
        values *= [part.cdf(t) for t in times] if isinstance(part, Exponential) else _at(part, times)
    return Curve(times, values)


def _at(part: Distribution, times: Floats) -> Floats:
    if isinstance(part, Curve):
        padded = np.concatenate([[0.0], part.values])
        return np.asarray(padded[np.searchsorted(part.times, times, side="right")])
    return np.array([part.cdf(t) for t in times])


class Samples:
    """The newest ``window`` durations of one thing, as (seconds, censored), and their curve.

    The curve is made anew only when an eighth of the samples is new: adding costs O(1), reading it O(1)
    amortised.
    """

    __slots__ = ("_curve", "_finite", "_fresh", "_samples", "_sum", "censored_counted", "complete")

    def __init__(self, window: int = 256, *, censored: bool = True) -> None:
        self._samples: deque[tuple[float, bool]] = deque(maxlen=window)
        self._curve: Curve | None = None
        self._fresh = 0
        self._finite = 0
        self._sum = 0.0
        #: Whether censored samples count; without them the curve is the plain empirical CDF.
        self.censored_counted = censored
        #: Samples that are not censored.
        self.complete = 0

    def __len__(self) -> int:
        return len(self._samples)

    def add(self, seconds: float, *, censored: bool = False) -> None:
        """Count a duration. Negative and not-a-number ones are left out, as a clock that jumped makes them."""
        if not seconds >= 0.0:
            return
        samples = self._samples
        if len(samples) == samples.maxlen:
            self._count(*samples[0], -1)
        samples.append((seconds, censored))
        self._fresh += 1
        if not censored:
            self._count(seconds, censored, 1)

    def curve(self, running: Callable[[], Sequence[float]] = list) -> Curve:
        """The CDF. ``running`` gives the ages of those still out, counted as censored when it is made anew."""
        if self._curve is None or self._fresh * 8 >= len(self._samples):
            self._fresh = 0
            self._curve = self._make(running())
        return self._curve

    def mean(self) -> float:
        """Mean of the finite, complete durations; 0.0 without any. O(1)."""
        return max(0.0, self._sum / self._finite) if self._finite else 0.0

    def to_json(self) -> list[list[float]]:
        """The samples as [seconds, 0 or 1 for censored]; infinity is written as -1."""
        return [[s if math.isfinite(s) else -1.0, float(cut)] for s, cut in self._samples]

    def load(self, data: Iterable[Sequence[float]]) -> None:
        """Add what :meth:`to_json` wrote."""
        for seconds, cut in data:
            self.add(math.inf if seconds == -1.0 else float(seconds), censored=bool(cut))

    def _count(self, seconds: float, censored: bool, sign: int) -> None:
        if censored:
            return
        self.complete += sign
        if seconds < math.inf:
            self._finite += sign
            self._sum = self._sum + sign * seconds if self._finite else 0.0

    def _make(self, running: Sequence[float]) -> Curve:
        if not self.censored_counted:
            return Curve.empirical(s for s, cut in self._samples if not cut)
        if (
            self.complete == len(self._samples) and not running
        ):  # nothing is censored: both are the same, this is faster
            return Curve.empirical([s for s, _ in self._samples])
        durations = [s for s, _ in self._samples]
        cut = [c for _, c in self._samples]
        durations += running
        cut += [True] * len(running)
        return Curve.kaplan_meier(durations, cut)
