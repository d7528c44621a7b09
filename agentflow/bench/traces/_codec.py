"""One workflow of a trace as a JSON object, and back. Strict: what is not of the described form is refused.

Prompts grow, so a prompt is written as a reference to an earlier call of the workflow and what follows: spans are
numbered per workflow, and ``like: [call, n]`` stands for the first ``n`` spans of that call's prompt and output.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from agentflow.bench.traces.model import Content, Span, TraceCall, TraceTool, TraceWorkflow

__all__ = ["decode_workflow", "encode_workflow"]

_WORKFLOW = frozenset({"workflow", "arrival", "graph", "tenant", "outcome", "spans", "calls", "tokens"})
_CALL = frozenset(
    {"id", "agent", "like", "prompt", "output", "wait_for", "delay", "tools", "branch", "segments", "superseded"}
)
#: A reference is written when it saves at least so many spans.
_WORTH = 4


def encode_workflow(workflow: TraceWorkflow) -> dict[str, Any]:
    """The workflow as a JSON-ready dict; fields at their defaults are left out.

    Raises ValueError for a workflow that :func:`decode_workflow` would refuse.
    """
    _check(workflow)
    numbers: dict[Span, int] = {}
    for call in workflow.calls:
        for span in (*call.prompt, *call.output):
            numbers.setdefault(span, len(numbers))
    if len({s.id for s in numbers}) < len(numbers):
        raise ValueError(f"workflow {workflow.id!r} has a span id with two lengths")
    calls: list[dict[str, Any]] = []
    latest: dict[str, tuple[int, Content]] = {}
    for i, call in enumerate(workflow.calls):
        data: dict[str, Any] = {"id": call.id, "agent": call.agent}
        shared = 0
        if call.agent in latest:
            number, before = latest[call.agent]
            shared = _common(before, call.prompt)
            if shared >= _WORTH:
                data["like"] = [number, shared]
            else:
                shared = 0
        latest[call.agent] = (i, call.prompt + call.output)
        data["prompt"] = [numbers[s] for s in call.prompt[shared:]]
        data["output"] = [numbers[s] for s in call.output]
        if call.wait_for:
            data["wait_for"] = list(call.wait_for)
        if call.delay:
            data["delay"] = call.delay
        if call.tools:
            data["tools"] = [[t.name, t.start, t.duration, t.outcome] for t in call.tools]
        if call.branch is not None:
            data["branch"] = call.branch
        if call.segments:
            data["segments"] = [list(s) for s in call.segments]
        if call.superseded:
            data["superseded"] = True
        calls.append(data)
    out: dict[str, Any] = {"workflow": workflow.id}
    if workflow.arrival:
        out["arrival"] = workflow.arrival
    for name, value in (("graph", workflow.graph), ("tenant", workflow.tenant)):
        if value is not None:
            out[name] = value
    if workflow.outcome != "done":
        out["outcome"] = workflow.outcome
    out["spans"] = [list(s) for s in numbers]
    out["calls"] = calls
    return out


def _check(workflow: TraceWorkflow) -> None:
    seen: set[str] = set()
    _seconds(workflow.arrival, "arrival")
    for call in workflow.calls:
        if call.id in seen:
            raise ValueError(f"workflow {workflow.id!r} has two calls {call.id!r}")
        if not seen.issuperset(call.wait_for):
            raise ValueError(f"call {call.id!r} of workflow {workflow.id!r} waits for calls that come not before it")
        seen.add(call.id)
        _seconds(call.delay, "delay")
        for tool in call.tools:
            _seconds(tool.start, "tool start")
            _seconds(tool.duration, "tool duration")


def _common(a: Content, b: Content) -> int:
    n = 0
    for x, y in zip(a, b, strict=False):
        if x is not y and x != y:
            break
        n += 1
    return n


def decode_workflow(
    data: Any, known: Mapping[str, tuple[int, ...]]
) -> tuple[TraceWorkflow | None, dict[str, tuple[int, ...]]]:
    """The inverse of :func:`encode_workflow`: the workflow, and the token ids that came with it.

    A line may hold token ids alone. ``known`` are those of earlier lines. Raises ValueError saying what is wrong.
    """
    if not isinstance(data, dict):
        raise ValueError(f"a line is an object, not {type(data).__name__}")
    _only(data, _WORKFLOW, "a workflow")
    tokens = _tokens(data.get("tokens", {}))
    for known_id in tokens.keys() & known.keys():
        if tokens[known_id] != known[known_id]:
            raise ValueError(f"span {known_id!r} has other token ids than before")
    if "workflow" not in data:
        if set(data) != {"tokens"}:
            raise ValueError("no workflow id")
        return None, tokens
    name = _text(data["workflow"], "workflow")
    spans = _spans(data.get("spans", []))
    for span in spans:
        ids = tokens.get(span.id, known.get(span.id))
        if ids is not None and len(ids) != span.tokens:
            raise ValueError(f"span {span.id!r} has {span.tokens} tokens and {len(ids)} token ids")
    calls: list[TraceCall] = []
    for i, item in enumerate(_list(data.get("calls"), "calls")):
        try:
            calls.append(_call(item, spans, calls))
        except ValueError as error:
            raise ValueError(f"call {i} of workflow {name!r}: {error}") from error
    if len({c.id for c in calls}) < len(calls):
        raise ValueError(f"workflow {name!r} has two calls of one id")
    return (
        TraceWorkflow(
            id=name,
            calls=tuple(calls),
            arrival=_seconds(data.get("arrival", 0.0), "arrival"),
            graph=_maybe(data.get("graph"), "graph"),
            tenant=_maybe(data.get("tenant"), "tenant"),
            outcome=_text(data.get("outcome", "done"), "outcome"),
        ),
        tokens,
    )


def _call(data: Any, spans: list[Span], before: list[TraceCall]) -> TraceCall:
    if not isinstance(data, dict):
        raise ValueError(f"a call is an object, not {type(data).__name__}")
    _only(data, _CALL, "a call")
    start: Content = ()
    if "like" in data:
        like = _list(data["like"], "like")
        if len(like) != 2 or not (_is_count(like[0]) and _is_count(like[1]) and like[0] < len(before)):
            raise ValueError(f"like must name an earlier call and a number of spans, got {like}")
        known = before[like[0]].prompt + before[like[0]].output
        if like[1] > len(known):
            raise ValueError(f"like wants {like[1]} spans of a call that has {len(known)}")
        start = known[: like[1]]
    wait_for = tuple(_text(w, "wait_for") for w in _list(data.get("wait_for", []), "wait_for"))
    missing = set(wait_for) - {c.id for c in before} if wait_for else ()
    if missing:
        raise ValueError(f"waits for {sorted(missing)}, which come not before it")
    return TraceCall(
        id=_text(data.get("id"), "id"),
        agent=_text(data.get("agent"), "agent"),
        prompt=start + _content(data.get("prompt"), spans, "prompt"),
        output=_content(data.get("output"), spans, "output"),
        wait_for=wait_for,
        delay=_seconds(data.get("delay", 0.0), "delay"),
        tools=tuple(_tool(t) for t in _list(data.get("tools", []), "tools")),
        branch=_maybe(data.get("branch"), "branch"),
        segments=tuple(_segment(s) for s in _list(data.get("segments", []), "segments")),
        superseded=_flag(data.get("superseded", False)),
    )


def _spans(data: Any) -> list[Span]:
    out = []
    for item in _list(data, "spans"):
        if not (isinstance(item, list) and len(item) == 2 and isinstance(item[0], str) and _is_count(item[1])):
            raise ValueError(f"a span is [id, tokens], got {str(item)[:60]}")
        out.append(Span(item[0], item[1]))
    if len({s.id for s in out}) < len(out):
        raise ValueError("spans has an id twice")
    return out


def _content(data: Any, spans: list[Span], what: str) -> Content:
    numbers = _list(data, what)
    try:
        if all(type(n) is int and n >= 0 for n in numbers):
            return tuple([spans[n] for n in numbers])
    except IndexError:
        pass
    raise ValueError(f"{what} must hold numbers of spans, 0 to {len(spans) - 1}")


def _tokens(data: Any) -> dict[str, tuple[int, ...]]:
    if not isinstance(data, dict):
        raise ValueError("tokens must be an object of span ids")
    for span, ids in data.items():
        if not (isinstance(ids, list) and all(type(i) is int and i >= 0 for i in ids)):
            raise ValueError(f"tokens of span {span!r} must be a list of token ids")
    return {span: tuple(ids) for span, ids in data.items()}


def _tool(data: Any) -> TraceTool:
    if not (isinstance(data, list) and len(data) == 4):
        raise ValueError(f"a tool is [name, start, duration, outcome], got {str(data)[:60]}")
    return TraceTool(
        name=_text(data[0], "tool name"),
        start=_seconds(data[1], "tool start"),
        duration=_seconds(data[2], "tool duration"),
        outcome=_text(data[3], "tool outcome"),
    )


def _segment(data: Any) -> tuple[str, int, int, str | None, str | None]:
    if not (isinstance(data, list) and len(data) == 5 and _is_count(data[1]) and _is_count(data[2])):
        raise ValueError(f"a segment is [kind, start, tokens, slot, producer], got {str(data)[:60]}")
    kind = _text(data[0], "segment kind")
    return (kind, data[1], data[2], _maybe(data[3], "segment slot"), _maybe(data[4], "segment producer"))


def _only(data: Mapping[str, Any], fields: frozenset[str], what: str) -> None:
    unknown = sorted(str(k) for k in data if k not in fields)
    if unknown:
        raise ValueError(f"{what} has no field {unknown[0][:60]!r}")


def _list(data: Any, what: str) -> list[Any]:
    if not isinstance(data, list):
        raise ValueError(f"{what} must be a list")
    return data


def _text(data: Any, what: str) -> str:
    if not isinstance(data, str):
        raise ValueError(f"{what} must be text, got {str(data)[:60]}")
    return data


def _maybe(data: Any, what: str) -> str | None:
    return None if data is None else _text(data, what)


def _flag(data: Any) -> bool:
    if not isinstance(data, bool):
        raise ValueError(f"superseded must be true or false, got {str(data)[:60]}")
    return data


def _is_count(data: Any) -> bool:
    return type(data) is int and data >= 0


def _seconds(data: Any, what: str) -> float:
    if isinstance(data, bool) or not isinstance(data, int | float) or not (math.isfinite(data) and data >= 0):
        raise ValueError(f"{what} must be seconds of at least 0, got {str(data)[:60]}")
    return float(data)
