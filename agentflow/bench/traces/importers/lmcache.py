"""LMCache agent traces: the whole prompt text of every call, a file a session."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from agentflow.bench.traces.importers._text import Encode, encoder
from agentflow.bench.traces.importing import Imported, ImportReport, json_lines, number
from agentflow.bench.traces.jsonl import OnError
from agentflow.bench.traces.model import Trace, TraceCall, TraceWorkflow
from agentflow.bench.traces.spans import SpanTrie
from agentflow.errors import TraceError

__all__ = ["import_lmcache"]


def import_lmcache(
    path: str | os.PathLike[str],
    *,
    tokenizer: Encode | None = None,
    tokens_per_second: float = 80.0,
    on_error: OnError = "skip",
) -> Imported:
    """Sessions of a folder (or one file): ``timestamp`` (us), ``input``, ``output``, ``session_id`` a line.

    A record is a call; those with an empty input are reported. The format names no agents: calls whose prompts
    begin with the same five words are one agent's. It has the time of a request only, so the delay is the gap to the
    request before it less the time to write that one's answer at ``tokens_per_second``. Where inputs hold the
    user's messages only (``miniswe``), no prompt holds an answer.
    """
    source, report = Path(path), ImportReport(on_error)
    files = sorted(source.glob("*.jsonl*")) if source.is_dir() else [source]
    if not files:
        raise TraceError(f"{source}: no *.jsonl files in this folder")
    encode, trie = encoder(tokenizer), SpanTrie("l")
    drafts: list[tuple[str, float, list[tuple[int, float, str]]]] = []
    for file in files:
        rows: list[tuple[float, dict[str, Any]]] = []
        for where, data in json_lines(file, report):
            try:
                at = number(data, "timestamp") / 1e6
                if not isinstance(data.get("input"), str) or not isinstance(data.get("output"), str):
                    raise ValueError("input and output must be text")
                if not data["input"]:
                    raise ValueError("the input is empty")
            except ValueError as error:
                report.reject(where, str(error))
                continue
            rows.append((at, data))
        rows.sort(key=lambda r: r[0])
        calls = [
            (trie.add(encode(d["input"]), encode(d["output"])), at, " ".join(d["input"][:80].split()[:5]))
            for at, d in rows
        ]
        report.used += len(calls)
        if calls:
            drafts.append((file.name.partition(".")[0], rows[0][0], calls))
    contents = trie.contents()
    zero = min((start for _, start, _ in drafts), default=0.0)
    workflows = []
    for name, start, calls in sorted(drafts, key=lambda d: d[1]):
        made: list[TraceCall] = []
        last = start
        for position, at, agent in calls:
            prompt, output = contents[position]
            writing = made[-1].output_tokens / tokens_per_second if made else 0.0
            made.append(
                TraceCall(
                    id=f"{name}-{len(made)}",
                    agent=agent,
                    prompt=prompt,
                    output=output,
                    wait_for=(made[-1].id,) if made else (),
                    delay=max(0.0, at - last - writing),
                )
            )
            last = at
        workflows.append(TraceWorkflow(id=name, calls=tuple(made), arrival=start - zero, graph=source.stem))
    meta = {"source": source.name, "format": "lmcache-agent-trace", "tokens_per_second": tokens_per_second}
    tokens = trie.tokens() if tokenizer is not None else {}
    return Imported(Trace(name=source.stem, workflows=tuple(workflows), tokens=tokens, meta=meta), report)
