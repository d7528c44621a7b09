"""Traces as JSON lines: a header, then one line per workflow. ``docs/guides/traces.md`` describes the format.

Reading and writing go line by line, so that a trace of any size needs the memory of one workflow and of its token ids.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from agentflow.bench.traces._codec import decode_workflow, encode_workflow
from agentflow.bench.traces.model import Trace, TraceWorkflow
from agentflow.errors import TraceError, UsageError

__all__ = ["FORMAT", "VERSION", "OnError", "Skipped", "TraceReader", "TraceWriter", "read_trace", "write_trace"]

FORMAT = "agentflow-trace"
VERSION = 1

#: What to do with a line that cannot be read: raise, or leave it out and say so in the report.
OnError = Literal["refuse", "skip"]


@dataclass(frozen=True, slots=True)
class Skipped:
    """A line that was left out: its number, from 1, and why."""

    line: int
    reason: str


def _pack(raw: BinaryIO, path: Path) -> BinaryIO:
    """What writes to ``raw``, compressed where the name ends in ``.gz``: the same trace gives the same bytes."""
    if path.suffix != ".gz":
        return raw
    return cast(BinaryIO, gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0))


@contextmanager
def _lines(path: Path) -> Iterator[Iterator[bytes]]:
    """The lines of a file, unpacked where its name ends in ``.gz``."""
    with path.open("rb") as raw:
        if path.suffix == ".gz":
            with gzip.GzipFile(fileobj=raw) as packed:
                yield iter(packed)
        else:
            yield iter(raw)


class TraceWriter:
    """Writes a trace workflow by workflow. Token ids of spans go on the line of the first workflow that uses them.

    The file appears under its name when the writer is closed without an error, and replaces what was there.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        name: str,
        edges: Mapping[str, tuple[str, ...]] | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> None:
        self.path = Path(path)
        self._partial = self.path.with_name(f".{os.getpid()}.partial.{self.path.name}")
        self._written: set[str] = set()
        self._raw = self._partial.open("wb")
        self._file = _pack(self._raw, self.path)
        header = {"format": FORMAT, "version": VERSION, "name": name}
        try:
            self._line(header | {"edges": {a: list(b) for a, b in (edges or {}).items()}, "meta": dict(meta or {})})
        except TraceError:
            self.discard()
            raise

    def write(self, workflow: TraceWorkflow, tokens: Mapping[str, tuple[int, ...]] | None = None) -> None:
        """Add a workflow, with the token ids of those of its spans that ``tokens`` knows."""
        try:
            data = encode_workflow(workflow)
        except ValueError as error:
            raise TraceError(f"{self.path}: not written: {error}") from error
        if tokens:
            spans = {s.id for c in workflow.calls for s in (*c.prompt, *c.output)}
            new = sorted(s for s in spans - self._written if s in tokens)
            self.add_tokens({s: tokens[s] for s in new}, data)
        else:
            self._line(data)

    def add_tokens(self, tokens: Mapping[str, tuple[int, ...]], workflow: dict[str, Any] | None = None) -> None:
        """Add token ids of spans that no workflow written before had, on a line of their own or of ``workflow``."""
        data = workflow if workflow is not None else {}
        if tokens:
            data["tokens"] = {s: list(ids) for s, ids in tokens.items()}
            self._written.update(tokens)
        if data:
            self._line(data)

    def close(self) -> None:
        """Finish the file. Closing twice is fine."""
        if not self._raw.closed:
            self._file.close()
            self._raw.close()
            self._partial.replace(self.path)

    def discard(self) -> None:
        """Leave no file behind, and what was there before as it was."""
        if not self._raw.closed:
            self._file.close()
            self._raw.close()
            self._partial.unlink(missing_ok=True)

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close() if kind is None else self.discard()

    def _line(self, data: dict[str, Any]) -> None:
        try:
            line = json.dumps(data, separators=(",", ":"), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise TraceError(f"{self.path}: not written, for it holds what JSON cannot: {error}") from error
        self._file.write(line.encode("ascii") + b"\n")


@dataclass
class TraceReader:
    """Reads a trace workflow by workflow: iterate over it.

    ``name``, ``edges`` and ``meta`` are there at once; ``tokens`` and ``skipped`` fill while it is read. Raises
    :class:`~agentflow.errors.TraceError` for a file that is no trace or of a newer version, and, with ``on_error``
    ``refuse``, for a line that cannot be read.
    """

    path: Path
    on_error: OnError = "refuse"
    name: str = ""
    edges: dict[str, tuple[str, ...]] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)
    tokens: dict[str, tuple[int, ...]] = field(default_factory=dict)
    skipped: list[Skipped] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.path = Path(self.path)
        if self.on_error not in ("refuse", "skip"):
            raise UsageError(f"on_error must be 'refuse' or 'skip', not {self.on_error!r}")
        try:
            with _lines(self.path) as lines:
                self._read_header(next(lines, b""))
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise TraceError(f"{self.path}: broken or cut short before its header: {error}") from error
        except FileNotFoundError as error:
            raise TraceError(f"{self.path}: no such file") from error

    def __iter__(self) -> Iterator[TraceWorkflow]:
        self.tokens.clear()
        self.skipped.clear()
        seen: set[str] = set()
        number = 1
        with _lines(self.path) as lines:
            next(lines)
            try:
                for number, line in enumerate(lines, start=2):
                    workflow = self._read_line(number, line, seen)
                    if workflow is not None:
                        yield workflow
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                self._refuse(number + 1, f"the file is broken or cut short here: {error}")

    def _read_line(self, number: int, line: bytes, seen: set[str]) -> TraceWorkflow | None:
        if not line.strip():
            return None
        try:
            workflow, tokens = decode_workflow(json.loads(line), self.tokens)
            if workflow is not None and workflow.id in seen:
                raise ValueError(f"a second workflow {workflow.id!r}")
        except (ValueError, RecursionError) as error:
            self._refuse(number, _reason(error, line))
            return None
        self.tokens.update(tokens)
        if workflow is not None:
            seen.add(workflow.id)
        return workflow

    def _read_header(self, line: bytes) -> None:
        try:
            data = json.loads(line)
        except ValueError:
            data = None
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise TraceError(f"{self.path}: no trace of agentflow: its first line is not a header of {FORMAT!r}")
        version = data.get("version")
        if not isinstance(version, int) or version < 1:
            raise TraceError(f"{self.path}: its header has no version")
        if version > VERSION:
            raise TraceError(
                f"{self.path}: written in version {version} of the format, this agentflow reads up to {VERSION}:"
                " update agentflow"
            )
        edges, meta, name = data.get("edges", {}), data.get("meta", {}), data.get("name", "")
        right = isinstance(edges, dict) and all(isinstance(b, list) for b in edges.values())
        if not (right and isinstance(meta, dict) and isinstance(name, str)):
            raise TraceError(f"{self.path}: name, edges or meta of its header are not of the described form")
        self.name, self.meta = name, meta
        self.edges = {a: tuple(str(x) for x in b) for a, b in edges.items()}

    def _refuse(self, number: int, reason: str) -> None:
        if self.on_error == "refuse":
            raise TraceError(
                f"{self.path}, line {number}: {reason}. Nothing of the trace was kept; read it with on_error='skip' to"
                " leave such lines out"
            )
        self.skipped.append(Skipped(number, reason))


def _reason(error: Exception, line: bytes) -> str:
    if isinstance(error, json.JSONDecodeError):
        cut = "" if line.endswith(b"\n") else ", the line may be cut short"
        return f"not JSON ({error.msg} at column {error.colno}{cut})"
    return str(error) or type(error).__name__


def write_trace(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write a whole trace; compressed where ``path`` ends in ``.gz``."""
    with TraceWriter(path, name=trace.name, edges=trace.edges, meta=trace.meta) as writer:
        for workflow in trace.workflows:
            writer.write(workflow, trace.tokens)
        used = {s.id for w in trace.workflows for c in w.calls for s in (*c.prompt, *c.output)}
        writer.add_tokens({s: ids for s, ids in trace.tokens.items() if s not in used})


def read_trace(
    path: str | os.PathLike[str], *, on_error: OnError = "refuse", skipped: list[Skipped] | None = None
) -> Trace:
    """Read a whole trace. Lines left out with ``on_error="skip"`` are added to ``skipped``."""
    reader = TraceReader(Path(path), on_error=on_error)
    workflows = tuple(reader)
    if skipped is not None:
        skipped.extend(reader.skipped)
    return Trace(name=reader.name, workflows=workflows, edges=reader.edges, tokens=reader.tokens, meta=reader.meta)
