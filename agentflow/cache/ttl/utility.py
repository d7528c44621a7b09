"""What a kept prefix is worth and what keeping it costs, from what this engine was seen to do."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from agentflow.cache.policy import CallFinished

__all__ = ["Memorability", "MissCost", "QueueingDelay"]


class Memorability:
    """eta: how strongly the steps that a program has left are told by those it has made.

    eta = -corr(k, N - k) over the steps k = 1..N of the newest ``window`` finished programs of N steps each:
    1 when all have the same length, near 0 when the past says nothing, below 0 when long ones get longer. Both
    operations are O(1).
    """

    def __init__(self, window: int = 256, *, enough: int = 1) -> None:
        self._programs: deque[int] = deque()
        self._window = window
        self._enough = enough
        # Sums over all pairs: how many, of k, of N - k, of their squares, of their products. Integers: exact.
        self._sums = [0, 0, 0, 0, 0, 0]

    def __len__(self) -> int:
        return len(self._programs)

    def finished(self, steps: int) -> None:
        """A program finished after ``steps`` steps."""
        if steps < 1:
            return
        self._programs.append(steps)
        self._count(steps, 1)
        if len(self._programs) > self._window:
            self._count(self._programs.popleft(), -1)

    def eta(self) -> float:
        """The correlation with its sign turned; 1.0 while too few programs are known or it has no meaning."""
        n, k, rest, k2, rest2, cross = self._sums
        if len(self._programs) < self._enough or not n:
            return 1.0
        spread = (n * k2 - k * k) * (n * rest2 - rest * rest)
        if spread <= 0:
            return 1.0
        return float(-(n * cross - k * rest) / spread**0.5)

    def _count(self, steps: int, sign: int) -> None:
        n = steps
        k, rest = n * (n + 1) // 2, n * (n - 1) // 2
        k2 = n * (n + 1) * (2 * n + 1) // 6
        rest2 = (n - 1) * n * (2 * n - 1) // 6
        for place, value in enumerate((n, k, rest, k2, rest2, n * k - k2)):
            self._sums[place] += sign * value


class QueueingDelay:
    """T: mean time that the newest ``window`` requests waited whose KV had been evicted, in seconds."""

    def __init__(self, window: int = 128) -> None:
        self._delays: deque[float] = deque(maxlen=window)
        self._sum = 0.0

    def __len__(self) -> int:
        return len(self._delays)

    def add(self, seconds: float) -> None:
        """A request whose KV had been evicted waited that long."""
        if not 0.0 <= seconds < 1e9:
            return
        delays = self._delays
        if len(delays) == delays.maxlen:
            self._sum -= delays[0]
        delays.append(seconds)
        self._sum += seconds

    def mean(self) -> float:
        """The sliding mean; 0.0 before the first."""
        return max(0.0, self._sum / len(self._delays)) if self._delays else 0.0


class _Measured(NamedTuple):
    computed: int
    prefill: float
    loaded: int
    reload: float
    lost: int
    found: int


class MissCost:
    """Time to get a lost prefix back, by prefill or by reload from the host, as measured over a window of calls.

    Time per token is taken as constant. A token that left the device is found on the host with the share
    seen so far (none before the first loss, 0 without a host tier). ``prefill`` and ``reload`` are seconds per
    token until the engine reports its own.
    """

    def __init__(self, *, prefill: float = 2e-4, reload: float = 2e-5, window: int = 256) -> None:
        self.prior_prefill = prefill
        self.prior_reload = reload
        self._window = window
        self._calls: deque[_Measured] = deque()
        self._sums = [0, 0.0, 0, 0.0, 0, 0]

    def __len__(self) -> int:
        return len(self._calls)

    def finished(self, call: CallFinished, *, expected: int) -> None:
        """Learn from a call whose thread had left ``expected`` tokens of its prompt behind before. O(1)."""
        device = call.cached_tokens - call.host_tokens
        lost = max(0, min(expected, call.tokens) - device)
        found = min(lost, call.host_tokens)
        timed = call.prefill_seconds > 0.0
        loaded = call.host_tokens if call.reload_seconds > 0.0 else 0
        measured = _Measured(
            max(0, call.tokens - call.cached_tokens) if timed else 0,
            call.prefill_seconds if timed else 0.0,
            loaded,
            call.reload_seconds if loaded else 0.0,
            lost,
            found,
        )
        if not any(measured):
            return
        self._calls.append(measured)
        self._count(measured, 1)
        if len(self._calls) > self._window:
            self._count(self._calls.popleft(), -1)

    @property
    def prefill_rate(self) -> float:
        """Seconds to compute one token of a prompt."""
        return self._sums[1] / self._sums[0] if self._sums[0] >= 64 else self.prior_prefill

    @property
    def reload_rate(self) -> float:
        """Seconds to load one token from the host."""
        return self._sums[3] / self._sums[2] if self._sums[2] >= 64 else self.prior_reload

    @property
    def on_host(self) -> float:
        """Share of the tokens lost from the device that were still on the host."""
        return min(1.0, self._sums[5] / self._sums[4]) if self._sums[4] else 0.0

    def seconds(self, tokens: int) -> float:
        """Expected time to get ``tokens`` tokens back."""
        share = self.on_host
        return tokens * (share * min(self.reload_rate, self.prefill_rate) + (1.0 - share) * self.prefill_rate)

    def _count(self, measured: _Measured, sign: int) -> None:
        for place, value in enumerate(measured):
            self._sums[place] += sign * value
        if not self._sums[0]:
            self._sums[1] = 0.0
        if not self._sums[2]:
            self._sums[3] = 0.0
