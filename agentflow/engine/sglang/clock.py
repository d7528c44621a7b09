"""Time that all ranks of a tensor-parallel engine agree on."""

from __future__ import annotations

__all__ = ["StreamClock"]


class StreamClock:
    """Seconds as told by the newest event or call.

    Ranks must take the same decisions, so they must not look at their own clocks: every rank sees the same
    stream of requests, and takes the time that the framework wrote on it. It never goes back.
    """

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        return self._now

    def advance(self, time: float) -> None:
        """Note a time stamp from the stream."""
        if time > self._now:
            self._now = time
