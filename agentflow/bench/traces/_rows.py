"""Rows of Mooncake files, checked, and the workflows that they form."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from agentflow.bench.traces.importing import ImportReport, number, whole
from agentflow.bench.traces.model import TraceTool

__all__ = ["Row", "read_row", "workflows_of"]

#: A time in milliseconds above this is a date (after 1973), below it a time since some beginning.
_DATE_MS = 1e11


@dataclass(frozen=True, slots=True)
class Row:
    """A row; times in seconds."""

    id: str
    session: str
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    timestamp: float
    delay: float
    wait_for: tuple[str, ...]
    prefix_reset: bool
    tools: tuple[TraceTool, ...]


def read_row(data: dict[str, Any], block_size: int, *, plain: bool = False) -> Row:
    """Check a row; raises ValueError saying what is wrong. The format's other names of fields are known."""
    request = data.get("request_id")
    if not isinstance(request, str) or not request:
        raise ValueError("no request_id")
    length = whole(data, "input_length", "input_tokens", least=1)
    output = whole(data, "output_length", "output_tokens")
    hashes = data.get("hash_ids")
    if not isinstance(hashes, list) or not all(type(h) is int and h >= 0 for h in hashes):
        raise ValueError("hash_ids must be a list of whole numbers of at least 0")
    if not (len(hashes) - 1) * block_size < length <= max(len(hashes), 1) * block_size:
        raise ValueError(f"hash_ids do not fit input_length in blocks of {block_size}")
    session = data.get("session_id")
    if session is not None and not isinstance(session, str):
        raise ValueError("session_id must be text")
    wait_for = _texts(data, "wait_for")
    default = None if plain else 0.0
    return Row(
        id=request,
        session=session or request,
        input_length=length,
        output_length=output,
        hash_ids=tuple(hashes),
        timestamp=number(data, "timestamp", "created_time", default=default) / 1000,
        delay=(number(data, "delay", "delay_ms", default=0.0) + number(data, "tool_wait_ms", default=0.0)) / 1000,
        wait_for=wait_for,
        prefix_reset=data.get("prefix_reset") is True,
        tools=_tools(data.get("tool_events") or []),
    )


def _texts(data: dict[str, Any], name: str) -> tuple[str, ...]:
    value = data.get(name) or []
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise ValueError(f"{name} must be a list of texts")
    return tuple(dict.fromkeys(value))


def _tools(events: Any) -> tuple[TraceTool, ...]:
    if not isinstance(events, list) or not all(isinstance(e, dict) for e in events):
        raise ValueError("tool_events must be a list of objects")
    starts = [number(e, "started_at_unix_ms", default=0.0) for e in events]
    zero = min(starts, default=0.0)
    if zero < _DATE_MS:  # counted from when the call could start, as agentflow writes it
        zero = 0.0
    return tuple(
        TraceTool(
            name=str(event.get("tool_class") or "tool"),
            start=(start - zero) / 1000,
            duration=number(event, "duration_ms", default=0.0) / 1000,
            outcome=str(event.get("status") or "ok"),
        )
        for event, start in zip(events, starts, strict=True)
    )


def workflows_of(
    rows: dict[str, Row], workflow: Callable[[str], str | None], report: ImportReport
) -> Iterable[list[Row]]:
    """Rows that belong together, each in an order in which every row follows those it waits for.

    They belong together when ``workflow`` says so of their sessions, where it knows, else when they share a
    session or wait for one another. Rows that wait for themselves in a circle are rejected.
    """
    parents: dict[str, str] = {}

    def find(key: str) -> str:
        while parents.setdefault(key, key) != key:
            parents[key] = key = parents[parents[key]]
        return key

    for row in rows.values():
        known = workflow(row.session)
        mine = find("r" + row.id)
        parents[mine] = find("s" + row.session if known is None else "w" + known)
        for other in row.wait_for:
            if other in rows:
                parents[find("r" + other)] = find("r" + row.id)
    groups: dict[str, list[Row]] = {}
    for row in rows.values():
        present = tuple(w for w in row.wait_for if w in rows)
        if len(present) < len(row.wait_for):
            report.notes["a request in wait_for that is not in the file was left out"] += 1
        groups.setdefault(find("r" + row.id), []).append(replace(row, wait_for=present))
    for group in groups.values():
        ordered = _ordered(group)
        for row in group if len(ordered) < len(group) else ():
            if row not in ordered:
                report.reject(f"request {row.id}", "wait_for goes round in a circle")
        if ordered:
            yield ordered


def _ordered(rows: list[Row]) -> list[Row]:
    """In the order of the file, each after those it waits for; those in a circle, or after one, are left out."""
    out: list[Row] = []
    done: set[str] = set()
    waiting = rows
    while waiting:
        later = []
        for row in waiting:
            if done.issuperset(row.wait_for):
                done.add(row.id)
                out.append(row)
            else:
                later.append(row)
        if len(later) == len(waiting):
            break
        waiting = later
    return out
