"""Policies told what a trace knows beforehand, where their rule needs that and their options do not say it."""

from __future__ import annotations

from collections.abc import Sequence

from agentflow.bench.traces.model import Trace
from agentflow.cache.policy import PolicySpec, spec_name

__all__ = ["informed"]


def informed(policies: Sequence[PolicySpec], trace: Trace) -> list[PolicySpec]:
    """The same policies, JSON-ready still: ``kvflow`` gets the trace's static step graph as ``edges``, and
    ``kvflow-oracle`` the agents of every workflow's calls as ``futures``, unless they are given."""
    out: list[PolicySpec] = []
    for spec in policies:
        name = spec_name(spec)
        options = {} if isinstance(spec, str) else {k: v for k, v in spec.items() if k != "name"}
        if name == "kvflow" and "edges" not in options and trace.edges:
            options["edges"] = {agent: list(following) for agent, following in trace.edges.items()}
        elif name == "kvflow-oracle" and "futures" not in options:
            options["futures"] = {w.id: [c.agent for c in w.calls] for w in trace.workflows}
        out.append({"name": name, **options} if options else spec)
    return out
