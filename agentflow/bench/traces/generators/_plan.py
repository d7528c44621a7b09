"""What all generators take: how many workflows, when they arrive, how long their texts are."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from agentflow.bench.traces.generators._build import WorkflowBuilder
from agentflow.bench.traces.model import Trace, TraceWorkflow
from agentflow.errors import UsageError

__all__ = ["Plan", "make"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much load to generate.

    ``rate`` is workflows a second of a Poisson process; None lets all arrive at 0, for a closed loop that keeps
    ``concurrency`` of them running (written to ``meta``, for replay and simulator to read). ``scale`` multiplies
    the length of every text in tokens, ``tool_scale`` the time of every tool. A workflow is cut
    (outcome ``limit``) after ``max_calls`` calls, and before a prompt of more than ``max_prompt`` tokens.
    ``tenants`` are given to workflows in turn. Raises :class:`~agentflow.errors.UsageError` for a value outside its
    range.
    """

    workflows: int = 100
    seed: int = 0
    rate: float | None = None
    concurrency: int = 8
    scale: float = 1.0
    tool_scale: float = 1.0
    max_calls: int | None = None
    max_prompt: int | None = None
    tenants: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        bad = []
        if self.workflows < 0:
            bad.append(f"workflows must be at least 0, got {self.workflows}")
        if self.rate is not None and not 0 < self.rate < math.inf:
            bad.append(f"rate must be above 0 workflows a second, got {self.rate}")
        if self.concurrency < 1:
            bad.append(f"concurrency must be at least 1, got {self.concurrency}")
        if not 0 < self.scale < math.inf:
            bad.append(f"scale must be above 0, got {self.scale}")
        if not 0 <= self.tool_scale < math.inf:
            bad.append(f"tool_scale must be at least 0, got {self.tool_scale}")
        if self.max_calls is not None and self.max_calls < 1:
            bad.append(f"max_calls must be at least 1, got {self.max_calls}")
        if self.max_prompt is not None and self.max_prompt < 1:
            bad.append(f"max_prompt must be at least 1, got {self.max_prompt}")
        if bad:
            raise UsageError("; ".join(bad))


def make(
    name: str,
    plan: Plan,
    edges: Mapping[str, tuple[str, ...]],
    one: Callable[[random.Random, WorkflowBuilder], bool],
) -> Trace:
    """A trace of ``plan.workflows`` runs of ``one``, which fills a builder and says whether it came to its end.

    Each workflow has a random stream of its own: the first N workflows are the same whatever their number. One
    whose very first prompt is over the limit is left out.
    """
    arrivals = random.Random(f"{name} arrivals {plan.seed}")
    at = 0.0
    made = []
    for i in range(plan.workflows):
        builder = WorkflowBuilder(f"{name}{plan.seed}.{i}", max_calls=plan.max_calls, max_prompt=plan.max_prompt)
        ended = one(random.Random(f"{name} {plan.seed} {i}"), builder)
        if plan.rate is not None:
            at += arrivals.expovariate(plan.rate)
        if not builder.calls:
            continue
        made.append(
            TraceWorkflow(
                id=builder.name,
                calls=builder.finish(),
                arrival=at,
                graph=name,
                tenant=plan.tenants[i % len(plan.tenants)] if plan.tenants else None,
                outcome="done" if ended else "limit",
            )
        )
    meta: dict[str, Any] = {
        "generator": name,
        "seed": plan.seed,
        "scale": plan.scale,
        "tool_scale": plan.tool_scale,
        "arrivals": "closed" if plan.rate is None else "poisson",
    }
    meta |= {"concurrency": plan.concurrency} if plan.rate is None else {"rate": plan.rate}
    return Trace(name=name, workflows=tuple(made), edges=dict(edges), meta=meta)
