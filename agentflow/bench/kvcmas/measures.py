"""How far an estimate is from dense KV, how far the next tokens are, and how sure the figures are."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

import torch

from agentflow.cache.kvcmas.types import SegmentKV

__all__ = ["Drift", "Interval", "drift", "errors", "interval", "rank_correlation"]

#: Rounds of the bootstrap.
_ROUNDS = 1000


class Drift(NamedTuple):
    """``kl``: mean KL(dense || other) in nats; ``agreement``: share of positions with the same most likely token;
    ``first``: whether that of the first position is the same."""

    kl: float
    agreement: float
    first: float


class Interval(NamedTuple):
    """A figure and its 95 % interval."""

    value: float
    low: float
    high: float


def errors(found: SegmentKV, dense: SegmentKV, unchanged: SegmentKV) -> dict[str, float]:
    """Relative errors of keys and values: to the dense KV, and to what reusing the source ``unchanged`` would give.

    Each is a ratio of Frobenius norms by layer, and the median over layers (the first, where the delta is zero, left
    out). Norms do not depend on the rotation, so rotated keys are compared.
    """
    out = {}
    for name in ("keys", "values"):
        mine, true, raw = (getattr(kv, name)[1:].float().flatten(1) for kv in (found, dense, unchanged))
        off, delta = (mine - true).norm(dim=1), (raw - true).norm(dim=1)
        out[f"{name}/C"] = float((off / true.norm(dim=1)).median())
        out[f"{name}/delta"] = float((off / delta.clamp_min(1e-9)).median())
    return out


def drift(dense: torch.Tensor, other: torch.Tensor) -> Drift:
    """From log-probabilities (positions, vocabulary) of the same tokens."""
    kl = (dense.exp() * (dense - other)).sum(-1).clamp_min(0)
    same = (dense.argmax(-1) == other.argmax(-1)).float()
    return Drift(float(kl.mean()), float(same.mean()), float(same[0]))


def interval(
    groups: Mapping[str, Sequence[float]], what: Callable[[Sequence[float]], float] = fmean, *, seed: int = 0
) -> Interval:
    """A statistic over all values, with a percentile bootstrap that draws whole groups (items) with replacement."""
    pick = random.Random(seed)
    lists = list(groups.values())
    drawn = sorted(what([v for group in pick.choices(lists, k=len(lists)) for v in group]) for _ in range(_ROUNDS))
    low, high = drawn[round(0.025 * (_ROUNDS - 1))], drawn[round(0.975 * (_ROUNDS - 1))]
    return Interval(what([v for group in lists for v in group]), low, high)


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's; 0 when one of them is constant."""

    def ranks(values: Sequence[float]) -> list[float]:
        order = sorted(range(len(values)), key=values.__getitem__)
        out = [0.0] * len(values)
        at = 0
        while at < len(order):
            end = at
            while end < len(order) and values[order[end]] == values[order[at]]:
                end += 1
            for n in order[at:end]:
                out[n] = (at + end - 1) / 2
            at = end
        return out

    a, b = ranks(first), ranks(second)
    ma, mb = fmean(a), fmean(b)
    above = sum((x - ma) * (y - mb) for x, y in zip(a, b, strict=True))
    below = (sum((x - ma) ** 2 for x in a) * sum((y - mb) ** 2 for y in b)) ** 0.5
    return above / below if below else 0.0
