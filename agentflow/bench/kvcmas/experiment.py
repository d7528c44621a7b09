"""The experiment: anchors from some items, estimates for others, error and next-token drift of every method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from agentflow.bench.kvcmas.contenders import CONTENDERS, Contender, Field, Sample
from agentflow.bench.kvcmas.data import AGENTS, SLOTS, Item, near_duplicate
from agentflow.bench.kvcmas.dense import DenseModel, joined
from agentflow.bench.kvcmas.measures import drift, errors
from agentflow.bench.kvcmas.prompts import Place, Prompts, Tokens
from agentflow.cache.kvcmas.corrector import Corrector
from agentflow.cache.kvcmas.rope import Rope
from agentflow.cache.kvcmas.types import CONTEXT_FREE, Edge, Estimate, SegmentKV

__all__ = ["Experiment", "Size"]

#: Rows are plain dicts, ready for JSON.
Row = dict[str, Any]
#: Ways of a segment from agent to agent, in the workflow's order.
_HOPS = tuple(pairwise(AGENTS))
#: Tokens that are compared after a segment, and first tokens whose error is noted as a sign of confidence.
_COMPARED, _HEAD = 20, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """``anchors`` items make the pool, ``items`` others are tested (two segments each); of those ``repeats`` also
    against an exact repeat and a near duplicate, and ``chains`` along all four agents."""

    anchors: int = 10
    items: int = 100
    repeats: int = 50
    chains: int = 30

    @property
    def needed(self) -> int:
        """Items to load."""
        return self.anchors + self.items


class Experiment:
    """Runs over one model. ``say`` hears of progress."""

    def __init__(self, model: DenseModel, say: Callable[[str], None]) -> None:
        self.model = model
        self.rope = Rope.of(model.config)
        self.prompts = Prompts(model)
        self._say = say

    @torch.inference_mode()
    def run(
        self, items: Sequence[Item], size: Size, contenders: Sequence[Contender] = CONTENDERS
    ) -> dict[str, list[Row]]:
        """Rows of three kinds: ``methods``, ``repeats`` and ``chain``."""
        samples: list[Sample] = []
        for n, item in enumerate(items[: size.anchors]):
            self._say(f"anchors {n + 1} of {size.anchors}")
            samples += self._samples(item)
        field = Field(self.rope, contenders, anchors=size.anchors)
        self._say("fitting")
        field.learn(samples)
        samples.clear()
        rows: dict[str, list[Row]] = {"methods": [], "repeats": [], "chain": []}
        for n, item in enumerate(items[size.anchors : size.needed]):
            self._say(f"item {n + 1} of {size.items}")
            hop = n % len(_HOPS)
            tokens = self.prompts.tokens(item)
            everyone = AGENTS if n < size.chains else _HOPS[hop]
            places = {agent.name: self.prompts.dense(agent, tokens) for agent in everyone}
            source, target = (places[agent.name] for agent in _HOPS[hop])
            for slot in SLOTS:
                rows["methods"] += self._compare(item, tokens, slot, source, target, field)
                if n < size.chains:
                    rows["chain"] += self._chain(item, tokens, slot, places, field.correctors["kernel"])
            if n < size.repeats:
                rows["repeats"] += self._repeats(item, tokens, source, target, field.correctors["kernel"])
        return rows

    def _samples(self, item: Item) -> list[Sample]:
        tokens = self.prompts.tokens(item)
        places = {agent.name: self.prompts.dense(agent, tokens) for agent in AGENTS}
        out = []
        for slot in SLOTS:
            alone = self.prompts.alone(tokens.of(slot))
            for source, target in _HOPS:
                there = places[target.name].segment(slot)
                mine = places[source.name].segment(slot)
                out.append(Sample(Edge(slot, source.name, target.name), tokens.of(slot), mine, there))
                out.append(Sample(Edge(slot, CONTEXT_FREE, target.name), tokens.of(slot), alone, there))
        return out

    def _compare(self, item: Item, tokens: Tokens, slot: str, source: Place, target: Place, field: Field) -> list[Row]:
        ids, there, before = tokens.of(slot), target.segment(slot), target.before(slot)
        sources = {False: source.segment(slot), True: self.prompts.alone(ids)}
        private, compared = self.prompts.follow(target, slot, tokens, _COMPARED)
        after = [*private, *compared[:-1]]
        want = self.model.extend(joined(before, there), after, keep=len(compared)).logprobs
        rows = []
        for contender in field.contenders:
            corrector = field.correctors[contender.name]
            mine = sources[contender.context_free]
            edge = corrector.edge(slot, source.agent.name, target.agent.name)
            found = corrector.estimate(edge, ids, mine, there.start)
            if not isinstance(found, Estimate):
                raise AssertionError(f"{contender.name} refused: {found}")
            chosen = self._deviating(found.kv, there) if contender.deviation else found.recompute
            kv = self.model.recompute(before, found.kv, ids, chosen)
            got = self.model.extend(joined(before, kv), after, keep=len(compared)).logprobs
            moved = SegmentKV(self.rope.shift(mine.keys, there.start - mine.start), mine.values, there.start)
            head = float(_relative(found.kv.part(0, _HEAD), there.part(0, _HEAD)))
            row: Row = {"item": item.name, "slot": slot, "hop": f"{edge.source}>{edge.target}", "tokens": len(ids)}
            row |= {"method": contender.name, "recomputed": len(chosen), "runs": _runs(chosen), "head": head}
            row |= errors(self.rope, kv, there, moved) | drift(want, got)._asdict()
            row |= {k: float(found.terms[k]) for k in ("distance", "entropy") if k in found.terms}
            rows.append(row)
        return rows

    @staticmethod
    def _deviating(found: SegmentKV, dense: SegmentKV) -> tuple[int, ...]:
        """The 15 % of tokens whose values deviate most in the second layer, which CacheBlend computes for all."""
        off = (found.values[1] - dense.values[1]).flatten(1).norm(dim=1)
        count = round(0.15 * found.tokens)
        return tuple(sorted(off.topk(count).indices.tolist()))

    def _chain(
        self, item: Item, tokens: Tokens, slot: str, places: dict[str, Place], corrector: Corrector
    ) -> list[Row]:
        """The question (or answer) goes through all agents, each estimate out of the one before; the first is dense."""
        ids, rows = tokens.of(slot), []
        fed = places[AGENTS[0].name].segment(slot)
        for n, (source, target) in enumerate(_HOPS, 1):
            edge, there = Edge(slot, source.name, target.name), places[target.name].segment(slot)
            dense = places[source.name].segment(slot)
            for kind, mine in (("chained", fed), ("from dense", dense)):
                found = corrector.estimate(edge, ids, mine, there.start)
                assert isinstance(found, Estimate), found
                moved = SegmentKV(self.rope.shift(dense.keys, there.start - dense.start), dense.values, there.start)
                row: Row = {"item": item.name, "slot": slot, "hops": n, "source": kind}
                rows.append(row | errors(self.rope, found.kv, there, moved))
                if kind == "chained":
                    fed = found.kv
        return rows

    def _repeats(self, item: Item, tokens: Tokens, source: Place, target: Place, usual: Corrector) -> list[Row]:
        """With an anchor of the very segment, or of a near duplicate, in the place of one of the pool's."""
        like = Tokens(*(self.model.ids(near_duplicate(t)) for t in (item.question, item.answer)))
        twins = {agent.name: self.prompts.dense(agent, like) for agent in (source.agent, target.agent)}
        rows = []
        for slot in SLOTS:
            edge = Edge(slot, source.agent.name, target.agent.name)
            mine, there = source.segment(slot), target.segment(slot)
            pool = usual.pool.of(edge)
            kinds = {
                "exact repeat": (tokens.of(slot), mine, there),
                "near duplicate": (
                    like.of(slot), twins[source.agent.name].segment(slot), twins[target.agent.name].segment(slot)
                ),
                "unrelated": None,
            }  # fmt: skip
            for kind, extra in kinds.items():
                corrector = usual
                if extra is not None:
                    corrector = Corrector(self.rope, recompute=0.0, anchors=len(pool), pool_bytes=1 << 40)
                    for anchor in pool[1:]:
                        corrector.adopt(edge, anchor)
                    corrector.learn(edge, *extra)
                    corrector.work()
                found = corrector.estimate(edge, tokens.of(slot), mine, there.start)
                assert isinstance(found, Estimate), found
                moved = SegmentKV(self.rope.shift(mine.keys, there.start - mine.start), mine.values, there.start)
                row: Row = {"item": item.name, "slot": slot, "anchor": kind}
                rows.append(row | errors(self.rope, found.kv, there, moved))
        return rows


def _relative(found: SegmentKV, dense: SegmentKV) -> float:
    off = (found.values - dense.values).square().sum()
    return float(off / dense.values.square().sum().clamp_min(1e-12))


def _runs(offsets: Sequence[int]) -> int:
    return sum(1 for n, offset in enumerate(offsets) if not n or offsets[n - 1] != offset - 1)
