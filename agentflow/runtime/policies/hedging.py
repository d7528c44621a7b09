"""Hedging: a call that takes longer than most gets a second try, and the first answer wins.

After "The Tail at Scale" (Dean and Barroso, 2013): the second try waits until the first has outlasted a high
percentile of what such calls took lately, so that it costs little, and cuts the long tail.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_left, insort
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import ClassVar

from agentflow.cache.ledger import Ledger
from agentflow.errors import UsageError
from agentflow.runtime.guards import Done, Guard, Proceed, Work

__all__ = ["Hedging"]

logger = logging.getLogger("agentflow.runtime")

#: Tools and agents whose durations are remembered, the longest unused forgotten first.
_NAMES = 256


class Durations:
    """The last ``window`` durations, kept sorted. O(window) memory moves, O(log window) comparisons."""

    def __init__(self, window: int) -> None:
        self._recent: deque[float] = deque(maxlen=window)
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._sorted)

    def add(self, seconds: float) -> None:
        """Take in a duration, and forget the oldest beyond the window."""
        if len(self._recent) == self._recent.maxlen:
            old = self._recent[0]
            del self._sorted[bisect_left(self._sorted, old)]
        self._recent.append(seconds)
        insort(self._sorted, seconds)

    def percentile(self, share: float) -> float:
        """The duration that a ``share`` of those remembered do not exceed."""
        return self._sorted[min(len(self._sorted) - 1, int(share * len(self._sorted)))]


class Hedging(Guard):
    """Gives slow pure tool calls, and with ``models`` model calls, a second try after the learned ``percentile``.

    Nothing is hedged before ``min_samples`` durations of a tool are known, nor when second tries would be more
    than ``max_share`` of its calls. ``min_delay`` in seconds is the least wait. Tools that are not declared pure are
    never tried twice. A failed first answer counts only when the other try fails too. The slower try is cancelled, and
    the answer does not wait until it is.
    """

    name: ClassVar[str] = "hedging"
    precedence: ClassVar[int] = 40

    def __init__(
        self,
        ledger: Ledger,
        clock: Callable[[], float],
        *,
        percentile: float = 0.95,
        min_samples: int = 20,
        window: int = 256,
        max_share: float = 0.1,
        min_delay: float = 0.005,
        models: bool = False,
    ) -> None:
        super().__init__(ledger, clock)
        if not 0 < percentile < 1 or not 0 < max_share <= 1 or min_samples < 1 or window < min_samples or min_delay < 0:
            raise UsageError(
                "hedging: percentile must be between 0 and 1, max_share above 0 and at most 1, window at least"
                " min_samples, min_samples at least 1"
            )
        self.percentile = percentile
        self.min_samples = min_samples
        self.window = window
        self.max_share = max_share
        self.min_delay = min_delay
        self.models = models
        self._durations: OrderedDict[tuple[str, str], Durations] = OrderedDict()
        self._calls: Counter[tuple[str, str]] = Counter()
        self._tries: Counter[tuple[str, str]] = Counter()
        self._counts: Counter[str] = Counter()
        #: Slower tries that are being cancelled: a task that nobody refers to may vanish before it has cleaned up.
        self._late: set[asyncio.Future[Done]] = set()

    async def around(self, work: Work, proceed: Proceed) -> Done:
        if not work.pure or (work.kind == "model" and not self.models):
            return await proceed()
        name = (work.kind, work.name)
        with self.lock:
            self._calls[name] += 1
            delay = self.delay(*name)
        begun = self.clock()
        first = asyncio.ensure_future(proceed())
        tries: set[asyncio.Future[Done]] = {first}
        try:
            if delay is not None:
                await asyncio.wait(tries, timeout=delay)
                if not first.done() and self._may(name):
                    self._tries[name] += 1
                    self._counts["second_tries"] += 1
                    tries.add(asyncio.ensure_future(proceed()))
            return await self._best(first, tries)
        except asyncio.CancelledError:  # the call itself is stopped, and its tries with it
            for task in tries:
                task.cancel()
            await asyncio.gather(*tries, return_exceptions=True)
            raise
        finally:
            # What the first try alone would have taken is not known when the second won: the time until now is a
            # lower bound, and still at the slow end.
            with self.lock:
                self._learn(name, self.clock() - begun)
            for task in tries:
                if not task.done():
                    self._leave(task)

    def delay(self, kind: str, name: str) -> float | None:
        """Seconds after which a call gets a second try; None while too little is known."""
        durations = self._durations.get((kind, name))
        if durations is None or len(durations) < self.min_samples:
            return None
        return max(self.min_delay, durations.percentile(self.percentile))

    def stats(self) -> Mapping[str, float]:
        return {"calls": sum(self._calls.values()), **self._counts}

    def _leave(self, task: asyncio.Future[Done]) -> None:
        """Cancel a try that nobody waits for any more."""
        self._counts["cancelled"] += 1
        self._late.add(task)
        task.add_done_callback(self._gone)
        task.cancel()

    def _gone(self, task: asyncio.Future[Done]) -> None:
        self._late.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning("hedging: the slower try failed when it was cancelled: %r", error)

    async def _best(self, first: asyncio.Future[Done], tries: set[asyncio.Future[Done]]) -> Done:
        """The first good answer, or the failure of the try that ended last."""
        waiting = set(tries)
        while True:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            good = [t for t in done if not t.cancelled() and t.exception() is None and t.result().ok]
            if good:
                won = first if first in good else good[0]
                if won is not first:
                    self._counts["second_won"] += 1
                return won.result()
            if not waiting:
                return (first if first in done else done.pop()).result()

    def _may(self, name: tuple[str, str]) -> bool:
        return self._tries[name] + 1 <= max(1.0, self.max_share * self._calls[name])

    def _learn(self, name: tuple[str, str], seconds: float) -> None:
        durations = self._durations.get(name)
        if durations is None:
            durations = self._durations[name] = Durations(self.window)
            if len(self._durations) > _NAMES:
                gone, _ = self._durations.popitem(last=False)
                self._calls.pop(gone, None)
                self._tries.pop(gone, None)
        self._durations.move_to_end(name)
        durations.add(seconds)
