"""Continuum: coding-agent runs whose tool calls have a measured time."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from agentflow.bench.traces.importers._text import Encode, encoder, message_ids
from agentflow.bench.traces.importing import Imported, ImportReport
from agentflow.bench.traces.jsonl import OnError
from agentflow.bench.traces.model import Trace, TraceCall, TraceTool, TraceWorkflow
from agentflow.bench.traces.spans import Ids, SpanTrie
from agentflow.errors import TraceError

__all__ = ["import_continuum"]


def import_continuum(
    path: str | os.PathLike[str], *, tokenizer: Encode | None = None, on_error: OnError = "skip"
) -> Imported:
    """A list of runs: ``traj_id`` and ``messages`` (a JSON text) with ``tool_calls[].execution_time_seconds``.

    A record is a run. Every assistant message is a call; the tools it called ran one after another before the
    next. A tool without a time counts as 0 s, and the report says so. All runs arrive at 0.
    """
    source, report = Path(path), ImportReport(on_error)
    try:
        runs = json.loads(source.read_bytes())
    except FileNotFoundError as error:
        raise TraceError(f"{source}: no such file") from error
    except ValueError as error:
        raise TraceError(f"{source}: not JSON: {error}") from error
    if not isinstance(runs, list):
        raise TraceError(f"{source}: a list of runs was expected")
    encode, trie = encoder(tokenizer), SpanTrie("c")
    drafts: list[tuple[str, list[tuple[int, tuple[TraceTool, ...]]]]] = []
    report.records = len(runs)
    for i, run in enumerate(runs):
        try:
            name = run["traj_id"]
            messages = json.loads(run["messages"])
            if not isinstance(name, str) or not isinstance(messages, list):
                raise ValueError("traj_id must be text, messages a list")
            calls = _calls(messages, encode, trie, report)
            if not calls:
                raise ValueError("no message is an assistant's")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            report.reject(f"run {i}", f"no run that can be read ({type(error).__name__}: {error})")
            continue
        drafts.append((name, calls))
        report.used += 1
    contents = trie.contents()
    workflows = []
    for name, calls in drafts:
        made: list[TraceCall] = []
        for position, tools in calls:
            prompt, output = contents[position]
            made.append(
                TraceCall(
                    id=f"{name}-{len(made)}",
                    agent="main",
                    prompt=prompt,
                    output=output,
                    wait_for=(made[-1].id,) if made else (),
                    delay=max((t.start + t.duration for t in tools), default=0.0),
                    tools=tools,
                )
            )
        workflows.append(TraceWorkflow(id=name, calls=tuple(made), graph="coding-agent"))
    tokens = trie.tokens() if tokenizer is not None else {}
    meta = {"source": source.name, "format": "continuum"}
    return Imported(Trace(name=source.stem, workflows=tuple(workflows), tokens=tokens, meta=meta), report)


def _calls(
    messages: list[dict[str, Any]], encode: Any, trie: SpanTrie, report: ImportReport
) -> list[tuple[int, tuple[TraceTool, ...]]]:
    out = []
    prompt: Ids = np.empty(0, np.int64)
    tools: list[TraceTool] = []
    for message in messages:
        ids = message_ids(encode, message)
        if message.get("role") == "assistant":
            out.append((trie.add(prompt, ids), tuple(tools)))
            tools = []
            start = 0.0
            for call in message.get("tool_calls") or ():
                seconds = call.get("execution_time_seconds")
                if not isinstance(seconds, int | float) or not 0 <= seconds < float("inf"):
                    report.notes["a tool call without a time"] += 1
                    seconds = 0.0
                tools.append(TraceTool(name=str(call["function"]["name"]), start=start, duration=float(seconds)))
                start += seconds
        prompt = np.concatenate([prompt, ids])
    if tools:
        report.notes["a tool call that no answer came after"] += len(tools)
    return out
