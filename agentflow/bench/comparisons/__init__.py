"""Comparisons of policies by name: what `agentflow bench` runs."""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from agentflow.bench.comparisons.machine import machine
from agentflow.bench.comparisons.model import Claim, Comparison, Options, Results, Row, read_results
from agentflow.errors import UsageError

__all__ = [
    "Claim",
    "Comparison",
    "Options",
    "Results",
    "Row",
    "comparison",
    "comparison_names",
    "read_results",
    "run_comparison",
]

#: Where each comparison is; it is imported when it is asked for.
_COMPARISONS: Final[Mapping[str, str]] = {
    "baselines": "agentflow.bench.comparisons.baselines",
    "cachesage": "agentflow.bench.comparisons.cachesage",
    "parity": "agentflow.bench.comparisons.parity",
    "pbkv": "agentflow.bench.comparisons.pbkv",
    "ttl": "agentflow.bench.comparisons.ttl",
}


def comparison_names() -> list[str]:
    """Names that :func:`comparison` knows."""
    return sorted(_COMPARISONS)


def comparison(name: str) -> Comparison:
    """A comparison by its name; raises :class:`~agentflow.errors.UsageError` for an unknown one."""
    if name not in _COMPARISONS:
        raise UsageError(f"no comparison {name!r}; there are {', '.join(comparison_names())}")
    found: Comparison = importlib.import_module(_COMPARISONS[name]).COMPARISON
    return found


def run_comparison(name: str, options: Options) -> Results:
    """Run a comparison. Raises :class:`~agentflow.errors.UsageError` for an unknown name or a mode it does not have."""
    found = comparison(name)
    if options.mode not in found.modes:
        raise UsageError(f"{name} runs in mode {' or '.join(found.modes)} only, not {options.mode}")
    began = time.perf_counter()
    results = found.run(options)
    return replace(results, seconds=time.perf_counter() - began, machine=machine())
