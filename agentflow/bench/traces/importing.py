"""What all importers share: the report of what was used and what was not, and prompts known as blocks only."""

from __future__ import annotations

import gzip
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from agentflow.bench.traces.jsonl import OnError
from agentflow.bench.traces.model import Content, Span, Trace
from agentflow.bench.traces.spans import BlockTokens, Ids, SpanTrie
from agentflow.errors import TraceError, UsageError

__all__ = ["BlockCall", "ImportReport", "Imported", "Rejected", "block_contents", "json_lines", "number", "whole"]


class Rejected(NamedTuple):
    """A record that was not used: where it stood, and why."""

    where: str
    reason: str


@dataclass
class ImportReport:
    """``records`` were read; each was used or is in ``rejected``. ``notes`` count what was changed in used ones."""

    on_error: OnError = "skip"
    records: int = 0
    used: int = 0
    rejected: list[Rejected] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        if self.on_error not in ("refuse", "skip"):
            raise UsageError(f"on_error must be 'refuse' or 'skip', not {self.on_error!r}")

    @property
    def reasons(self) -> Counter[str]:
        """How many records were not used, by reason."""
        return Counter(r.reason for r in self.rejected)

    def reject(self, where: str, reason: str, *, records: int = 1) -> None:
        """Note records that cannot be used; raises :class:`~agentflow.errors.TraceError` with ``refuse``."""
        if self.on_error == "refuse":
            raise TraceError(f"{where}: {reason}. Import with on_error='skip' to leave such records out")
        self.rejected += [Rejected(where, reason)] * records

    def __str__(self) -> str:
        lines = [f"{self.records} records, {self.used} used, {len(self.rejected)} not"]
        lines += [f"  {n} not used: {reason}" for reason, n in self.reasons.most_common()]
        lines += [f"  {n} changed: {note}" for note, n in self.notes.most_common()]
        return "\n".join(lines)


class Imported(NamedTuple):
    """A trace and the report on how it came about."""

    trace: Trace
    report: ImportReport


def json_lines(path: Path, report: ImportReport) -> Iterator[tuple[str, dict[str, Any]]]:
    """Place and object of each line, broken ones rejected; unpacked where the name ends in ``.gz``."""
    try:
        with path.open("rb") as raw, gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw as lines:
            for i, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                report.records += 1
                where = f"{path.name}, line {i}"
                try:
                    data = json.loads(line)
                except ValueError as error:
                    report.reject(where, f"not JSON ({type(error).__name__})")
                    continue
                if isinstance(data, dict):
                    yield where, data
                else:
                    report.reject(where, f"an object was expected, not {type(data).__name__}")
    except (EOFError, gzip.BadGzipFile) as error:
        raise TraceError(f"{path}: broken or cut short: {error}") from error
    except FileNotFoundError as error:
        raise TraceError(f"{path}: no such file") from error


def whole(data: dict[str, Any], name: str, *others: str, least: int = 0) -> int:
    """A whole number of at least ``least`` under one of the names; raises ValueError."""
    value = next((data[n] for n in (name, *others) if data.get(n) is not None), None)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}")
    return value


def number(data: dict[str, Any], name: str, *others: str, default: float | None = None) -> float:
    """A number of at least 0 under one of the names, else ``default``; raises ValueError."""
    value = next((data[n] for n in (name, *others) if data.get(n) is not None), default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ValueError(f"{name} must be a number of at least 0")
    return float(value)


@dataclass(frozen=True, slots=True)
class BlockCall:
    """A call whose prompt is known as block hashes. ``before`` is the index of the call that it goes on from."""

    hash_ids: Sequence[int]
    input_length: int
    output_length: int
    before: int | None = None


def block_contents(calls: Sequence[BlockCall], block_size: int, *, prefix: str = "b") -> list[tuple[Content, Content]]:
    """Prompts and outputs in spans, whose ids begin with ``prefix``: calls given together share, others do not.

    Where a call goes on from one whose full blocks it begins with, its text after that prompt is taken to begin
    with that call's output, as it does in a conversation that only grows; other outputs are like no other text.
    """
    if all(call.before is None for call in calls):
        return _whole_blocks(calls, block_size, prefix)
    blocks = BlockTokens(block_size)
    follower: dict[int, int] = {}
    for i, call in enumerate(calls):
        if call.before is not None:
            if not 0 <= call.before < i:
                raise ValueError(f"call {i} goes on from call {call.before}, which does not come before it")
            before = calls[call.before]
            full = before.input_length // block_size
            grows = call.input_length >= before.input_length and len(call.hash_ids) >= full
            if grows and list(call.hash_ids[:full]) == list(before.hash_ids[:full]):
                follower.setdefault(call.before, i)
    prompts: dict[int, Ids] = {}
    trie = SpanTrie(prefix)
    for i in reversed(range(len(calls))):  # the prompt of a follower, which comes later, is needed first
        call = calls[i]
        prompt, output = blocks.prompt(call.hash_ids, call.input_length), blocks.fresh(call.output_length)
        if i in follower:
            longer = prompts.pop(follower[i])
            prompt = longer[: call.input_length]
            known = longer[call.input_length : call.input_length + call.output_length]
            output[: len(known)] = known
        if call.before is not None and follower.get(call.before) == i:
            prompts[i] = prompt
        trie.add(prompt, output)
    return trie.contents()[::-1]


def _whole_blocks(calls: Sequence[BlockCall], block_size: int, prefix: str) -> list[tuple[Content, Content]]:
    """The same where no call goes on from another: cut at blocks only, so that a block needs one place of the trie."""
    trie = SpanTrie(prefix)
    fresh = itertools.count(-1, -1)
    for call in calls:
        rest = call.input_length - (len(call.hash_ids) - 1) * block_size
        if call.hash_ids and rest <= 0:
            raise ValueError(f"{len(call.hash_ids)} blocks are more than {call.input_length} tokens hold")
        last = min(rest, block_size)
        # A block is the same one only where it holds as many tokens.
        ids = [h * (block_size + 1) + block_size for h in call.hash_ids[:-1]]
        ids += [h * (block_size + 1) + last for h in call.hash_ids[-1:]]
        if call.input_length > len(ids) * block_size:
            ids.append(next(fresh))
        trie.add(ids, [next(fresh)] if call.output_length else [])
    out = []
    for call, (prompt, output) in zip(calls, trie.contents(), strict=True):
        before = sum(s.tokens for s in prompt[:-1]) * block_size
        spans = [Span(s.id, s.tokens * block_size) for s in prompt[:-1]]
        spans += [Span(s.id, call.input_length - before) for s in prompt[-1:]]
        out.append((tuple(spans), tuple(Span(s.id, call.output_length) for s in output)))
    return out
