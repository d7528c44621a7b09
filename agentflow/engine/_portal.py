"""A thread with an event loop, so that one async implementation serves sync and async callers of any thread.

An engine writes its work once, as coroutines that run on the portal's loop. Callers come from scripts,
threads, other event loops, or several loops one after another; none of them owns the engine's connections.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import queue
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

from agentflow.errors import EngineClosed, UsageError

__all__ = ["Portal"]

T = TypeVar("T")
log = logging.getLogger("agentflow.engine")


def _engine_closed() -> Exception:
    return EngineClosed("the engine was closed; make a new one to go on")


class Portal:
    """A daemon thread running one event loop.

    Coroutines given to it run there, in the context variables of their caller. :meth:`close` cancels what
    still runs, then awaits ``cleanup()``; callers then get ``closed_error()``, as does every later call.
    """

    def __init__(
        self,
        name: str = "agentflow",
        *,
        cleanup: Callable[[], Awaitable[None]] | None = None,
        closed_error: Callable[[], Exception] = _engine_closed,
    ) -> None:
        self.loop = asyncio.new_event_loop()
        self._cleanup = cleanup
        self._closed_error = closed_error
        self._closed = False
        self._lock = threading.Lock()
        self._background: set[asyncio.Task[Any]] = set()
        self._futures: set[concurrent.futures.Future[Any]] = set()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed

    def owns_current_thread(self) -> bool:
        """Whether the caller runs on the portal's own thread, where blocking on it would never end."""
        return threading.current_thread() is self._thread

    def run(self, coro: Coroutine[Any, Any, T]) -> T:
        """Run ``coro`` and block until it is done. Interrupting the wait (Ctrl-C) cancels it."""
        if self.owns_current_thread():
            coro.close()
            raise UsageError("a blocking engine call was made from the engine's own thread; await the async twin there")
        future = self._submit(coro)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def arun(self, coro: Coroutine[Any, Any, T]) -> T:
        """Run ``coro`` on the portal and await it from any loop. Cancelling the caller cancels it."""
        if self.owns_current_thread():
            return await coro
        return await asyncio.wrap_future(self._submit(coro))

    def stream(self, source: AsyncGenerator[T, None]) -> Generator[T, None, None]:
        """Items of ``source`` as a blocking iterator; closing it early cancels ``source``.

        Items that the consumer has not taken yet are kept, so ``source`` must be finite.
        """
        if self.owns_current_thread():
            raise UsageError("a blocking engine stream was opened on the engine's own thread; use the async twin there")
        items: queue.SimpleQueue[_Item[T]] = queue.SimpleQueue()
        future = self._submit(_pump(source, items.put))
        future.add_done_callback(lambda f: items.put(_end(f)))
        try:
            while True:
                item = items.get()
                if item.error is not None:
                    raise item.error
                if item.last:
                    return
                yield item.value
        finally:
            future.cancel()

    async def astream(self, source: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
        """Items of ``source`` for a caller on any loop; closing it early cancels ``source``."""
        if self.owns_current_thread():
            async with contextlib.aclosing(source):
                async for value in source:
                    yield value
            return
        loop = asyncio.get_running_loop()
        items: asyncio.Queue[_Item[T]] = asyncio.Queue()

        def put(item: _Item[T]) -> None:
            # RuntimeError: the caller's loop is gone, and nobody is left to read.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(items.put_nowait, item)

        future = self._submit(_pump(source, put))
        future.add_done_callback(lambda f: put(_end(f)))
        try:
            while True:
                item = await items.get()
                if item.error is not None:
                    raise item.error
                if item.last:
                    return
                yield item.value
        finally:
            future.cancel()

    def spawn(self, coro: Coroutine[Any, Any, Any]) -> bool:
        """Run ``coro`` in the background; a failure is logged. False, and nothing is run, once closed."""

        def start() -> None:
            task = self.loop.create_task(coro)
            self._background.add(task)
            task.add_done_callback(self._background_done)

        if self.call_soon(start):
            return True
        coro.close()
        return False

    def call_soon(self, function: Callable[..., object], *args: Any) -> bool:
        """Call ``function(*args)`` on the portal's thread, from any thread. False once closed; never raises."""
        with self._lock:
            if self._closed:
                return False
            self.loop.call_soon_threadsafe(function, *args)
            return True

    def close(self, time_limit: float = 5.0) -> None:
        """Cancel everything, then end the thread, waiting up to ``time_limit`` seconds. Twice is fine."""
        with self._lock:
            first = not self._closed
            self._closed = True
        if first:
            self.loop.call_soon_threadsafe(self.loop.stop)
        if not self.owns_current_thread():
            self._thread.join(time_limit)

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            while not self._closed:
                try:
                    self.loop.run_forever()
                except (KeyboardInterrupt, SystemExit) as error:
                    # Work raised it: asyncio lets it through the loop as well as to whoever awaits the work.
                    log.debug("work on the thread %r raised %r; the others go on", self._thread.name, error)
            self.loop.run_until_complete(self._end())
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        finally:
            asyncio.set_event_loop(None)
            self.loop.close()
            for future in list(self._futures):  # work that ignored its cancellation: its callers must not hang
                with contextlib.suppress(concurrent.futures.InvalidStateError):
                    future.set_exception(self._closed_error())

    async def _end(self) -> None:
        tasks = [t for t in asyncio.all_tasks(self.loop) if t is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=3.0)
        if self._cleanup is not None:
            try:
                async with asyncio.timeout(1.0):
                    await self._cleanup()
            except Exception as error:
                log.warning("cleaning up after the engine failed: %s", error)

    def _submit(self, coro: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        with self._lock:
            if not self._closed:
                future = asyncio.run_coroutine_threadsafe(self._guarded(coro), self.loop)
                self._futures.add(future)
                future.add_done_callback(self._futures.discard)
                return future
        coro.close()
        raise self._closed_error()

    async def _guarded(self, coro: Coroutine[Any, Any, T]) -> T:
        try:
            return await coro
        except asyncio.CancelledError:
            if self._closed:
                raise self._closed_error() from None
            raise

    def _background_done(self, task: asyncio.Task[Any]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("background work of the engine failed: %s", error, exc_info=error)


class _Item(Generic[T]):
    __slots__ = ("error", "last", "value")

    def __init__(self, value: Any = None, *, error: BaseException | None = None, last: bool = False) -> None:
        self.value: T = value
        self.error = error
        self.last = last


async def _pump(source: AsyncGenerator[T, None], put: Callable[[_Item[T]], None]) -> None:
    async with contextlib.aclosing(source):
        async for value in source:
            put(_Item(value))


def _end(future: concurrent.futures.Future[None]) -> _Item[Any]:
    if future.cancelled():
        return _Item(last=True)
    return _Item(error=future.exception(), last=True)
