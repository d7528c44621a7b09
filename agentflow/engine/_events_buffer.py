"""Events on their way from any thread to the engine: kept in order, bounded, sent within milliseconds."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from agentflow.engine._portal import Portal
from agentflow.events import Event

__all__ = ["EventBuffer"]


class EventBuffer:
    """Holds events until the next request takes them along (:meth:`drain`) or ``delay`` seconds have passed.

    ``send`` runs on the portal's loop and delivers one batch; when it raises, the batch goes back to the
    front and is sent with the events that follow. Beyond ``limit`` events the oldest are dropped and counted
    in ``dropped``; failed sends are counted in ``failed_sends``. :meth:`put` costs a few microseconds, never
    blocks on the network and never raises.
    """

    def __init__(
        self,
        portal: Portal,
        send: Callable[[Sequence[Event]], Awaitable[None]],
        *,
        delay: float = 0.02,
        limit: int = 8192,
        batch: int = 512,
    ) -> None:
        self.dropped = 0
        self.failed_sends = 0
        self._portal = portal
        self._send = send
        self._delay = delay
        self._limit = limit
        self._batch = batch
        self._events: deque[Event] = deque()
        self._armed = False
        self._lock = threading.Lock()
        self._sending = asyncio.Lock()

    def __len__(self) -> int:
        return len(self._events)

    def put(self, event: Event) -> None:
        """Add an event, and see to it that it is sent soon."""
        with self._lock:
            self._events.append(event)
            self._trim()
            arm = not self._armed
            self._armed = True
        if arm:
            self._portal.call_soon(self._arm)

    def drain(self) -> list[Event]:
        """Take the oldest events out, at most one batch, for a request that carries them."""
        with self._lock:
            return [self._events.popleft() for _ in range(min(self._batch, len(self._events)))]

    def restore(self, events: Sequence[Event]) -> None:
        """Put events back that :meth:`drain` gave and that could not be delivered."""
        with self._lock:
            self._events.extendleft(reversed(events))
            self._trim()

    async def aflush(self) -> None:
        """Send all that is held, on the portal's loop. Raises what ``send`` raises."""
        async with self._sending:
            while events := self.drain():
                try:
                    await self._send(events)
                except BaseException:
                    self.failed_sends += 1
                    self.restore(events)
                    raise

    def _trim(self) -> None:
        while len(self._events) > self._limit:
            self._events.popleft()
            self.dropped += 1

    def _arm(self) -> None:
        self._portal.loop.call_later(self._delay, self._fire)

    def _fire(self) -> None:
        with self._lock:
            self._armed = False
            if not self._events:
                return
        self._portal.spawn(self._flush_quietly())

    async def _flush_quietly(self) -> None:
        # A batch that could not be sent stays in the buffer, counted; the next event tries again.
        try:
            await self.aflush()
        except Exception:
            return
