"""What correction costs: seconds for a segment of 512 tokens, and bytes of an anchor of 2048."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch

from agentflow.bench.kvcmas.data import AGENTS, Item
from agentflow.bench.kvcmas.dense import DenseModel
from agentflow.bench.kvcmas.prompts import Prompts, Tokens
from agentflow.cache.kvcmas.corrector import Corrector
from agentflow.cache.kvcmas.rope import Rope
from agentflow.cache.kvcmas.types import Edge, Estimate, SegmentKV

__all__ = ["measure_costs"]

_SEGMENT, _LONG = 512, 2048
_METHODS = ("none", "kvcomm", "segment", "token-id", "ridge", "token-kernel")


@torch.inference_mode()
def measure_costs(
    model: DenseModel, items: Sequence[Item], say: Callable[[str], None], *, anchors: int = 10, repeats: int = 3
) -> dict[str, Any]:
    """Processor seconds (medians of ``repeats``; other programs do not count) and bytes. ``items`` give the text.

    Every method has ``anchors`` anchors of 512 tokens. ``estimate`` is what a request waits for; ``anchor`` (its
    decomposition) and ``fit`` happen later.
    """
    text: list[int] = []
    for item in items:
        text += [*model.ids(item.question), *model.ids("\n\n"), *model.ids(item.answer), *model.ids("\n\n")]
    text = (text * -(-_LONG // len(text)))[:_LONG]
    prompts = Prompts(model)
    say("costs: dense prefills of 2048 tokens")
    places = [prompts.dense(agent, Tokens(text, text[:8])) for agent in AGENTS[:2]]
    source, target = (place.segment("question") for place in places)
    before = places[1].before("question")
    rope = Rope.of(model.config)
    edge = Edge("question", AGENTS[0].name, AGENTS[1].name)

    say("costs: bytes of an anchor")
    keeper = Corrector(rope, anchors=1, pool_bytes=1 << 40)
    keeper.learn(edge, text, source, target)
    keeper.work()
    size = {"low_rank": keeper.pool.nbytes, "full": keeper.pool.full_nbytes, "tokens": _LONG}

    ids, mine = text[:_SEGMENT], source.part(0, _SEGMENT)
    dense = _seconds(lambda: model.extend(before, ids), repeats)
    some = list(range(0, _SEGMENT, 7))[: round(0.15 * _SEGMENT)]
    rows: list[dict[str, Any]] = []
    step = (_LONG - _SEGMENT) // max(1, anchors)
    for name in _METHODS:
        say(f"costs: {name}")
        corrector = Corrector(rope, method=name, anchors=anchors, pool_bytes=1 << 40, recompute=0.0)
        anchor_seconds = []
        for n in range(anchors if corrector.learns else 0):
            first = (n + 1) * step
            part = [SegmentKV(kv.keys, kv.values, kv.start).part(first, first + _SEGMENT) for kv in (source, target)]
            corrector.learn(edge, text[first : first + _SEGMENT], part[0], part[1])
            anchor_seconds.append(_seconds(lambda c=corrector: c.work(until=lambda: True), 1))  # type: ignore[misc]
        fit = _seconds(corrector.work, 1)
        found = corrector.estimate(edge, ids, mine, before.tokens)
        assert isinstance(found, Estimate), found
        seconds = _seconds(lambda c=corrector: c.estimate(edge, ids, mine, before.tokens), repeats)  # type: ignore[misc]
        again = _seconds(lambda kv=found.kv: model.read(before, kv, ids, some), repeats)  # type: ignore[misc]
        rows.append(
            {
                "method": name,
                "estimate": seconds,
                "with_recompute": seconds + again,
                "anchor": median(anchor_seconds) if anchor_seconds else 0.0,
                "fit": fit,
                "fitted_bytes": corrector.nbytes - corrector.pool.nbytes,
                "pool_bytes": corrector.pool.nbytes,
            }
        )
    return {"tokens": _SEGMENT, "dense": dense, "recompute_tokens": len(some), "methods": rows, "anchor_bytes": size}


def _seconds(what: Callable[[], Any], repeats: int) -> float:
    taken = []
    for _ in range(repeats):
        began = time.process_time()
        what()
        taken.append(time.process_time() - began)
    return median(taken)
