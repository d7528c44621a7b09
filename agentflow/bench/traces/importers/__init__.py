"""Importers of public traces. Each gives a trace and a report of every record that it could not use."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Final

from agentflow.bench.traces.importers.bfcl import import_bfcl
from agentflow.bench.traces.importers.continuum import import_continuum
from agentflow.bench.traces.importers.kv_cache_tester import import_kv_cache_tester
from agentflow.bench.traces.importers.lmcache import import_lmcache
from agentflow.bench.traces.importers.mini_swe_agent import (
    import_mini_swe_phases,
    import_mini_swe_steps,
    import_mini_swe_trajectories,
)
from agentflow.bench.traces.importers.who_and_when import import_who_and_when
from agentflow.bench.traces.importing import Imported, ImportReport, Rejected
from agentflow.bench.traces.mooncake import import_agentic, import_plain
from agentflow.errors import UsageError

__all__ = ["IMPORTERS", "ImportReport", "Imported", "Rejected", "import_trace"]

#: Every importer by the name of its format.
IMPORTERS: Final[Mapping[str, Callable[..., Imported]]] = {
    "agentic-mooncake": import_agentic,
    "bfcl": import_bfcl,
    "continuum": import_continuum,
    "kv-cache-tester": import_kv_cache_tester,
    "lmcache": import_lmcache,
    "mini-swe-agent-phases": import_mini_swe_phases,
    "mini-swe-agent-steps": import_mini_swe_steps,
    "mini-swe-agent-trajectories": import_mini_swe_trajectories,
    "mooncake": import_plain,
    "who-and-when": import_who_and_when,
}


def import_trace(format: str, path: str | os.PathLike[str], **options: Any) -> Imported:
    """Read a file or folder of a public format; ``options`` are those of the format's importer.

    Raises :class:`~agentflow.errors.UsageError` for an unknown format and :class:`~agentflow.errors.TraceError` for
    a file that cannot be read at all, or, with ``on_error="refuse"``, for the first record that cannot be used.
    """
    if format not in IMPORTERS:
        raise UsageError(f"no trace format {format!r}; there are {', '.join(sorted(IMPORTERS))}")
    return IMPORTERS[format](path, **options)
