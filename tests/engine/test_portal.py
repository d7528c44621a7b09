"""The loop thread and the event buffer that the real engines share."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar

import pytest

from agentflow.engine._events_buffer import EventBuffer
from agentflow.engine._portal import Portal
from agentflow.errors import EngineClosed, UsageError
from agentflow.events import Event, WorkflowStarted

VALUE: ContextVar[str] = ContextVar("value", default="unset")


@pytest.fixture
def portal() -> AsyncGenerator[Portal, None]:
    made = Portal("test")
    yield made
    made.close()
    assert not made._thread.is_alive()


async def where() -> tuple[threading.Thread, str]:
    return threading.current_thread(), VALUE.get()


class Source:
    """An endless stream that notes how it ended."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    async def items(self, limit: int | None = None) -> AsyncGenerator[int, None]:
        n = 0
        try:
            while limit is None or n < limit:
                yield n
                n += 1
                await asyncio.sleep(0)
        finally:
            self.ended.set()


async def test_work_runs_on_the_portal_in_the_callers_context(portal: Portal) -> None:
    VALUE.set("mine")
    for thread, value in (portal.run(where()), await portal.arun(where())):
        assert thread is portal._thread
        assert value == "mine"


def test_loops_come_and_go(portal: Portal) -> None:
    assert asyncio.run(portal.arun(where()))[0] is portal._thread
    assert asyncio.run(portal.arun(where()))[0] is portal._thread


def test_many_callers_at_once(portal: Portal) -> None:
    async def double(n: int) -> int:
        await asyncio.sleep(0.001)
        return 2 * n

    with ThreadPoolExecutor(16) as threads:
        assert list(threads.map(lambda n: portal.run(double(n)), range(100))) == [2 * n for n in range(100)]


async def test_cancelling_the_caller_cancels_the_work(portal: Portal) -> None:
    begun, ended = threading.Event(), threading.Event()

    async def forever() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    task = asyncio.create_task(portal.arun(forever()))
    assert await asyncio.to_thread(begun.wait, 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(ended.wait, 10)


async def test_streams_end_and_carry_errors(portal: Portal) -> None:
    async def broken() -> AsyncGenerator[int, None]:
        yield 1
        raise KeyError("broken")

    assert list(portal.stream(Source().items(5))) == [0, 1, 2, 3, 4]
    assert [i async for i in portal.astream(Source().items(5))] == [0, 1, 2, 3, 4]
    with pytest.raises(KeyError, match="broken"):
        list(portal.stream(broken()))
    with pytest.raises(KeyError, match="broken"):
        [i async for i in portal.astream(broken())]


async def test_closing_a_stream_early_ends_its_source(portal: Portal) -> None:
    sync, asynchronous = Source(), Source()
    stream = portal.stream(sync.items())
    assert next(stream) == 0
    stream.close()
    assert await asyncio.to_thread(sync.ended.wait, 10)
    astream = portal.astream(asynchronous.items())
    assert await anext(astream) == 0
    await astream.aclose()
    assert await asyncio.to_thread(asynchronous.ended.wait, 10)


def test_a_stream_whose_loop_is_gone_ends(portal: Portal) -> None:
    source = Source()

    async def leave() -> None:
        async for _ in portal.astream(source.items()):
            return

    asyncio.run(leave())
    assert source.ended.wait(10)


def test_blocking_on_the_own_thread_is_refused(portal: Portal) -> None:
    async def inside() -> None:
        portal.run(where())

    with pytest.raises(UsageError, match="async twin"):
        portal.run(inside())


async def test_closing_fails_what_runs_and_what_comes(portal: Portal) -> None:
    begun = threading.Event()

    async def forever() -> None:
        begun.set()
        await asyncio.Event().wait()

    stream = portal.stream(Source().items())
    next(stream)
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(portal.run, forever())
        task = asyncio.create_task(portal.arun(forever()))
        assert await asyncio.to_thread(begun.wait, 10)
        portal.close()
        with pytest.raises(EngineClosed):
            waiting.result(10)
        with pytest.raises(EngineClosed):
            await task
    with pytest.raises(EngineClosed):
        list(stream)
    with pytest.raises(EngineClosed):
        portal.run(where())
    with pytest.raises(EngineClosed):
        await portal.arun(where())
    assert portal.spawn(where()) is False
    assert portal.call_soon(print) is False
    portal.close()


def test_work_that_ignores_its_cancellation_does_not_hang_its_caller(portal: Portal) -> None:
    begun = threading.Event()

    async def stubborn() -> None:
        while True:
            begun.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                continue

    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(portal.run, stubborn())
        assert begun.wait(10)
        portal.close()
        with pytest.raises(EngineClosed):
            waiting.result(10)


# -- events ----------------------------------------------------------------------------------------------------


def event(seq: int) -> Event:
    return WorkflowStarted(workflow="w", seq=seq)


class Sink:
    """Takes batches, and fails as long as ``broken`` is set."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.broken = False
        self.came = threading.Event()

    async def send(self, events: Sequence[Event]) -> None:
        self.came.set()
        if self.broken:
            raise ConnectionError("down")
        self.batches.append([e.seq for e in events])


def test_events_are_sent_soon_and_together(portal: Portal) -> None:
    sink = Sink()
    buffer = EventBuffer(portal, sink.send, delay=0.02)
    for i in range(10):
        buffer.put(event(i))
    assert sink.came.wait(10)
    portal.run(buffer.aflush())
    assert [i for b in sink.batches for i in b] == list(range(10))
    assert len(sink.batches) <= 2


def test_a_request_takes_events_along(portal: Portal) -> None:
    sink = Sink()
    buffer = EventBuffer(portal, sink.send, delay=60, batch=3)
    for i in range(5):
        buffer.put(event(i))
    taken = buffer.drain()
    assert [e.seq for e in taken] == [0, 1, 2]
    buffer.restore(taken)
    portal.run(buffer.aflush())
    assert sink.batches == [[0, 1, 2], [3, 4]]
    assert buffer.drain() == []


def test_events_that_could_not_be_sent_are_kept_in_order(portal: Portal) -> None:
    sink = Sink()
    sink.broken = True
    buffer = EventBuffer(portal, sink.send, delay=0.001)
    buffer.put(event(0))
    assert sink.came.wait(10)
    with pytest.raises(ConnectionError):
        portal.run(buffer.aflush())
    sink.broken = False
    buffer.put(event(1))
    portal.run(buffer.aflush())
    assert [i for b in sink.batches for i in b] == [0, 1]
    assert buffer.failed_sends >= 2
    assert buffer.dropped == 0


def test_the_buffer_is_bounded_and_cheap(portal: Portal) -> None:
    buffer = EventBuffer(portal, Sink().send, delay=60, limit=100)
    begun = time.perf_counter()
    for i in range(10_000):
        buffer.put(event(i))
    assert (time.perf_counter() - begun) / 10_000 < 100e-6
    assert len(buffer) == 100
    assert buffer.dropped == 9_900
    assert buffer.drain()[0].seq == 9_900
    portal.close()
    buffer.put(event(0))  # nobody is there to send it, and nothing is raised


def test_work_that_raises_an_interrupt_ends_alone(portal: Portal) -> None:
    async def interrupted(error: type[BaseException]) -> None:
        raise error

    async def fine() -> str:
        await asyncio.sleep(0.02)
        return "done"

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(portal.run, fine())
        for error in (KeyboardInterrupt, SystemExit):
            with pytest.raises(error):
                portal.run(interrupted(error))
        assert other.result(5) == "done"
    assert portal.run(fine()) == "done"
