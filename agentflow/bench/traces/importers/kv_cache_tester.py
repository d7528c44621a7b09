"""kv-cache-tester: coding-agent sessions as block hashes, some with sub-agents."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from agentflow.bench.traces._recorded import NotedCall, waits_of
from agentflow.bench.traces.importing import (
    BlockCall,
    Imported,
    ImportReport,
    block_contents,
    json_lines,
    number,
    whole,
)
from agentflow.bench.traces.jsonl import OnError
from agentflow.bench.traces.model import Trace, TraceCall, TraceTool, TraceWorkflow

__all__ = ["import_kv_cache_tester"]


def import_kv_cache_tester(path: str | os.PathLike[str], *, on_error: OnError = "skip") -> Imported:
    """Sessions, one a line: ``id, block_size, requests``, each request with ``t, in, out, hash_ids, api_time, stop``.

    A record is a request, those of sub-agents included. Hashes hold within a session, so sessions share nothing. A
    request waits for those that ended before it; what passes after an answer that called tools is one tool
    ``tools``, in which a person's approval may be included. A missing ``api_time`` counts as 0. All sessions arrive
    at 0, for the format does not say when they began.
    """
    source, report = Path(path), ImportReport(on_error)
    sessions = ImportReport(on_error)
    workflows = []
    for where, data in json_lines(source, sessions):
        try:
            size = whole(data, "block_size", least=1)
            requests = data.get("requests")
            if not isinstance(data.get("id"), str) or not isinstance(requests, list):
                raise ValueError("a session needs an id and a list of requests")
        except ValueError as error:
            report.records += 1
            report.reject(where, str(error))
            continue
        calls = _session(f"{where} ({data['id']})", data["id"], requests, size, report)
        if calls:
            workflows.append(TraceWorkflow(id=data["id"], calls=calls, graph="coding-agent"))
    report.records += len(sessions.rejected)
    report.rejected += sessions.rejected
    meta = {"source": source.name, "format": "kv-cache-tester"}
    return Imported(Trace(name=source.name.partition(".")[0], workflows=tuple(workflows), meta=meta), report)


class _Request:
    def __init__(self, data: dict[str, Any], size: int, zero: float, agent: str, branch: str | None) -> None:
        self.length, self.output = whole(data, "in", least=1), whole(data, "out")
        hashes = data.get("hash_ids")
        if not isinstance(hashes, list) or not all(type(h) is int and h >= 0 for h in hashes):
            raise ValueError("hash_ids must be a list of whole numbers of at least 0")
        if not (len(hashes) - 1) * size < self.length:
            raise ValueError("more hash_ids than the prompt has blocks")
        self.hashes = hashes
        self.started = zero + number(data, "t")
        self.ended = self.started + number(data, "api_time", default=0.0)
        self.agent, self.branch = agent, branch
        self.called_tools = data.get("stop") == "tool_use"


def _session(where: str, name: str, items: list[Any], size: int, report: ImportReport) -> tuple[TraceCall, ...]:
    requests: list[_Request] = []

    def take(data: Any, place: str, zero: float, agent: str, branch: str | None) -> None:
        report.records += 1
        try:
            if not isinstance(data, dict):
                raise ValueError("a request must be an object")
            requests.append(_Request(data, size, zero, agent, branch))
            report.used += 1
        except ValueError as error:
            report.reject(place, str(error))

    for i, item in enumerate(items):
        place = f"{where}, request {i}"
        if not (isinstance(item, dict) and item.get("type") == "subagent"):
            take(item, place, 0.0, "main", None)
            continue
        inner = item.get("requests")
        if not isinstance(inner, list) or not isinstance(item.get("t"), int | float):
            report.records += 1
            report.reject(place, "a sub-agent needs a time and a list of requests")
            continue
        agent = str(item.get("subagent_type") or "sub-agent")
        for j, request in enumerate(inner):
            take(request, f"{place}.{j}", float(item["t"]), agent, f"{item.get('agent_id') or 'sub'}.{i}")
    requests.sort(key=lambda r: (r.started, r.ended))
    return _calls(name, requests, size)


def _calls(name: str, requests: list[_Request], size: int) -> tuple[TraceCall, ...]:
    latest: dict[tuple[str, str | None], int] = {}
    blocks = []
    for i, r in enumerate(requests):
        blocks.append(BlockCall(r.hashes, r.length, r.output, latest.get((r.agent, r.branch))))
        latest[r.agent, r.branch] = i
    contents = block_contents(blocks, size, prefix=f"{name}.")
    noted = [
        NotedCall(
            id=f"{name}-{i}",
            agent=r.agent,
            branch=r.branch,
            started=r.started,
            ended=r.ended,
            number=i,
            segments=(),
        )
        for i, r in enumerate(requests)
    ]
    waits = waits_of(noted)
    by_id = {n.id: r for n, r in zip(noted, requests, strict=True)}
    first = requests[0].started if requests else 0.0
    made = []
    for note, request in zip(noted, requests, strict=True):
        before = [by_id[w] for w in waits[note.id]]
        delay = max(0.0, request.started - max([b.ended for b in before], default=first))
        after_tools = any(b.called_tools for b in before)
        prompt, output = contents[note.number]
        made.append(
            TraceCall(
                id=note.id,
                agent=request.agent,
                prompt=prompt,
                output=output,
                wait_for=waits[note.id],
                delay=delay,
                tools=(TraceTool(name="tools", duration=delay),) if after_tools else (),
                branch=request.branch,
            )
        )
    return tuple(made)
