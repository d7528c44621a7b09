"""Blocking functions on daemon threads: never on the event loop, and never in the way of the interpreter's exit."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Callable
from contextvars import copy_context
from typing import Any, TypeVar

__all__ = ["abandoned", "in_thread"]

T = TypeVar("T")

_lock = threading.Lock()
_abandoned = 0
_numbers = itertools.count(1)


def abandoned() -> int:
    """Threads of this process whose caller has gone (time limit, cancelling) while their function still runs."""
    return _abandoned


async def in_thread(function: Callable[[], T]) -> T:
    """Run ``function`` on a thread of its own, in a copy of this context, and await its result.

    A thread cannot be killed: when the caller is cancelled, the thread is left to itself, counted by
    :func:`abandoned` until its function returns, and its result is dropped.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    call = _Call(function, loop, future)
    threading.Thread(target=copy_context().run, args=(call.main,), name=f"tool-{next(_numbers)}", daemon=True).start()
    try:
        return await future
    except asyncio.CancelledError:
        if not future.done() or future.cancelled():
            call.abandon()
        raise


class _Call:
    def __init__(
        self, function: Callable[[], Any], loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any]
    ) -> None:
        self._function = function
        self._loop = loop
        self._future = future
        self._finished = False
        self._left = False

    def main(self) -> None:
        result: Any = None
        error: BaseException | None = None
        try:
            result = self._function()
        except StopIteration as stop:  # a future cannot carry it
            error = RuntimeError(f"StopIteration: {stop.value!r}")
        except BaseException as caught:
            error = caught
        self._finish()
        with contextlib.suppress(RuntimeError):  # the caller's loop is closed
            self._loop.call_soon_threadsafe(self._deliver, result, error)

    def abandon(self) -> None:
        global _abandoned
        with _lock:
            if not self._finished:
                self._left = True
                _abandoned += 1

    def _finish(self) -> None:
        global _abandoned
        with _lock:
            self._finished = True
            if self._left:
                _abandoned -= 1

    def _deliver(self, result: Any, error: BaseException | None) -> None:
        if self._future.done():
            return
        if error is None:
            self._future.set_result(result)
        else:
            self._future.set_exception(error)
