"""Who&When: multi-agent conversations, a file a run: who spoke when, behind which instructions."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from agentflow.bench.traces.importers._text import BYTES_PER_TOKEN
from agentflow.bench.traces.importing import Imported, ImportReport
from agentflow.bench.traces.jsonl import OnError
from agentflow.bench.traces.model import Content, Span, Trace, TraceCall, TraceTool, TraceWorkflow
from agentflow.errors import TraceError

__all__ = ["import_who_and_when"]

#: Who runs code for the others, and is no agent.
TERMINAL = "Computer_terminal"


def import_who_and_when(path: str | os.PathLike[str], *, on_error: OnError = "skip") -> Imported:
    """Runs of a folder (or one file): ``history`` of ``name`` and ``content``, ``system_prompt`` by agent.

    A record is a message. The first is the task; each later one is a call of its speaker, who reads its own
    instructions and then the whole conversation so far; the terminal's are tools. Lengths are a token per four
    bytes. There are no times: delays and tool durations are 0, and all runs arrive at 0.
    """
    source, report = Path(path), ImportReport(on_error)
    files = sorted(source.rglob("*.json"), key=_natural) if source.is_dir() else [source]
    if not files:
        raise TraceError(f"{source}: no *.json files in this folder")
    workflows = []
    for file in files:
        name = f"{file.parent.name}/{file.stem}"
        try:
            data = json.loads(file.read_bytes())
            history, prompts = data["history"], data["system_prompt"]
            if not isinstance(history, list) or not isinstance(prompts, dict):
                raise ValueError("history must be a list, system_prompt an object")
        except (ValueError, KeyError, TypeError) as error:
            report.records += 1
            report.reject(name, f"no run that can be read ({type(error).__name__}: {error})")
            continue
        report.records += len(history)
        calls = _run(name, history, prompts, report)
        if calls:
            workflows.append(TraceWorkflow(id=name, calls=calls, graph="group-chat"))
    meta = {"source": source.name, "format": "who-and-when"}
    return Imported(Trace(name=source.stem, workflows=tuple(workflows), meta=meta), report)


def _run(name: str, history: list[Any], prompts: dict[str, Any], report: ImportReport) -> tuple[TraceCall, ...]:
    conversation: list[tuple[str | None, Span]] = []
    calls: list[TraceCall] = []
    tools: list[TraceTool] = []
    for i, message in enumerate(history):
        speaker = message.get("name") if isinstance(message, dict) else None
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(speaker, str) or not isinstance(content, str) or not content:
            report.reject(f"{name}, message {i}", "a message needs a name and a content that is not empty")
            continue
        span = Span(f"{name}.{i}", _tokens(content))
        if not conversation:
            conversation.append((None, span))
        elif speaker == TERMINAL:
            tools.append(TraceTool(name="terminal", outcome="ok" if "(execution succeeded)" in content else "error"))
            conversation.append((speaker, span))
        else:
            prompt, segments = _view(speaker, prompts.get(speaker), conversation)
            calls.append(
                TraceCall(
                    id=f"{name}-{i}",
                    agent=speaker,
                    prompt=prompt,
                    output=(span,),
                    wait_for=(calls[-1].id,) if calls else (),
                    tools=tuple(tools),
                    segments=segments,
                )
            )
            tools = []
            conversation.append((speaker, span))
        report.used += 1
    if tools:
        report.notes["a terminal's message that no call came after"] += len(tools)
    return tuple(calls)


_Segments = tuple[tuple[str, int, int, str | None, str | None], ...]


def _view(agent: str, instructions: Any, conversation: list[tuple[str | None, Span]]) -> tuple[Content, _Segments]:
    """What an agent reads: its instructions, the same text in every run that has it, then the conversation."""
    spans: list[Span] = []
    segments: list[tuple[str, int, int, str | None, str | None]] = []
    at = 0
    if isinstance(instructions, str) and instructions:
        text = hashlib.blake2b(instructions.encode(), digest_size=8).hexdigest()
        spans.append(Span(f"instructions.{text}", _tokens(instructions)))
        segments.append(("private", 0, spans[0].tokens, None, None))
        at = spans[0].tokens
    for producer, span in conversation:
        spans.append(span)
        segments.append(("shared", at, span.tokens, "chat", producer))
        at += span.tokens
    return tuple(spans), tuple(segments)


def _tokens(text: str) -> int:
    return -(-len(text.encode("utf-8", "surrogatepass")) // BYTES_PER_TOKEN)


def _natural(path: Path) -> tuple[str, int, str]:
    return (str(path.parent), int(path.stem) if path.stem.isdigit() else 0, path.stem)
