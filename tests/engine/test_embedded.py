"""The embedded engine on a tiny random model: calls of every kind, from everywhere, and stopping them."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from agentflow.engine.base import Call, Chunk, Coordinates, EngineStats, Sampling, new_id
from agentflow.errors import (
    BadRequest,
    BadSampling,
    EmptyPrompt,
    EngineFailure,
    EngineTimeout,
    PromptTooLong,
    RealEngineForbidden,
    UsageError,
)
from agentflow.events import WorkflowEnded, WorkflowStarted

if TYPE_CHECKING:
    from agentflow.engine.embedded import EmbeddedEngine

LONG = Sampling(max_tokens=3000, ignore_eos=True)


def call(engine: EmbeddedEngine, text: str = "Tell me about foxes.", **fields: object) -> Call:
    fields.setdefault("sampling", Sampling(max_tokens=8, ignore_eos=True))
    return Call(token_ids=engine.tokenizer.encode(text), **fields)  # type: ignore[arg-type]


def wait_until_idle(engine: EmbeddedEngine, seconds: float = 5.0) -> EngineStats:
    """The engine's statistics once nothing runs in its scheduler or holds slots; fails after ``seconds``."""
    deadline = time.monotonic() + seconds
    while True:
        stats = engine.stats()
        assert stats.device_free + stats.device_cached + stats.device_held == stats.device_total or stats.running
        if stats.running == 0 and stats.waiting == 0 and stats.device_held == 0:
            return stats
        assert time.monotonic() < deadline, f"still running: {stats}"


def wait_until_running(engine: EmbeddedEngine, seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while engine.stats().running == 0:
        assert time.monotonic() < deadline, "the call never ran"


def test_a_call_reports_text_tokens_usage_and_time(engine: EmbeddedEngine) -> None:
    first = engine.generate(call(engine, "word " * 100))
    again = engine.generate(call(engine, "word " * 100))
    assert first.finish == "length"
    assert first.usage.completion_tokens == len(first.token_ids) == 8
    assert first.text == engine.tokenizer.decode(first.token_ids)
    assert first.usage.cached == 0
    assert again.usage.cached_device == again.usage.prompt_tokens - 1
    assert (again.text, again.token_ids) == (first.text, first.token_ids)
    assert 0 < first.timings.queue < first.timings.first_token < first.timings.total
    assert first.model == engine.model


async def test_a_stream_adds_up_to_the_answer(engine: EmbeddedEngine) -> None:
    whole = await engine.agenerate(call(engine))
    for chunks in ([c async for c in engine.astream(call(engine))], list(engine.stream(call(engine)))):
        assert len(chunks) > 1
        assert "".join(c.text for c in chunks) == whole.text
        assert sum((c.token_ids for c in chunks), ()) == whole.token_ids
        assert [c.completion is not None for c in chunks] == [False] * (len(chunks) - 1) + [True]
        completion = chunks[-1].completion
        assert completion is not None
        assert (completion.text, completion.token_ids) == (whole.text, whole.token_ids)
        assert completion.timings.first_token < completion.timings.total


def test_a_seed_repeats_a_sampled_answer(engine: EmbeddedEngine) -> None:
    def text(seed: int | None, **other: float) -> str:
        return engine.generate(call(engine, sampling=Sampling(max_tokens=12, temperature=1.0, seed=seed, **other))).text  # type: ignore[arg-type]

    assert text(7) == text(7) != text(8)
    assert text(7, top_p=0.9) == text(7, top_p=0.9)
    assert text(None) != text(None)


def test_stop_strings_and_grammars(engine: EmbeddedEngine) -> None:
    free = engine.generate(call(engine, sampling=Sampling(max_tokens=12, ignore_eos=True)))
    cut = free.text[len(free.text) // 2 :][:3]
    stopped = engine.generate(call(engine, sampling=Sampling(max_tokens=12, ignore_eos=True, stop=(cut,))))
    assert stopped.finish == "stop"
    assert stopped.text == free.text[: free.text.index(cut)]

    schema = {
        "type": "object",
        "properties": {"n": {"type": "boolean"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    answer = engine.generate(call(engine, sampling=Sampling(max_tokens=64, json_schema=schema)))
    assert isinstance(json.loads(answer.text)["n"], bool)
    assert engine.generate(call(engine, sampling=Sampling(regex="yes|no"))).text in ("yes", "no")


def test_forced_tokens_come_back_exactly(engine: EmbeddedEngine) -> None:
    tokens = tuple(engine.tokenizer.encode("These are the words that were recorded."))
    answer = engine.generate(call(engine, sampling=Sampling(max_tokens=len(tokens), forced_tokens=tokens)))
    assert answer.token_ids == tokens
    assert answer.text == engine.tokenizer.decode(tokens)


def test_calls_that_can_never_run_are_refused_before_they_are_sent(engine: EmbeddedEngine) -> None:
    with pytest.raises(EmptyPrompt):
        engine.generate(Call(token_ids=[]))
    with pytest.raises(PromptTooLong, match="pool of 4096"):
        engine.generate(Call(token_ids=[5] * 4090))
    with pytest.raises(PromptTooLong, match="context"):
        engine.generate(Call(token_ids=[5] * 9000))
    for wrong in ([10_000_000], [-1]):  # SGLang's scheduler would die of them
        with pytest.raises(BadRequest, match="token id"):
            engine.generate(Call(token_ids=wrong))
    with pytest.raises(BadSampling, match="top_p"):
        engine.generate(call(engine, sampling=Sampling(top_p=0.0)))


def test_what_only_the_engine_can_judge_is_a_bad_request_too(engine: EmbeddedEngine) -> None:
    with pytest.raises(BadRequest):
        engine.generate(call(engine, sampling=Sampling(regex="(unclosed")))
    with pytest.raises(BadRequest):
        list(engine.stream(call(engine, sampling=Sampling(regex="(unclosed"))))
    assert engine.generate(call(engine)).usage.completion_tokens == 8


async def test_sync_and_async_callers_from_many_threads_and_loops_at_once(engine: EmbeddedEngine) -> None:
    expected = {i: (await engine.agenerate(call(engine, f"Number {i} says"))).text for i in range(6)}

    def in_thread(i: int) -> str:
        return engine.generate(call(engine, f"Number {i} says")).text

    def in_other_loop(i: int) -> str:
        return asyncio.run(engine.agenerate(call(engine, f"Number {i} says"))).text

    with ThreadPoolExecutor(12) as pool:
        loop = asyncio.get_running_loop()
        work = [
            *(loop.run_in_executor(pool, in_thread, i) for i in range(6)),
            *(loop.run_in_executor(pool, in_other_loop, i) for i in range(6)),
        ]
        here = [
            c.text
            for c in await asyncio.gather(*(engine.agenerate(call(engine, f"Number {i} says")) for i in range(6)))
        ]
        texts = await asyncio.gather(*work)
    assert texts == [expected[i] for i in range(6)] * 2
    assert here == [expected[i] for i in range(6)]


def test_two_event_loops_one_after_the_other(engine: EmbeddedEngine) -> None:
    async def one() -> str:
        return (await engine.agenerate(call(engine))).text

    assert asyncio.run(one()) == asyncio.run(one())


async def test_blocking_twins_work_on_a_thread_with_a_running_loop(engine: EmbeddedEngine) -> None:
    # As in a notebook cell.
    assert engine.generate(call(engine)).text
    assert engine.stats().device_total == 4096


async def test_cancelling_the_caller_stops_the_work_and_frees_its_slots(engine: EmbeddedEngine) -> None:
    task = asyncio.create_task(engine.agenerate(call(engine, "cancel me " * 50, sampling=LONG)))
    await asyncio.to_thread(wait_until_running, engine)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    stats = await asyncio.to_thread(wait_until_idle, engine, 1.0)
    assert stats.device_cached < 2000


async def test_cancelling_at_once_stops_a_call_that_has_hardly_begun(engine: EmbeddedEngine) -> None:
    for delay in (0.0, 0.001, 0.005):
        task = asyncio.create_task(engine.agenerate(call(engine, "soon gone " * 300, sampling=LONG)))
        await asyncio.sleep(delay)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await asyncio.to_thread(wait_until_idle, engine, 1.0)


async def test_leaving_a_stream_early_stops_the_work(engine: EmbeddedEngine) -> None:
    stream: AsyncIterator[Chunk] = engine.astream(call(engine, sampling=LONG))
    async for _ in stream:
        break
    await stream.aclose()  # type: ignore[attr-defined]
    await asyncio.to_thread(wait_until_idle, engine, 1.0)

    blocking = engine.stream(call(engine, sampling=LONG))
    next(blocking)
    blocking.close()  # type: ignore[attr-defined]
    await asyncio.to_thread(wait_until_idle, engine, 1.0)


def test_abort_gives_the_caller_what_was_made_so_far(engine: EmbeddedEngine) -> None:
    long = call(engine, sampling=LONG)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(engine.generate, long)
        wait_until_running(engine)
        engine.abort(long.request_id)
        completion = answer.result(10)
    assert completion.finish == "abort"
    assert completion.usage.completion_tokens < 3000
    wait_until_idle(engine, 1.0)
    engine.abort("nobody")  # unknown ids are nothing


@pytest.mark.parametrize("how", ["sync", "async", "stream"])
def test_a_time_limit_fires(engine: EmbeddedEngine, how: str) -> None:
    limited = call(engine, sampling=LONG, time_limit=0.3)
    begun = time.monotonic()
    ways = {
        "sync": lambda: engine.generate(limited),
        "async": lambda: asyncio.run(engine.agenerate(limited)),
        "stream": lambda: list(engine.stream(limited)),
    }
    with pytest.raises(EngineTimeout, match=r"0\.3 seconds"):
        ways[how]()
    assert time.monotonic() - begun < 2.0
    wait_until_idle(engine, 1.0)


def test_ids_that_would_abort_each_other_are_refused(engine: EmbeddedEngine) -> None:
    long = call(engine, sampling=LONG, request_id="job-1")
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(engine.generate, long)
        wait_until_running(engine)
        with pytest.raises(BadRequest, match="job-1"):
            engine.generate(call(engine, request_id="job-12"))
        with pytest.raises(BadRequest, match="make a new Call"):
            engine.generate(long)
        engine.abort("job-1")
        assert running.result(10).finish == "abort"
    assert engine.generate(call(engine, request_id="job-1")).finish == "length"


def test_events_reach_the_scheduler_with_and_without_a_call(engine: EmbeddedEngine) -> None:
    engine.emit(WorkflowStarted(workflow="w1", seq=1))
    engine.flush()
    assert engine.stats().workflows_live == 1
    engine.emit(WorkflowStarted(workflow="w2", seq=1))
    engine.generate(call(engine, at=Coordinates(workflow="w2", agent="planner", step=0)))
    assert engine.stats().workflows_live == 2
    for name in ("w1", "w2"):
        engine.emit(WorkflowEnded(workflow=name, seq=2))
    deadline = time.monotonic() + 2.0
    while engine.stats().workflows_live:  # nobody flushes: they go by themselves
        assert time.monotonic() < deadline


def test_policies_change_without_a_restart(engine: EmbeddedEngine) -> None:
    engine.generate(call(engine))
    engine.configure(policies=["lru"], reset=True)
    stats = engine.stats()
    assert stats.policy == "lru"
    assert stats.device_free == stats.device_total == 4096
    with pytest.raises(UsageError, match="nonsense"):
        engine.configure(policies=["nonsense"])
    with pytest.raises(EngineFailure, match=r"no\.such"):
        engine.configure(policies=["no.such:Policy"])
    assert engine.stats().policy == "lru"
    assert engine.policies == ("lru",)


def test_host_tier_serves_what_the_device_evicted(engine: EmbeddedEngine) -> None:
    prompts = [Call(token_ids=[1000 + i, *range(2000, 2999)], sampling=Sampling(max_tokens=1)) for i in range(6)]
    for prompt in prompts:  # 6,000 tokens: more than the device pool, less than the host tier
        engine.generate(prompt)
    again = engine.generate(replace(prompts[0], request_id=new_id("call")))
    assert again.usage.cached_host > 900


async def test_health(engine: EmbeddedEngine) -> None:
    for health in (engine.health(), await engine.ahealth()):
        assert health.alive
        assert health.round_trip is not None
        assert health.round_trip < 1.0
        assert len(health.children) == 2


def test_the_switch_that_forbids_real_engines_holds(engine: EmbeddedEngine) -> None:
    from agentflow.engine.guard import forbid_real_engines

    with forbid_real_engines(), pytest.raises(RealEngineForbidden):
        engine.generate(call(engine))


def test_emitting_never_waits(engine: EmbeddedEngine) -> None:
    begun = time.perf_counter()
    for i in range(1000):
        engine.emit(WorkflowStarted(workflow=f"quick-{i}", seq=1))
    assert (time.perf_counter() - begun) / 1000 < 0.001
    engine.flush()


def test_a_thread_that_ends_does_not_take_the_engine_along(engine: EmbeddedEngine) -> None:
    answers: list[str] = []
    thread = threading.Thread(target=lambda: answers.append(engine.generate(call(engine)).text))
    thread.start()
    thread.join(30)
    assert answers == [engine.generate(call(engine)).text]
