"""Many tasks at once: a concurrency limit, a progress bar, and a results file that a second run resumes."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from agentflow.errors import EngineClosed, EngineDied, RealEngineForbidden, SetupError, UsageError

__all__ = ["BatchResult", "ResultsFile", "run_batch"]

T = TypeVar("T")

#: Errors after which no other task can succeed: they end the batch.
_FATAL = (EngineDied, EngineClosed, SetupError, RealEngineForbidden)


@dataclass(slots=True)
class BatchResult:
    """What came of a batch: one record per finished task in the order of the tasks, and the errors by key.

    ``resumed`` counts the records that an earlier run had made.
    """

    records: list[dict[str, Any]] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)
    resumed: int = 0


class ResultsFile:
    """Records as JSON lines, each naming its task in the field ``key_field``.

    A line is written whole and flushed before the next one; a last line that a killed process left
    incomplete is dropped when the file is opened again.
    """

    def __init__(self, path: Path, *, key_field: str = "uid") -> None:
        self.path = path
        self.key_field = key_field
        self.records: dict[str, dict[str, Any]] = {}
        self._out: TextIO | None = None

    def __enter__(self) -> ResultsFile:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._load()
            self._out = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise UsageError(
                f"cannot keep results in {self.path}: {error.strerror or error}; nothing was run: give the path of a"
                " file that you can write to"
            ) from error
        return self

    def __exit__(self, *exc: object) -> None:
        if self._out is not None:
            self._out.close()
            self._out = None

    def add(self, record: Mapping[str, Any]) -> None:
        """Append one record and hand it to the operating system."""
        if self._out is None:
            raise UsageError("open the results file with `with` before adding to it")
        self._out.write(json.dumps(dict(record), ensure_ascii=False) + "\n")
        self._out.flush()
        self.records[str(record[self.key_field])] = dict(record)

    def _load(self) -> None:
        if not self.path.exists():
            return
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        for number, line in enumerate(data[:whole].splitlines(), 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
                self.records[str(record[self.key_field])] = record
            except (ValueError, TypeError, KeyError) as error:
                raise UsageError(
                    f"{self.path}, line {number}: no record with a field {self.key_field!r};"
                    " nothing was changed: give another results file, or remove that line"
                ) from error
        if whole < len(data):
            os.truncate(self.path, whole)


async def run_batch(
    tasks: Sequence[T],
    work: Callable[[T], Awaitable[dict[str, Any]]],
    *,
    key: Callable[[T], str],
    concurrency: int = 4,
    results: Path | None = None,
    key_field: str = "uid",
    title: str = "tasks",
    stream: TextIO | None = None,
    on_record: Callable[[dict[str, Any]], str] | None = None,
) -> BatchResult:
    """Run ``work`` on every task, at most ``concurrency`` at once, and collect the records it returns.

    With ``results`` each record is appended to that file as JSON; tasks that the file holds already are
    not run again. A record must carry ``key(task)`` in ``key_field``. A task that raises is reported in ``errors``
    and not written, so a second run tries it again; an error that no other task could survive (the engine
    died, the set-up is wrong) cancels the rest and is raised, with what was finished kept in the file.
    The progress bar goes to ``stream`` (standard error) and is silent when that is no terminal;
    ``on_record`` may return a short text to show beside it.
    """
    if concurrency < 1:
        raise UsageError(f"concurrency must be at least 1, got {concurrency}")
    keys = [key(task) for task in tasks]
    _refuse_twins(keys)
    if results is None:
        return await _run(tasks, keys, work, concurrency, None, key_field, title, stream, on_record)
    with ResultsFile(results, key_field=key_field) as file:
        return await _run(tasks, keys, work, concurrency, file, key_field, title, stream, on_record)


async def _run(
    tasks: Sequence[T],
    keys: Sequence[str],
    work: Callable[[T], Awaitable[dict[str, Any]]],
    concurrency: int,
    file: ResultsFile | None,
    key_field: str,
    title: str,
    stream: TextIO | None,
    on_record: Callable[[dict[str, Any]], str] | None,
) -> BatchResult:
    done: dict[str, dict[str, Any]] = {}
    if file is not None:
        done.update({k: file.records[k] for k in keys if k in file.records})
    result = BatchResult(resumed=len(done))
    waiting = [(k, task) for k, task in zip(keys, tasks, strict=True) if k not in done]
    slots = asyncio.Semaphore(concurrency)
    console = Console(file=stream or sys.stderr)

    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
        disable=not console.is_terminal,
    ) as bar:
        shown = bar.add_task(title, total=len(tasks), completed=len(done), note="")

        async def one(name: str, task: T) -> None:
            async with slots:
                try:
                    record = await work(task)
                except _FATAL:
                    raise
                except Exception as error:
                    result.errors[name] = f"{type(error).__name__}: {error}"
                    bar.update(shown, advance=1)
                    return
            if str(record.get(key_field)) != name:
                raise UsageError(f"the record of task {name!r} must carry it in the field {key_field!r}")
            done[name] = record
            if file is not None:
                file.add(record)
            bar.update(shown, advance=1, note=on_record(record) if on_record else "")

        await _all([one(name, task) for name, task in waiting])
    result.records = [done[k] for k in keys if k in done]
    return result


async def _all(jobs: Iterable[Awaitable[None]]) -> None:
    """Run jobs to their end; when one raises, cancel the others, wait for them, and raise it."""
    running = [asyncio.ensure_future(job) for job in jobs]
    try:
        await asyncio.gather(*running)
    finally:
        for job in running:
            job.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def _refuse_twins(keys: Sequence[str]) -> None:
    seen: set[str] = set()
    for name in keys:
        if name in seen:
            raise UsageError(f"two tasks share the key {name!r}: keys must be unique")
        seen.add(name)
