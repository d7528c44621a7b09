"""Axes: where a value lies on a plot, and where its ticks are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Scale", "linear", "logarithmic", "number"]


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps ``low`` to ``start`` and ``high`` to ``end``, in pixels."""

    low: float
    high: float
    start: float
    end: float
    ticks: Sequence[float]
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = self.low, self.high, min(max(value, self.low), self.high)
        if self.log:
            low, high, at = math.log(low), math.log(high), math.log(at)
        share = (at - low) / (high - low) if high > low else 0.5
        return self.start + share * (self.end - self.start)


def linear(low: float, high: float, start: float, end: float, *, count: int = 4) -> Scale:
    """A scale from at most ``low`` to at least ``high`` with round ticks, about ``count`` of them."""
    span = (high - low) or abs(high) or 1.0
    rough = span / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    if last <= first:
        last = first + 1
    ticks = [round(i * step, 12) for i in range(first, last + 1)]
    return Scale(ticks[0], ticks[-1], start, end, ticks)


def logarithmic(values: Sequence[float], start: float, end: float) -> Scale:
    """A scale whose ticks are the values themselves; linear where one is 0."""
    found = sorted(set(values))
    if found[0] <= 0 or len(found) == 1:
        low, high = found[0], found[-1]
        return Scale(low, high if high > low else low + 1.0, start, end, found)
    return Scale(found[0], found[-1], start, end, found, log=True)


def number(value: float) -> str:
    """A tick's text: short."""
    if value == 0:
        return "0"
    if abs(value) >= 1_000:
        return f"{value / 1000:g}k"
    return f"{value:.3g}"
