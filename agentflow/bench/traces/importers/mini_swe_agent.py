"""mini-swe-agent: whole trajectories with their texts, and tables of steps with lengths only."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np

from agentflow.bench.traces.importers._text import Encode, encoder, message_ids
from agentflow.bench.traces.importing import Imported, ImportReport, json_lines, number, whole
from agentflow.bench.traces.jsonl import OnError
from agentflow.bench.traces.model import Span, Trace, TraceCall, TraceTool, TraceWorkflow
from agentflow.bench.traces.spans import Ids, SpanTrie

__all__ = ["import_mini_swe_phases", "import_mini_swe_steps", "import_mini_swe_trajectories", "phase_of"]

_CHECK = re.compile(r"pytest|runtests|manage\.py test|tox|unittest|bin/test|python3? ")
_EDIT = re.compile(r"<<|sed -i|git apply|patch ")

#: The model's own part of the time between two answers, as the shortest of 15,000 gaps show it: seconds, and
#: seconds per token written.
LATENCY, PER_TOKEN = 2.0, 0.0087


def phase_of(action: str | None) -> str:
    """What a coding agent's shell command is for: ``planner`` (reading), ``coder`` (editing), ``tester`` (running)."""
    text = action or ""
    if _EDIT.search(text):
        return "coder"
    return "tester" if _CHECK.search(text) else "planner"


def import_mini_swe_steps(
    path: str | os.PathLike[str], *, on_error: OnError = "skip", system_tokens: int = 140, phases: bool = False
) -> Imported:
    """A table of steps: ``instance_id, step, created (s), prompt_tokens, completion_tokens, action, returncode``.

    A record is a step. Prompts are taken to grow by the answer before them and what the command printed; where
    one is shorter than that, the answer's end is not in it (a model's reasoning), where one is shorter than the
    prompt before, the history begins afresh behind the first ``system_tokens``, which all runs share. Tools last
    as long as the gap between answers less the model's part of it. All calls are those of one agent; with ``phases``
    a call's agent is what its command is for (:func:`phase_of`).
    """
    source, report = Path(path), ImportReport(on_error)
    runs: dict[str, list[dict[str, Any]]] = {}
    for where, data in json_lines(source, report):
        try:
            for name in ("step", "completion_tokens"):
                whole(data, name)
            whole(data, "prompt_tokens", least=system_tokens + 1)
            number(data, "created")
            if not isinstance(data.get("instance_id"), str):
                raise ValueError("instance_id must be text")
        except ValueError as error:
            report.reject(where, str(error))
            continue
        runs.setdefault(data["instance_id"], []).append(data)
    system = Span("mini-swe-agent.system", system_tokens)
    workflows = []
    zero = min((r["created"] for steps in runs.values() for r in steps), default=0.0)
    for name, steps in runs.items():
        steps.sort(key=lambda r: r["step"])
        workflows.append(_run(name, steps, system, zero, report, phases))
        report.used += len(steps)
    workflows.sort(key=lambda w: w.arrival)
    return Imported(
        Trace(
            name=source.name.partition(".")[0],
            workflows=tuple(workflows),
            meta=_meta(source, "phases" if phases else "steps"),
        ),
        report,
    )


def import_mini_swe_phases(path: str | os.PathLike[str], **options: Any) -> Imported:
    """:func:`import_mini_swe_steps` with ``phases``: who was at work when, in runs on SWE-bench."""
    return import_mini_swe_steps(path, phases=True, **options)


def _run(
    name: str, steps: list[dict[str, Any]], system: Span, zero: float, report: ImportReport, phases: bool
) -> TraceWorkflow:
    prompt = [system, Span(f"{name}.task", steps[0]["prompt_tokens"] - system.tokens)]
    calls: list[TraceCall] = []
    for i, step in enumerate(steps):
        length, answer = step["prompt_tokens"], step["completion_tokens"]
        kept = answer
        if i + 1 < len(steps):
            kept = max(0, min(answer, steps[i + 1]["prompt_tokens"] - length))
        output = [Span(f"{name}.{i}.answer", kept)] if kept else []
        if answer > kept:
            output.append(Span(f"{name}.{i}.dropped", answer - kept))
            report.notes["the end of an answer is not in the next prompt"] += 1
        before = steps[i - 1] if i else None
        tools: tuple[TraceTool, ...] = ()
        if before is not None:
            gap = max(0.0, step["created"] - before["created"] - LATENCY - PER_TOKEN * before["completion_tokens"])
            words = str(before.get("action") or "").split()
            outcome = "error" if before.get("returncode") else "ok"
            tools = (TraceTool(name=words[0][:64] if words else "bash", duration=gap, outcome=outcome),)
        calls.append(
            TraceCall(
                id=f"{name}-{i}",
                agent=phase_of(step.get("action")) if phases else "agent",
                prompt=tuple(prompt),
                output=tuple(output),
                wait_for=(calls[-1].id,) if calls else (),
                delay=tools[0].duration if tools else 0.0,
                tools=tools,
            )
        )
        if i + 1 < len(steps):
            rest = steps[i + 1]["prompt_tokens"] - length - kept
            if rest < 0:
                prompt = [system]
                rest = steps[i + 1]["prompt_tokens"] - system.tokens
                report.notes["a prompt is shorter than the one before it"] += 1
            elif kept:
                prompt.append(output[0])
            if rest:
                prompt.append(Span(f"{name}.{i}.printed", rest))
    return TraceWorkflow(id=name, calls=tuple(calls), arrival=steps[0]["created"] - zero, graph="mini-swe-agent")


def import_mini_swe_trajectories(
    path: str | os.PathLike[str], *, tokenizer: Encode | None = None, on_error: OnError = "skip"
) -> Imported:
    """Whole trajectories, one a line: ``instance_id``, ``messages`` with ``role`` and ``content``. A record is one.

    Every assistant message is a call. Times are those of its ``extra.response.created`` where it has them.
    """
    source, report = Path(path), ImportReport(on_error)
    encode, trie = encoder(tokenizer), SpanTrie("m")
    drafts: list[tuple[str, list[tuple[int, float | None]]]] = []
    for where, data in json_lines(source, report):
        messages, name = data.get("messages"), data.get("instance_id")
        if not isinstance(name, str) or name in {d[0] for d in drafts}:
            report.reject(where, "no instance_id, or one that was there before")
        elif not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
            report.reject(where, "messages must be a list of objects")
        elif not any(m.get("role") == "assistant" for m in messages):
            report.reject(where, "no message is an assistant's")
        else:
            drafts.append((name, _added(messages, encode, trie)))
            report.used += 1
    contents = trie.contents()
    starts = [c for _, calls in drafts for _, c in calls if c is not None]
    workflows = []
    for name, calls in drafts:
        made: list[TraceCall] = []
        last: float | None = None
        for number_, created in calls:
            prompt, output = contents[number_]
            gap = created - last if created is not None and last is not None else 0.0
            wrote = made[-1].output_tokens if made else 0
            delay = max(0.0, gap - LATENCY - PER_TOKEN * wrote) if made else 0.0
            made.append(
                TraceCall(
                    id=f"{name}-{len(made)}",
                    agent="agent",
                    prompt=prompt,
                    output=output,
                    wait_for=(made[-1].id,) if made else (),
                    delay=delay,
                    tools=(TraceTool(name="bash", duration=delay),) if made else (),
                )
            )
            last = created
        first = calls[0][1]
        arrival = first - min(starts) if first is not None else 0.0
        workflows.append(TraceWorkflow(id=name, calls=tuple(made), arrival=arrival, graph="mini-swe-agent"))
    workflows.sort(key=lambda w: w.arrival)
    tokens = trie.tokens() if tokenizer is not None else {}
    name = source.name.partition(".")[0]
    meta = _meta(source, "trajectories")
    return Imported(Trace(name=name, workflows=tuple(workflows), tokens=tokens, meta=meta), report)


def _added(messages: list[dict[str, Any]], encode: Any, trie: SpanTrie) -> list[tuple[int, float | None]]:
    out: list[tuple[int, float | None]] = []
    prompt: Ids = np.empty(0, np.int64)
    for message in messages:
        ids = message_ids(encode, message)
        if message.get("role") == "assistant":
            extra = message.get("extra")
            response = extra.get("response") if isinstance(extra, dict) else None
            created = response.get("created") if isinstance(response, dict) else None
            out.append((trie.add(prompt, ids), float(created) if isinstance(created, int | float) else None))
        prompt = np.concatenate([prompt, ids])
    return out


def _meta(source: Path, kind: str) -> dict[str, Any]:
    return {"source": source.name, "format": f"mini-swe-agent-{kind}"}
