"""The methods that are compared, each a corrector with its settings, over one set of anchors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentflow.cache.kvcmas.corrector import Corrector
from agentflow.cache.kvcmas.rope import Rope
from agentflow.cache.kvcmas.types import Edge, SegmentKV

__all__ = ["CONTENDERS", "Contender", "Field", "Sample"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A method with its settings. ``deviation`` marks the one that chooses what to recompute as CacheBlend does, by how
    far the second layer's values are off after computing two layers densely."""

    name: str
    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    context_free: bool = False
    deviation: bool = False


CONTENDERS: tuple[Contender, ...] = (
    Contender(name="FullShared", method="none"),
    Contender(name="first 15 %", method="cacheblend"),
    Contender(name="first 30 %", method="cacheblend", settings={"recompute": 0.30}),
    Contender(name="CacheBlend 15 %", method="none", deviation=True),
    Contender(name="KVComm as released", method="kvcomm"),
    Contender(name="KVComm de-rotated", method="kvcomm-derotated"),
    Contender(name="KVComm, context-free", method="kvcomm-derotated", context_free=True),
    Contender(name="segment (paper)", method="segment"),
    Contender(name="segment, context-free", method="segment", context_free=True),
    Contender(name="token-id", method="token-id"),
    Contender(name="ridge", method="ridge"),
    Contender(name="kernel", method="token-kernel", settings={"recompute": 0.0}),
    Contender(name="kernel, context-free", method="token-kernel", settings={"recompute": 0.0}, context_free=True),
    Contender(name="kernel + 15 % change", method="token-kernel"),
    Contender(name="kernel + 15 % in runs of 4", method="token-kernel", settings={"min_run": 4}),
    Contender(name="kernel + first 15 %", method="token-kernel", settings={"choice": "first"}),
)


@dataclass(frozen=True, slots=True)
class Sample:
    """A segment that anchors are made from: its edge, tokens, and both agents' KV."""

    edge: Edge
    tokens: Sequence[int]
    source: SegmentKV
    target: SegmentKV


class Field:
    """A corrector for each contender. Each kind of anchor is made once and shared."""

    def __init__(self, rope: Rope, contenders: Sequence[Contender], *, anchors: int, rank: int = 32) -> None:
        self.contenders = contenders
        self.correctors = {
            c.name: Corrector(
                rope,
                method=c.method,
                rank=rank,
                anchors=anchors,
                pool_bytes=1 << 40,
                reference="context-free" if c.context_free else "chained",
                **c.settings,
            )
            for c in contenders
        }

    def learn(self, samples: Sequence[Sample]) -> None:
        """Make anchors of samples for every contender that wants them, and fit."""
        makers: dict[tuple[Any, ...], Corrector] = {}
        for corrector in self.correctors.values():
            if not corrector.learns:
                continue
            kind = (corrector.rank, corrector.method.derotated, corrector.reference)
            maker = makers.setdefault(kind, corrector)
            for sample in samples:
                if (sample.edge.source == "") != (corrector.reference == "context-free"):
                    continue
                if maker is corrector:
                    corrector.learn(sample.edge, sample.tokens, sample.source, sample.target)
                    corrector.work(until=lambda: True)  # the SVD now, the fit at the end
                else:
                    made = next(a for a in maker.pool.of(sample.edge) if a.tokens == tuple(sample.tokens))
                    corrector.adopt(sample.edge, made)
        for corrector in self.correctors.values():
            corrector.work()
