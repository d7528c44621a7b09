"""Batches: the limit on concurrency, results that survive a kill, and errors that end a batch or not."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import pytest

from agentflow.batch import ResultsFile, run_batch
from agentflow.errors import EngineDied, UsageError


async def test_at_most_so_many_at_once_and_records_in_order() -> None:
    running = peak = 0

    async def work(task: int) -> dict[str, Any]:
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        for _ in range(10 - task):  # the first tasks end last
            await asyncio.sleep(0)
        running -= 1
        return {"uid": str(task), "square": task * task}

    result = await run_batch(range(8), work, key=str, concurrency=3)
    assert peak == 3
    assert [r["square"] for r in result.records] == [0, 1, 4, 9, 16, 25, 36, 49]
    assert result.errors == {}


async def test_a_second_run_does_only_what_is_left(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "results.jsonl"
    seen: list[str] = []

    async def work(task: str) -> dict[str, Any]:
        seen.append(task)
        if task == "b" and seen.count("b") == 1:
            raise ValueError("not today")
        return {"uid": task}

    first = await run_batch("abc", work, key=str, results=path)
    assert first.errors == {"b": "ValueError: not today"}
    assert [r["uid"] for r in first.records] == ["a", "c"]
    second = await run_batch("abcd", work, key=str, results=path)
    assert seen == ["a", "b", "c", "b", "d"]
    assert second.resumed == 2
    assert [r["uid"] for r in second.records] == ["a", "b", "c", "d"]
    assert [json.loads(line)["uid"] for line in path.read_text().splitlines()] == ["a", "c", "b", "d"]


async def test_a_line_cut_by_a_kill_is_dropped_and_done_again(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text('{"uid": "a"}\n{"uid": "b", "tex')

    async def work(task: str) -> dict[str, Any]:
        return {"uid": task, "again": True}

    result = await run_batch("ab", work, key=str, results=path)
    assert result.records == [{"uid": "a"}, {"uid": "b", "again": True}]
    assert [json.loads(line) for line in path.read_text().splitlines()] == result.records


async def test_a_file_of_something_else_is_refused_untouched(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("my notes\n")

    async def work(task: str) -> dict[str, Any]:
        return {"uid": task}

    with pytest.raises(UsageError, match="line 1"):
        await run_batch("a", work, key=str, results=path)
    assert path.read_text() == "my notes\n"


async def test_a_dead_engine_ends_the_batch_and_cancels_the_others(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    cancelled: list[str] = []
    second_waits = asyncio.Event()

    async def work(task: str) -> dict[str, Any]:
        if task == "b":
            try:
                second_waits.set()
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(task)
                raise
        if task == "c":
            await second_waits.wait()
            raise EngineDied("gone")
        return {"uid": task}

    with pytest.raises(EngineDied):
        await run_batch("abc", work, key=str, results=path)
    assert cancelled == ["b"]
    assert [json.loads(line)["uid"] for line in path.read_text().splitlines()] == ["a"]


async def test_bad_use_is_told_before_anything_runs() -> None:
    async def work(task: str) -> dict[str, Any]:
        raise AssertionError("must not run")

    with pytest.raises(UsageError, match="concurrency"):
        await run_batch("a", work, key=str, concurrency=0)
    with pytest.raises(UsageError, match="unique"):
        await run_batch("aa", work, key=str)


async def test_a_record_without_its_key_is_a_usage_error() -> None:
    async def work(task: str) -> dict[str, Any]:
        return {"uid": "other"}

    with pytest.raises(UsageError, match="'a'"):
        await run_batch("a", work, key=str)


async def test_the_progress_bar_is_silent_on_a_pipe() -> None:
    async def work(task: str) -> dict[str, Any]:
        return {"uid": task}

    pipe = io.StringIO()
    await run_batch("abc", work, key=str, stream=pipe)
    assert pipe.getvalue() == ""


def test_adding_to_a_closed_file_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="open"):
        ResultsFile(tmp_path / "r.jsonl").add({"uid": "a"})


async def test_a_results_file_that_cannot_be_written_is_told_before_any_work(tmp_path: Path) -> None:
    async def work(task: str) -> dict[str, Any]:
        raise AssertionError("nothing may run")

    (tmp_path / "file").write_text("x")
    for path in (tmp_path, tmp_path / "file" / "results.jsonl"):
        with pytest.raises(UsageError, match=r"cannot keep results in .*nothing was run"):
            await run_batch(["a"], work, key=str, results=path)
