"""The methods that are compared: correctors over one set of anchors, and what is recomputed after them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from agentflow.cache.kvcmas.anchors import Features
from agentflow.cache.kvcmas.corrector import Corrector
from agentflow.cache.kvcmas.recompute import Choice, change, choose
from agentflow.cache.kvcmas.rope import Rope
from agentflow.cache.kvcmas.types import CONTEXT_FREE, Edge, SegmentKV

__all__ = ["CONTENDERS", "Contender", "Field", "Sample", "chosen"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A method, and the share of tokens that is recomputed after it.

    ``choice`` is how they are found; ``deviation`` stands for CacheBlend's way: the tokens whose values are most off in
    the second layer, which it computes for all of them first. ``brief`` ones run on part of the items.
    """

    name: str
    method: str
    recompute: float = 0.0
    choice: Choice | Literal["deviation"] = "change"
    min_run: int = 1
    context_free: bool = False
    brief: bool = False

    @property
    def estimate(self) -> tuple[str, bool]:
        """What it starts from; contenders with the same share the work."""
        return self.method, self.context_free


CONTENDERS: tuple[Contender, ...] = (
    Contender(name="FullShared", method="none"),
    Contender(name="FullShared + first 15 %", method="none", recompute=0.15, choice="first"),
    Contender(name="FullShared + first 30 %", method="none", recompute=0.30, choice="first", brief=True),
    Contender(name="CacheBlend, 15 %", method="none", recompute=0.15, choice="deviation"),
    Contender(name="CacheBlend, 30 %", method="none", recompute=0.30, choice="deviation", brief=True),
    Contender(name="KVComm as released", method="kvcomm"),
    Contender(name="KVComm de-rotated", method="kvcomm-derotated", brief=True),
    Contender(name="KVComm, context-free", method="kvcomm-derotated", context_free=True, brief=True),
    Contender(name="segment (paper)", method="segment"),
    Contender(name="segment, context-free", method="segment", context_free=True, brief=True),
    Contender(name="segment + first 15 %", method="segment", recompute=0.15, choice="first", brief=True),
    Contender(name="token-id", method="token-id", brief=True),
    Contender(name="ridge", method="ridge", brief=True),
    Contender(name="ridge + first 15 %", method="ridge", recompute=0.15, choice="first", brief=True),
    Contender(name="token-kernel", method="token-kernel"),
    Contender(name="token-kernel, context-free", method="token-kernel", context_free=True, brief=True),
    Contender(name="token-kernel + first 15 %", method="token-kernel", recompute=0.15, choice="first"),
    Contender(name="token-kernel + changed 15 %", method="token-kernel", recompute=0.15, brief=True),
    Contender(name="token-kernel + changed, runs of 4", method="token-kernel", recompute=0.15, min_run=4, brief=True),
    Contender(name="token-kernel + both, 15 %", method="token-kernel", recompute=0.15, choice="both", brief=True),
    Contender(name="token-kernel + first 20 %", method="token-kernel", recompute=0.20, choice="first"),
    Contender(name="token-kernel + first 30 %", method="token-kernel", recompute=0.30, choice="first"),
)


def chosen(contender: Contender, found: SegmentKV, unchanged: SegmentKV, dense: SegmentKV) -> tuple[int, ...]:
    """Offsets that the contender recomputes, given the estimate, the source moved, and (for CacheBlend) the truth."""
    how = contender.choice
    if how == "deviation":
        scores, how = (found.values[1] - dense.values[1]).flatten(1).norm(dim=1), "change"
    else:
        base = Features(unchanged.keys.flatten(2), unchanged.values.flatten(2))
        delta = Features(base.keys, (found.values - unchanged.values).flatten(2))
        scores = change(delta, base)
    return choose(found.tokens, contender.recompute, how, scores, min_run=contender.min_run)


@dataclass(frozen=True, slots=True)
class Sample:
    """A segment that anchors are made from: its edge, tokens, and both agents' KV."""

    edge: Edge
    tokens: Sequence[int]
    source: SegmentKV
    target: SegmentKV


class Field:
    """A corrector for each estimate that contenders start from. Each kind of anchor is made once and shared."""

    def __init__(self, rope: Rope, contenders: Sequence[Contender], *, anchors: int, rank: int = 32) -> None:
        self.correctors: dict[tuple[str, bool], Corrector] = {}
        for method, free in dict.fromkeys(c.estimate for c in contenders):
            self.correctors[method, free] = Corrector(
                rope,
                method=method,
                rank=rank,
                anchors=anchors,
                recompute=0.0,
                pool_bytes=1 << 40,
                reference="context-free" if free else "chained",
            )

    @torch.inference_mode()
    def learn(self, samples: Sequence[Sample]) -> None:
        """Make anchors of samples for every corrector that wants them."""
        makers: dict[tuple[bool, bool, bool, float], Corrector] = {}
        for (_, free), corrector in self.correctors.items():
            if not corrector.learns:
                continue
            how = corrector.method
            maker = makers.setdefault((how.low_rank, how.derotated, free, how.base_share), corrector)
            for sample in samples:
                if (sample.edge.source == CONTEXT_FREE) != free:
                    continue
                if maker is corrector:
                    corrector.learn(sample.edge, sample.tokens, sample.source, sample.target)
                    corrector.work(until=lambda: True)  # the decomposition now, the fit at the end
                else:
                    made = next(a for a in maker.pool.of(sample.edge) if a.tokens == tuple(sample.tokens))
                    corrector.adopt(sample.edge, made)

    @torch.inference_mode()
    def fit(self) -> None:
        """Prepare all estimators for the anchors they have."""
        for corrector in self.correctors.values():
            corrector.work()
