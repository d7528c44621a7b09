"""The experiment: anchors from some items, estimates for others, error and next-token drift of every method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from agentflow.bench.kvcmas.contenders import CONTENDERS, Contender, Field, Sample, chosen
from agentflow.bench.kvcmas.data import AGENTS, SLOTS, Item, near_duplicate
from agentflow.bench.kvcmas.dense import DenseModel
from agentflow.bench.kvcmas.journal import Journal
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
_COMPARED, _HEAD = 16, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """``anchors`` items make the pool, ``items`` others are tested (two segments each). On the first few of those run
    more: ``brief`` contenders, exact repeats and near duplicates, chains along all four agents."""

    anchors: int = 10
    items: int = 100
    brief: int = 15
    repeats: int = 15
    chains: int = 8

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
        self, items: Sequence[Item], size: Size, journal: Journal, contenders: Sequence[Contender] = CONTENDERS
    ) -> dict[str, list[Row]]:
        """Rows of three kinds: ``methods``, ``repeats`` and ``chain``."""
        names = [item.name for item in items[size.anchors : size.needed]]
        if all(name in journal.done for name in names):
            return journal.rows(names)
        field = Field(self.rope, contenders, anchors=size.anchors)
        for n, item in enumerate(items[: size.anchors]):
            self._say(f"anchors {n + 1} of {size.anchors}")
            field.learn(self._samples(item))
        self._say("fitting")
        field.fit()
        kernel = field.correctors["token-kernel", False]
        for n, item in enumerate(items[size.anchors : size.needed]):
            if item.name in journal.done:
                continue
            self._say(f"item {n + 1} of {size.items}")
            rows: dict[str, list[Row]] = {"methods": [], "repeats": [], "chain": []}
            hop = n % len(_HOPS)
            tokens = self.prompts.tokens(item)
            everyone = AGENTS if n < size.chains else _HOPS[hop]
            places = {agent.name: self.prompts.dense(agent, tokens) for agent in everyone}
            source, target = (places[agent.name] for agent in _HOPS[hop])
            for slot in SLOTS:
                now = [c for c in contenders if n < size.brief or not c.brief]
                rows["methods"] += self._compare(item, tokens, slot, source, target, field, now)
                if n < size.chains:
                    rows["chain"] += self._chain(item, tokens, slot, places, kernel)
            if n < size.repeats:
                rows["repeats"] += self._repeats(item, tokens, source, target, kernel)
            journal.add(item.name, rows)
        return journal.rows(names)

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

    def _compare(
        self,
        item: Item,
        tokens: Tokens,
        slot: str,
        source: Place,
        target: Place,
        field: Field,
        contenders: Sequence[Contender],
    ) -> list[Row]:
        ids, there, before = tokens.of(slot), target.segment(slot), target.before(slot)
        private, compared = self.prompts.follow(target, slot, tokens, _COMPARED)
        after = [*private, *compared[:-1]]
        want = self.model.read(before, there, ids, (), after, keep=len(compared)).logprobs
        sources = {False: source.segment(slot)}
        if any(c.context_free for c in contenders):
            sources[True] = self.prompts.alone(ids)
        moved = {free: _moved(self.rope, kv, there.start) for free, kv in sources.items()}
        estimates: dict[tuple[str, bool], Estimate] = {}
        rows = []
        for contender in contenders:
            free = contender.context_free
            corrector = field.correctors[contender.estimate]
            edge = corrector.edge(slot, source.agent.name, target.agent.name)
            if (found := estimates.get(contender.estimate)) is None:
                made = corrector.estimate(edge, ids, sources[free], there.start)
                assert isinstance(made, Estimate), f"{contender.name}: {made}"
                found = estimates[contender.estimate] = made
            offsets = chosen(contender, found.kv, moved[free], there) if contender.recompute else ()
            kv, got = self.model.read(before, found.kv, ids, offsets, after, keep=len(compared))
            row: Row = {"item": item.name, "slot": slot, "hop": f"{source.agent.name}>{target.agent.name}"}
            row |= {"tokens": len(ids), "method": contender.name, "recomputed": len(offsets), "runs": _runs(offsets)}
            row |= errors(kv, there, moved[free]) | drift(want, got)._asdict()
            row |= {k: float(found.terms[k]) for k in ("distance", "entropy") if k in found.terms}
            row["head"] = _relative(found.kv.part(0, _HEAD), there.part(0, _HEAD))
            rows.append(row)
        return rows

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
                moved = _moved(self.rope, dense, there.start)
                row: Row = {"item": item.name, "slot": slot, "hops": n, "source": kind}
                rows.append(row | errors(found.kv, there, moved))
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
                moved = _moved(self.rope, mine, there.start)
                row: Row = {"item": item.name, "slot": slot, "anchor": kind}
                rows.append(row | errors(found.kv, there, moved))
        return rows


def _moved(rope: Rope, kv: SegmentKV, start: int) -> SegmentKV:
    return SegmentKV(rope.shift(kv.keys, start - kv.start), kv.values, start)


def _relative(found: SegmentKV, dense: SegmentKV) -> float:
    off = (found.values - dense.values).square().sum()
    return float(off / dense.values.square().sum().clamp_min(1e-12))


def _runs(offsets: Sequence[int]) -> int:
    return sum(1 for n, offset in enumerate(offsets) if not n or offsets[n - 1] != offset - 1)
