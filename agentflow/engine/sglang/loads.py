"""How long loads from the host tier take, as measured."""

from __future__ import annotations

from collections import deque
from typing import Any

__all__ = ["LoadTimes"]

#: Loads remembered.
_WINDOW = 64


class LoadTimes:
    """Tokens and seconds of the newest loads. All operations are O(1)."""

    def __init__(self) -> None:
        self._loads: deque[tuple[int, float]] = deque()
        self._tokens = 0
        self._seconds = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """A load of ``tokens`` tokens took ``seconds``."""
        if tokens < 1 or not 0.0 < seconds < 1e4:
            return
        self._loads.append((tokens, seconds))
        self._tokens += tokens
        self._seconds += seconds
        if len(self._loads) > _WINDOW:
            tokens, seconds = self._loads.popleft()
            self._tokens -= tokens
            self._seconds -= seconds

    def seconds(self, tokens: int) -> float:
        """Seconds that the load of ``tokens`` tokens took, at the mean rate of late; 0.0 before the first."""
        return tokens * max(0.0, self._seconds) / self._tokens if self._tokens else 0.0

    def started(self, ack: Any, seconds: float) -> None:
        """SGLang started the load that ``ack`` (its ``HiCacheAck``) stands for, in a call of ``seconds``.

        Where its events tell no times, as on a CPU, the load was done when the call returned.
        """
        if not ack.timing_enabled:
            self.add(ack.num_tokens, seconds)

    def done(self, ack: Any) -> None:
        """SGLang found the load that ``ack`` stands for finished."""
        if ack.timing_enabled:
            self.add(ack.num_tokens, ack.start_event.elapsed_time(ack.finish_event) / 1e3)
