"""A cap on how much runs at once that holds across threads and event loops."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar

from agentflow.errors import UsageError

__all__ = ["Slots"]

#: Slots held by the code that runs in this context; calls made inside it do not wait for them again.
_held: ContextVar[frozenset[Slots]] = ContextVar("agentflow_slots_held", default=frozenset())


class Slots:
    """At most ``limit`` holders at once, served in the order in which they came. Holding is O(1).

    Unlike ``asyncio.Semaphore`` it may be shared by several event loops. Code that holds a slot and asks for the
    same slots again (a tool that runs an agent with the same tools) gets through at once, since waiting
    for itself would never end.
    """

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise UsageError(f"concurrency must be at least 1, got {limit}")
        self.limit = limit
        self._free = limit
        self._lock = threading.Lock()
        self._waiting: deque[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """Hold a slot inside the block, waiting for a free one first."""
        if self in _held.get():
            yield
            return
        await self._acquire()
        token = _held.set(_held.get() | {self})
        try:
            yield
        finally:
            _held.reset(token)
            self._release()

    async def _acquire(self) -> None:
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._free > 0:
                self._free -= 1
                return
            entry = (loop, loop.create_future())
            self._waiting.append(entry)
        try:
            await entry[1]
        except asyncio.CancelledError:
            with self._lock:
                granted = entry not in self._waiting
                if not granted:
                    self._waiting.remove(entry)
            if granted:
                self._release()
            raise

    def _release(self) -> None:
        with self._lock:
            while self._waiting:
                loop, future = self._waiting.popleft()
                try:
                    loop.call_soon_threadsafe(_grant, future)
                except RuntimeError:  # that loop was closed with the holder still waiting
                    continue
                return
            self._free += 1


def _grant(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
