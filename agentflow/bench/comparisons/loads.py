"""The loads of the comparisons, and the memory that makes a given pressure on them."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from agentflow.bench.comparisons.recorded import RECORDED, recorded
from agentflow.bench.simulator.config import Arrivals
from agentflow.bench.traces.generators import Plan, generate
from agentflow.bench.traces.model import Trace

__all__ = ["Load", "longest_call", "pool_for", "working_set"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Generated workflows of one kind, ``concurrency`` of them under way, or ``rate`` a second arriving.

    The first ``concurrency`` workflows of a closed loop begin ``stagger`` seconds after each other: what arrives at one
    moment is computed together in the simulator, and one by one on an engine, where the second finds what the first
    left. The seed of a repetition makes other workflows of the same kind. ``kind`` is the generator, or recorded runs
    (:data:`~agentflow.bench.comparisons.recorded.RECORDED`) as they were; the other fields are as in
    :class:`~agentflow.bench.traces.generators.Plan`. ``max_running`` bounds the calls that an engine runs at once, as
    an operator sets it to bound the time between tokens; None is the engine's own bound. With a ``rate``,
    ``concurrency`` is the number of workflows for which pressure is counted.
    """

    name: str
    kind: str
    workflows: int
    concurrency: int = 8
    rate: float | None = None
    scale: float = 1.0
    tool_scale: float = 1.0
    max_calls: int | None = None
    max_prompt: int | None = None
    stagger: float = 0.0
    max_running: int | None = None

    def trace(self, seed: int) -> Trace:
        """The workflows of a seed; made once."""
        return _trace(
            replace(self, name="", rate=None, max_running=None, concurrency=self.concurrency if self.stagger else 1),
            seed,
        )

    def arrivals(self) -> Arrivals:
        """When they come."""
        if self.rate is not None:
            return Arrivals(kind="poisson", rate=self.rate)
        return Arrivals(kind="closed", concurrency=self.concurrency)

    def to_json(self) -> dict[str, Any]:
        """Its settings, JSON-ready; those that are not set left out."""
        names = (
            "kind", "workflows", "concurrency", "rate", "scale", "tool_scale", "max_calls", "max_prompt", "max_running",
        )  # fmt: skip
        return {n: getattr(self, n) for n in names if getattr(self, n) is not None}


@lru_cache(maxsize=24)
def _trace(load: Load, seed: int) -> Trace:
    if load.kind in RECORDED:
        return recorded(load.kind, load.workflows, seed=seed, max_calls=load.max_calls, max_prompt=load.max_prompt)
    plan = Plan(
        workflows=load.workflows,
        seed=seed,
        scale=load.scale,
        tool_scale=load.tool_scale,
        max_calls=load.max_calls,
        max_prompt=load.max_prompt,
    )
    trace = generate(load.kind, plan)
    if not load.stagger:
        return trace
    workflows = list(trace.workflows)
    for place, workflow in enumerate(workflows[: load.concurrency]):
        first, *others = workflow.calls
        later = replace(first, delay=first.delay + place * load.stagger)
        workflows[place] = replace(workflow, calls=(later, *others))
    return replace(trace, workflows=tuple(workflows))


def working_set(trace: Trace, concurrency: int) -> int:
    """Tokens that ``concurrency`` workflows could use: all that a mean workflow reads and writes, once, times
    their number, and what several workflows read once."""
    users: Counter[str] = Counter()
    per: list[dict[str, int]] = []
    for workflow in trace.workflows:
        spans = {s.id: s.tokens for c in workflow.calls for s in (*c.prompt, *c.output)}
        users.update(spans.keys())
        per.append(spans)
    shared = {span: tokens for spans in per for span, tokens in spans.items() if users[span] > 1}
    own = [sum(n for span, n in spans.items() if span not in shared) for spans in per]
    return round(sum(shared.values()) + concurrency * (statistics.fmean(own) if own else 0.0))


def longest_call(trace: Trace) -> int:
    """Tokens of the longest prompt and answer together."""
    return max((c.prompt_tokens + c.output_tokens for w in trace.workflows for c in w.calls), default=0)


def pool_for(
    load: Load, pressure: float, *, concurrency: int | None = None, seeds: int = 1, spare: float = 1.5
) -> tuple[int, float]:
    """Tokens of the pool that puts ``load`` under ``pressure``, and the pressure that it comes to.

    The pool holds at least ``spare`` times the longest call of the first ``seeds`` seeds, which may make the
    pressure smaller than asked.
    """
    needed = working_set(load.trace(0), concurrency or load.concurrency)
    least = max(longest_call(load.trace(seed)) for seed in range(max(1, seeds))) * spare
    pool = round(max(needed / pressure, least, 64.0))
    return pool, round(needed / pool, 2)
