"""Import and export of Mooncake traces: plain ones, and *agentic* ones with a workflow layer over the requests.

Plain rows have ``timestamp`` (ms), ``input_length``, ``output_length`` and ``hash_ids`` (512-token blocks in the
published traces). Agentic rows add ``request_id``, ``session_id``, ``wait_for``, ``branches``, ``prefix_reset``,
``delay`` and ``tool_wait_ms`` (ms after what is waited for), and ``tool_events``: the schema of NVIDIA Dynamo's
``dynamo-data-gen`` 1.3 and 1.4 (its later versions, with a header line and ``dependencies``, are not read).

What the agentic format holds, and comes back from it: calls, order, arrivals, delays, tools, branches, prompts and
what they share in whole blocks, lengths of outputs. Workflow and agent are written into ``session_id``; files of
others, without them, get a workflow per connected set of requests and an agent per session.

What it cannot hold: token ids, and shared text shorter than a block; what an output consists of (an importer takes
it from the next prompt of the session, see ``block_contents``); segments, graphs, tenants, outcomes, the static call
graph, ``meta``; a delay before the first call, which becomes part of the arrival; of ``superseded`` only that the
session began afresh (``prefix_reset``); tool starts finer than a millisecond. Plain rows hold arrivals and prompts
only.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from agentflow.bench.traces._blocks import BlockIds
from agentflow.bench.traces._rows import Row, read_row, workflows_of
from agentflow.bench.traces.importing import BlockCall, Imported, ImportReport, block_contents, json_lines
from agentflow.bench.traces.jsonl import OnError
from agentflow.bench.traces.model import Content, Trace, TraceCall, TraceTool, TraceWorkflow
from agentflow.errors import UsageError

__all__ = ["BLOCK_SIZE", "export_agentic", "export_plain", "import_agentic", "import_plain", "session_id"]

#: Tokens of a block in the published traces.
BLOCK_SIZE = 512
#: How a session id of ours begins.
_OURS = "agentflow:"


def session_id(workflow: str, call: TraceCall) -> str:
    """Workflow, agent and branch of a call in one text."""
    parts = [workflow, call.agent] if call.branch is None else [workflow, call.agent, call.branch]
    return _OURS + "/".join(quote(p, safe="") for p in parts)


def _place(session: str) -> tuple[str, str, str | None] | None:
    if not session.startswith(_OURS):
        return None
    parts = [unquote(p) for p in session[len(_OURS) :].split("/")]
    return (parts[0], parts[1], parts[2] if len(parts) == 3 else None) if len(parts) in (2, 3) else None


def export_agentic(trace: Trace, path: str | os.PathLike[str], *, block_size: int = BLOCK_SIZE) -> None:
    """Write a trace as agentic Mooncake, one row per call. What is lost is listed above.

    Raises :class:`~agentflow.errors.UsageError` where two calls have the same id.
    """
    if len({c.id for w in trace.workflows for c in w.calls}) < trace.calls:
        raise UsageError("request ids of agentic Mooncake are unique, and the trace has two calls of one id")
    with Path(path).open("w", encoding="utf-8", newline="\n") as file:
        for row in agentic_rows(trace, block_size):
            file.write(json.dumps(row, separators=(",", ":")) + "\n")


def agentic_rows(trace: Trace, block_size: int) -> Iterator[dict[str, Any]]:
    """The rows of :func:`export_agentic`."""
    ids = BlockIds(block_size)
    for workflow in trace.workflows:
        by_id = {c.id: c for c in workflow.calls}
        spawned: dict[str, list[str]] = {}
        for call in workflow.calls:
            for parent in call.wait_for:
                if call.branch is not None and by_id[parent].branch != call.branch:
                    spawned.setdefault(parent, []).append(call.id)
        previous: dict[str, TraceCall] = {}
        for call in workflow.calls:
            session = session_id(workflow.id, call)
            before = previous.get(session)
            previous[session] = call
            waited = min(call.delay, _union(call.tools))
            row: dict[str, Any] = {
                "request_id": call.id,
                "session_id": session,
                "input_length": call.prompt_tokens,
                "output_length": call.output_tokens,
                "hash_ids": ids.of(call.prompt),
            }
            if call.wait_for:
                row["delay"] = _ms(call.delay - waited)
                row["wait_for"] = list(call.wait_for)
            else:
                row["timestamp"] = _ms(workflow.arrival + call.delay)
            if call.id in spawned:
                row["branches"] = spawned[call.id]
            row["prefix_reset"] = before is None or before.superseded
            if waited and call.wait_for:
                row["tool_wait_ms"] = _ms(waited)
            if call.tools:
                row["tool_events"] = [_event(call.id, i, t) for i, t in enumerate(call.tools)]
            yield row


def _event(call: str, i: int, tool: TraceTool) -> dict[str, Any]:
    """Times count from when the tool's call could start, which is no date: a replay has none."""
    return {
        "tool_call_id": f"{call}-{i}",
        "tool_class": tool.name,
        "started_at_unix_ms": round(tool.start * 1000),
        "ended_at_unix_ms": round((tool.start + tool.duration) * 1000),
        "duration_ms": _ms(tool.duration),
        "status": tool.outcome,
    }


def _ms(seconds: float) -> float:
    """Milliseconds, to the nanosecond; a whole number where it is one."""
    value = round(seconds * 1000, 6)
    return int(value) if value.is_integer() else value


def _union(tools: tuple[TraceTool, ...]) -> float:
    """Seconds in which at least one tool ran."""
    total, until = 0.0, 0.0
    for tool in sorted(tools, key=lambda t: t.start):
        end = tool.start + tool.duration
        total += max(0.0, end - max(until, tool.start))
        until = max(until, end)
    return total


def import_agentic(
    path: str | os.PathLike[str], *, block_size: int = BLOCK_SIZE, on_error: OnError = "skip", name: str | None = None
) -> Imported:
    """Read agentic Mooncake. Rows that cannot be read are in the report, or refused with ``on_error="refuse"``.

    A row in ``wait_for`` that is not in the file is left out of it, and counted in the report's notes.
    """
    source, report = Path(path), ImportReport(on_error)
    rows: dict[str, Row] = {}
    for where, data in json_lines(source, report):
        try:
            row = read_row(data, block_size)
            if row.id in rows:
                raise ValueError("a second row of one request_id")
        except ValueError as error:
            report.reject(where, str(error))
            continue
        rows[row.id] = row
    groups = list(workflows_of(rows, lambda s: p[0] if (p := _place(s)) else None, report))
    ordered = [row for group in groups for row in group]
    contents = dict(zip((r.id for r in ordered), _contents(ordered, block_size), strict=True))
    report.used += len(ordered)
    workflows = sorted((_workflow(group, contents) for group in groups), key=lambda w: w.arrival)
    meta = {"source": source.name, "format": "agentic-mooncake", "block_size": block_size}
    return Imported(Trace(name=name or source.stem, workflows=tuple(workflows), meta=meta), report)


def _contents(rows: list[Row], block_size: int) -> list[tuple[Content, Content]]:
    """Prompts and outputs of all rows: hashes are the same text in all of the file."""
    latest: dict[str, int] = {}
    calls = []
    for i, row in enumerate(rows):
        before = None if row.prefix_reset else latest.get(row.session)
        calls.append(BlockCall(row.hash_ids, row.input_length, row.output_length, before))
        latest[row.session] = i
    return block_contents(calls, block_size)


def _workflow(rows: list[Row], contents: dict[str, tuple[Content, Content]]) -> TraceWorkflow:
    arrival = min((r.timestamp for r in rows if not r.wait_for), default=0.0)
    first = rows[0].session
    superseded: set[str] = set()
    latest: dict[str, str] = {}
    for row in rows:
        if row.prefix_reset and row.session in latest:
            superseded.add(latest[row.session])
        latest[row.session] = row.id
    made: list[TraceCall] = []
    for row in rows:
        place = _place(row.session)
        other = None if row.session == first else row.session
        prompt, output = contents[row.id]
        made.append(
            TraceCall(
                id=row.id,
                agent=place[1] if place else ("main" if other is None else "sub"),
                prompt=prompt,
                output=output,
                wait_for=row.wait_for,
                delay=row.delay if row.wait_for else row.timestamp - arrival,
                tools=row.tools,
                branch=place[2] if place else other,
                superseded=row.id in superseded,
            )
        )
    place = _place(first)
    return TraceWorkflow(id=place[0] if place else first, calls=tuple(made), arrival=arrival)


def export_plain(trace: Trace, path: str | os.PathLike[str], *, block_size: int = BLOCK_SIZE) -> None:
    """Write workflows of one call each as plain Mooncake rows, in order of arrival.

    Raises :class:`~agentflow.errors.UsageError` where a workflow has several calls: the format has no place for
    what calls wait for, and the time they take is not in the trace.
    """
    for workflow in trace.workflows:
        if len(workflow.calls) != 1:
            raise UsageError(
                f"workflow {workflow.id!r} has {len(workflow.calls)} calls; plain Mooncake holds single calls only, use"
                " export_agentic"
            )
    ids = BlockIds(block_size)
    with Path(path).open("w", encoding="utf-8", newline="\n") as file:
        for workflow in sorted(trace.workflows, key=lambda w: w.arrival + w.calls[0].delay):
            call = workflow.calls[0]
            row = {
                "timestamp": _ms(workflow.arrival + call.delay),
                "input_length": call.prompt_tokens,
                "output_length": call.output_tokens,
                "hash_ids": ids.of(call.prompt),
            }
            file.write(json.dumps(row) + "\n")


def import_plain(
    path: str | os.PathLike[str], *, block_size: int = BLOCK_SIZE, on_error: OnError = "skip", name: str | None = None
) -> Imported:
    """Read plain Mooncake: each row is a workflow of one call, for the format knows no sessions."""
    source, report = Path(path), ImportReport(on_error)
    rows: list[Row] = []
    for where, data in json_lines(source, report):
        try:
            rows.append(read_row({"request_id": str(len(rows)), **data}, block_size, plain=True))
        except ValueError as error:
            report.reject(where, str(error))
    contents = block_contents([BlockCall(r.hash_ids, r.input_length, r.output_length) for r in rows], block_size)
    workflows = [
        TraceWorkflow(
            id=row.id,
            calls=(TraceCall(id=row.id, agent="request", prompt=prompt, output=output),),
            arrival=row.timestamp,
        )
        for row, (prompt, output) in zip(rows, contents, strict=True)
    ]
    report.used = len(rows)
    meta = {"source": source.name, "format": "mooncake", "block_size": block_size}
    return Imported(Trace(name=name or source.stem, workflows=tuple(workflows), meta=meta), report)
