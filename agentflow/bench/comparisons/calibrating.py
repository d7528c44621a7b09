"""Measuring passes on a running engine, for a simulator that keeps its time."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from agentflow.bench.simulator import CalibratedCost, DecodeSample, Prefill, PrefillSample
from agentflow.engine.base import Call, Completion, Engine, Sampling

__all__ = ["Passes", "calibrate", "measure_passes"]

#: Tokens of a short prompt.
_SHORT = 96


class Passes(NamedTuple):
    """Measured passes of an engine."""

    prefills: tuple[PrefillSample, ...]
    decodes: tuple[DecodeSample, ...]

    def and_later(self, others: Passes) -> Passes:
        """With what was measured at another moment: an engine's pace changes with what else its machine does."""
        return Passes(self.prefills + others.prefills, self.decodes + others.decodes)

    def fit(self) -> CalibratedCost:
        """The cost model that fits them."""
        return CalibratedCost.fit(self.prefills, self.decodes)


def calibrate(engine: Engine, **settings: Any) -> CalibratedCost:
    """A cost model of this engine as it is now; ``settings`` as for :func:`measure_passes`."""
    return measure_passes(engine, **settings).fit()


def measure_passes(
    engine: Engine,
    *,
    lengths: Sequence[int] = (64, 256, 768),
    batches: Sequence[int] = (1, 4, 8),
    steps: int = 24,
    rounds: int = 3,
    seed: int = 0,
) -> Passes:
    """Passes measured by forced calls of a few seconds in all.

    The time to a first token is a prefill; the rest of a longer answer are decode steps, of batches of short calls
    and of one call with the longest context. What the way to the scheduler costs is in the passes' fixed part, as it
    is when an engine is used. The pool must hold the largest of ``lengths`` and the largest batch of short calls;
    ``rounds`` measurements of each kind are taken and the median counts.
    """
    rng = random.Random(seed)
    for _ in range(3):  # what happens only once
        asyncio.run(_batch(engine, [_ids(rng, 32)], 4))
    prefills: list[PrefillSample] = []
    decodes: list[DecodeSample] = []
    for length in lengths:
        seconds, again = [], []
        for _ in range(rounds):
            begin = _ids(rng, length)
            (first,) = asyncio.run(_batch(engine, [begin], 1))
            seconds.append(first.timings.first_token)
            (second,) = asyncio.run(_batch(engine, [begin + _ids(rng, 64)], 1))
            again.append((second.usage.cached_device, second.timings.first_token))
        prefills.append(PrefillSample((Prefill(length, 0),), statistics.median(seconds)))
        cached = round(statistics.median(a[0] for a in again))
        prefills.append(PrefillSample((Prefill(length + 64 - cached, cached),), statistics.median(a[1] for a in again)))
    for batch, context in (*((size, _SHORT) for size in batches), (1, max(lengths))):
        firsts, passes = [], []
        for _ in range(rounds):
            short, long = (
                asyncio.run(_batch(engine, [_ids(rng, context) for _ in range(batch)], answer)) for answer in (1, steps)
            )
            firsts.append(max(c.timings.first_token for c in short))
            passes.append(max(c.timings.total for c in long) - max(c.timings.total for c in short))
        seconds_left = max(1e-6, statistics.median(passes))
        decodes.append(DecodeSample(batch, batch * (context + 1), seconds_left, steps - 1))
        if batch > 1:
            prefills.append(PrefillSample((Prefill(context, 0),) * batch, statistics.median(firsts)))
    return Passes(tuple(prefills), tuple(decodes))


async def _batch(engine: Engine, prompts: Sequence[Sequence[int]], answer: int) -> list[Completion]:
    """The same forced answer for all prompts, sent together."""

    def call(ids: Sequence[int]) -> Any:
        forced = tuple(1_000 + i for i in range(answer))
        sampling = Sampling(max_tokens=answer, ignore_eos=True, forced_tokens=forced)
        return engine.agenerate(Call(token_ids=list(ids), sampling=sampling))

    return list(await asyncio.gather(*(call(ids) for ids in prompts)))


def _ids(rng: random.Random, tokens: int) -> list[int]:
    return [rng.randrange(1_000, 30_000) for _ in range(tokens)]
