"""Measuring passes on a running engine, for a simulator that keeps its time."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Sequence
from typing import Any

from agentflow.bench.simulator import CalibratedCost, DecodeSample, Prefill, PrefillSample
from agentflow.engine.base import Call, Completion, Engine, Sampling

__all__ = ["calibrate"]


def calibrate(
    engine: Engine,
    *,
    lengths: Sequence[int] = (64, 256, 768),
    batches: Sequence[int] = (1, 4, 8),
    steps: int = 24,
    rounds: int = 3,
    seed: int = 0,
) -> CalibratedCost:
    """A cost model of this engine as it is now, from forced calls of a few seconds in all.

    A call of one token is a prefill; the rest of a longer one are decode steps. What the way to the scheduler and back
    costs is in the passes' fixed part, as it is when an engine is used. The pool must hold the largest of ``lengths``
    and the largest batch of short calls; ``rounds`` measurements of each kind are taken and the median counts.
    """
    rng = random.Random(seed)
    asyncio.run(_batch(engine, [_ids(rng, 32)], 4))  # what happens only once
    prefills: list[PrefillSample] = []
    decodes: list[DecodeSample] = []
    for length in lengths:
        seconds, again = [], []
        for _ in range(rounds):
            begin = _ids(rng, length)
            (first,) = asyncio.run(_batch(engine, [begin], 1))
            seconds.append(first.timings.total)
            (second,) = asyncio.run(_batch(engine, [begin + _ids(rng, 64)], 1))
            again.append((second.usage.cached_device, second.timings.total))
        prefills.append(PrefillSample((Prefill(length, 0),), statistics.median(seconds)))
        cached = round(statistics.median(a[0] for a in again))
        prefills.append(PrefillSample((Prefill(length + 64 - cached, cached),), statistics.median(a[1] for a in again)))
    for batch in batches:
        firsts, passes = [], []
        for _ in range(rounds):
            short, long = (
                max(c.timings.total for c in asyncio.run(_batch(engine, [_ids(rng, 96) for _ in range(batch)], answer)))
                for answer in (1, steps)
            )
            firsts.append(short)
            passes.append(long - short)
        decodes.append(DecodeSample(batch, batch * 97, max(1e-6, statistics.median(passes)), steps - 1))
        if batch > 1:
            prefills.append(PrefillSample((Prefill(96, 0),) * batch, statistics.median(firsts)))
    return CalibratedCost.fit(prefills, decodes)


async def _batch(engine: Engine, prompts: Sequence[Sequence[int]], answer: int) -> list[Completion]:
    """The same forced answer for all prompts, sent together."""

    def call(ids: Sequence[int]) -> Any:
        forced = tuple(1_000 + i for i in range(answer))
        sampling = Sampling(max_tokens=answer, ignore_eos=True, forced_tokens=forced)
        return engine.agenerate(Call(token_ids=list(ids), sampling=sampling))

    return list(await asyncio.gather(*(call(ids) for ids in prompts)))


def _ids(rng: random.Random, tokens: int) -> list[int]:
    return [rng.randrange(1_000, 30_000) for _ in range(tokens)]
