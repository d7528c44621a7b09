"""Generated loads: workflows of a known kind, with the statistics of public runs, any number of them, by seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from agentflow.bench.traces.generators import teams
from agentflow.bench.traces.generators._plan import Plan
from agentflow.bench.traces.generators.bfcl import bfcl
from agentflow.bench.traces.generators.financebench import financebench, financebench_pages_first
from agentflow.bench.traces.generators.hover import hover
from agentflow.bench.traces.generators.openhands import openhands
from agentflow.bench.traces.generators.swebench import swebench
from agentflow.bench.traces.model import Trace
from agentflow.errors import UsageError

__all__ = [
    "GENERATORS",
    "Plan",
    "bfcl",
    "financebench",
    "financebench_pages_first",
    "generate",
    "hover",
    "openhands",
    "swebench",
]

#: Every generator by its name.
GENERATORS: Final[Mapping[str, Callable[[Plan], Trace]]] = {
    "hover": hover,
    "swebench": swebench,
    "financebench": financebench,
    "financebench-pages-first": financebench_pages_first,
    "bfcl": bfcl,
    "openhands": openhands,
    **teams.GENERATORS,
}


def generate(name: str, plan: Plan | None = None) -> Trace:
    """The load that generator ``name`` makes; raises :class:`~agentflow.errors.UsageError` for an unknown name."""
    if name not in GENERATORS:
        raise UsageError(f"no trace generator {name!r}; there are {', '.join(sorted(GENERATORS))}")
    return GENERATORS[name](plan or Plan())
