"""Runs to train predictors on, from traces."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from agentflow.bench.traces.generators import GENERATORS, Plan, generate
from agentflow.bench.traces.importers import IMPORTERS, import_trace
from agentflow.bench.traces.jsonl import Skipped, read_trace
from agentflow.bench.traces.model import Trace
from agentflow.cache.ledger import EARLY
from agentflow.cache.pbkv.graph_data import Run
from agentflow.errors import UsageError

__all__ = ["load", "read_hidden", "runs_of", "write_hidden"]

Vector = npt.NDArray[np.float32]


def load(source: str, *, left_out: list[str] | None = None) -> Trace:
    """The trace that ``source`` names: a file of ours, ``FORMAT=PATH`` of a public one, or ``generate=NAME:COUNT``.

    Why lines or records of it could not be read is added to ``left_out``, a reason each. Raises
    :class:`~agentflow.errors.UsageError` for what cannot be read at all.
    """
    name, found, rest = source.partition("=")
    if found and name == "generate":
        kind, _, count = rest.partition(":")
        if kind not in GENERATORS or (count and not count.isdecimal()):
            raise UsageError(f"{source!r}: expected generate=NAME:COUNT with a name of {', '.join(sorted(GENERATORS))}")
        return generate(kind, Plan(workflows=int(count or 200)))
    reasons = left_out if left_out is not None else []
    try:
        if rest and name in IMPORTERS:
            trace, report = import_trace(name, rest)
            reasons += [f"{r.where}: {r.reason}" for r in report.rejected]
            return trace
        if not Path(source).exists():
            formats = ", ".join(sorted(IMPORTERS))
            raise UsageError(
                f"{source}: no such file; public traces are given as FORMAT=PATH with a format of {formats}"
            )
        skipped: list[Skipped] = []
        trace = read_trace(source, on_error="skip", skipped=skipped)
        reasons += [f"line {s.line}: {s.reason}" for s in skipped]
        return trace
    except OSError as error:
        raise UsageError(f"{source}: cannot be read ({error.strerror or error})") from error


def runs_of(trace: Trace, hidden: Mapping[str, Vector] | None = None) -> list[Run]:
    """The trace's workflows as runs, without calls that were made early and given up. ``hidden`` maps ids of calls to
    the hidden states of their prompts."""
    known = hidden or {}
    used = [[c for c in w.calls if not (c.branch == EARLY and c.superseded)] for w in trace.workflows]
    return [
        Run(
            tuple(c.agent for c in calls),
            hidden=tuple(known.get(c.id) for c in calls),
            sizes=tuple((c.prompt_tokens, c.output_tokens) for c in calls),
        )
        for calls in used
        if calls
    ]


def write_hidden(vectors: Mapping[str, Vector], path: str | os.PathLike[str]) -> None:
    """Write hidden states by id of call: a safetensors file of one matrix and the ids in its metadata."""
    from safetensors.numpy import save_file

    matrix = (
        np.stack([np.asarray(v, np.float32) for v in vectors.values()]) if vectors else np.zeros((0, 0), np.float32)
    )
    save_file({"hidden": matrix}, os.fspath(path), metadata={"calls": json.dumps(list(vectors))})


def read_hidden(path: str | os.PathLike[str]) -> dict[str, Vector]:
    """Read what :func:`write_hidden` wrote; raises :class:`~agentflow.errors.UsageError` for anything else."""
    from safetensors import SafetensorError, safe_open

    opened: Any = safe_open
    try:
        with opened(os.fspath(path), framework="np") as file:
            calls: Sequence[str] = json.loads((file.metadata() or {})["calls"])
            matrix = np.asarray(file.get_tensor("hidden"), np.float32)
        if matrix.ndim != 2 or len(matrix) != len(calls):
            raise ValueError(f"{len(calls)} calls and a matrix of shape {matrix.shape}")
    except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
        raise UsageError(f"{path}: no file of hidden states ({error})") from error
    return dict(zip(calls, matrix, strict=True))
