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
from agentflow.bench.traces.jsonl import read_trace
from agentflow.bench.traces.model import Trace
from agentflow.cache.pbkv.graph_data import Run
from agentflow.errors import UsageError

__all__ = ["load", "read_hidden", "runs_of", "write_hidden"]

Vector = npt.NDArray[np.float32]


def load(source: str) -> Trace:
    """The trace that ``source`` names: a file of ours, ``FORMAT=PATH`` of a public one, or ``generate=NAME:COUNT``."""
    name, found, rest = source.partition("=")
    if found and name == "generate":
        kind, _, count = rest.partition(":")
        if kind not in GENERATORS or (count and not count.isdecimal()):
            raise UsageError(f"{source!r}: expected generate=NAME:COUNT with a name of {', '.join(sorted(GENERATORS))}")
        return generate(kind, Plan(workflows=int(count or 200)))
    if found and name in IMPORTERS:
        return import_trace(name, rest).trace
    if not Path(source).exists():
        formats = ", ".join(sorted(IMPORTERS))
        raise UsageError(f"{source}: no such file; public traces are given as FORMAT=PATH with a format of {formats}")
    return read_trace(source, on_error="skip")


def runs_of(trace: Trace, hidden: Mapping[str, Vector] | None = None) -> list[Run]:
    """The trace's workflows as runs. ``hidden`` maps ids of calls to the hidden states of their prompts."""
    known = hidden or {}
    return [
        Run(
            tuple(c.agent for c in w.calls),
            hidden=tuple(known.get(c.id) for c in w.calls),
            sizes=tuple((c.prompt_tokens, c.output_tokens) for c in w.calls),
        )
        for w in trace.workflows
        if w.calls
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
