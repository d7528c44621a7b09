"""Recorded runs as loads, where their files are beside the repository (``../shared/data``); they are no part of it."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from agentflow.bench.traces.importers import import_trace
from agentflow.bench.traces.model import Trace, TraceCall, TraceWorkflow
from agentflow.errors import UsageError

__all__ = ["RECORDED", "has_recorded", "recorded"]

DATA = Path(__file__).resolve().parents[3].parent / "shared" / "data"


class _File(NamedTuple):
    format: str
    path: str


#: Kinds of loads, and the files that they are read from.
RECORDED: Mapping[str, _File] = {
    "mini-swe-agent": _File("mini-swe-agent-steps", "mini-swe-agent/steps_first400.jsonl.gz"),
    "kv-cache-tester": _File("kv-cache-tester", "kv-cache-tester/traces_sample.jsonl.gz"),
}


def has_recorded(kind: str) -> bool:
    """Whether the runs are there."""
    return (DATA / RECORDED[kind].path).exists()


def recorded(
    kind: str, workflows: int, *, seed: int = 0, max_calls: int | None = None, max_prompt: int | None = None
) -> Trace:
    """``workflows`` recorded runs with their real gaps and tools, chosen by ``seed``, all from time 0.

    A run ends before its first call that is longer than ``max_prompt`` tokens, and after ``max_calls``. Raises
    :class:`~agentflow.errors.UsageError` where the files are not there.
    """
    if not has_recorded(kind):
        raise UsageError(f"the recorded runs {kind} are not part of the repository: put them to {RECORDED[kind].path}")
    whole = _read(kind)
    cut = [_cut(w, max_calls, max_prompt) for w in whole.workflows]
    usable = [w for w in cut if len(w.calls) > 1]
    chosen = random.Random(seed).sample(usable, min(workflows, len(usable)))
    return replace(whole, workflows=tuple(chosen))


@lru_cache(maxsize=2)
def _read(kind: str) -> Trace:
    found = RECORDED[kind]
    return import_trace(found.format, DATA / found.path).trace


def _cut(workflow: TraceWorkflow, max_calls: int | None, max_prompt: int | None) -> TraceWorkflow:
    calls: list[TraceCall] = []
    known: set[str] = set()
    for call in workflow.calls:
        if max_calls is not None and len(calls) >= max_calls:
            break
        if max_prompt is not None and call.prompt_tokens > max_prompt:
            break
        if known.issuperset(call.wait_for):
            calls.append(call)
            known.add(call.id)
    return replace(workflow, calls=tuple(calls), arrival=0.0)
