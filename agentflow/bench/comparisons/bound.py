"""The most hits that were possible: what every hit rate is compared with."""

from __future__ import annotations

from dataclasses import replace

from agentflow.bench.simulator.replay import most_hits
from agentflow.bench.simulator.result import SimResult
from agentflow.bench.traces.model import Trace, TraceWorkflow

__all__ = ["best_hit_rate", "in_served_order"]

#: Pages of all prompts together, at most: beyond, larger pages are used.
PAGES = 60_000


def in_served_order(trace: Trace, result: SimResult) -> Trace:
    """The calls of ``trace`` that ``result`` served, in the order in which work on them began.

    Each is a workflow of its own. Good for counting hits only: that they belong together is lost.
    """
    calls = {(w.id, c.id): c for w in trace.workflows for c in w.calls}
    served = sorted((c for c in result.calls if c.outcome == "done"), key=lambda c: (c.admitted, c.first_token))
    workflows = tuple(
        TraceWorkflow(
            id=f"{done.workflow}/{done.call}",
            calls=(replace(calls[done.workflow, done.call], wait_for=(), delay=0.0, tools=()),),
            arrival=float(number),
        )
        for number, done in enumerate(served)
    )
    return Trace(name=trace.name, workflows=workflows)


def best_hit_rate(trace: Trace, result: SimResult, capacity: int) -> float:
    """The highest hit rate of any policy serving the calls of ``result`` in their order in ``capacity`` tokens.

    As in :func:`~agentflow.bench.simulator.replay.most_hits` calls are served one after another, so that no running
    call takes room from the cache beside the one that is served. Counted in pages as small as time allows, with what
    the cut of a prompt into pages may hide added: less than a page a call.
    """
    tokens = result.prompt_tokens
    if not tokens:
        return 0.0
    page = 1
    while tokens / page > PAGES:
        page *= 2
    best = most_hits(in_served_order(trace, result), capacity, page)
    hidden = (page - 1) * best.calls
    return min(1.0, (best.hit_pages * page + hidden) / tokens)
