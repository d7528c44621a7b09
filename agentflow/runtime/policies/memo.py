"""Memoization of tool results: what a pure tool answered is given again to whoever asks the same.

A result is kept under its tool, its arguments and its tenant, for ``ttl`` seconds; whoever asks gets a copy of its own.
When room is needed, the result goes whose reuse is worth least: GreedyDual-Size-Frequency (Cherkasova 1998), with the
tool's own learned share of calls that repeat an earlier one as the expected number of uses of a result not used yet.
"""

from __future__ import annotations

import copy
import heapq
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from agentflow.cache.ledger import Ledger
from agentflow.errors import UsageError
from agentflow.runtime.guards import Done, Guard, Proceed, Work

__all__ = ["Memo"]

_Key = tuple[str | None, str, str]
#: Tools of which the share of repeated calls is remembered.
_TOOLS = 1_024


@dataclass(slots=True)
class _Kept:
    done: Done
    since: float
    until: float
    uses: int = 0
    value: float = 0.0


class Memo(Guard):
    """Answers pure tool calls from memory. Never an error, never another tenant's result, never an expired one.

    ``ttl`` is how long a result may be given, in seconds; ``ttls`` says otherwise for single tools (0: never).
    ``max_bytes`` bounds the results kept together, ``max_entry`` one of them, ``max_entries`` their number.
    Looking up costs O(1), keeping O(log n).
    """

    name: ClassVar[str] = "memo"
    precedence: ClassVar[int] = 20

    def __init__(
        self,
        ledger: Ledger,
        clock: Callable[[], float],
        *,
        ttl: float = 300.0,
        ttls: Mapping[str, float] | None = None,
        max_bytes: int = 16_000_000,
        max_entry: int = 1_000_000,
        max_entries: int = 10_000,
    ) -> None:
        super().__init__(ledger, clock)
        if ttl < 0 or min((ttls or {}).values(), default=0.0) < 0 or min(max_bytes, max_entry, max_entries) < 1:
            raise UsageError("memo: ttl must not be negative, max_bytes, max_entry and max_entries at least 1")
        self.ttl = ttl
        self.ttls = dict(ttls or {})
        self.max_bytes = max_bytes
        self.max_entry = max_entry
        self.max_entries = max_entries
        self.bytes = 0
        self._kept: dict[_Key, _Kept] = {}
        self._heap: list[tuple[float, int, _Key]] = []
        self._pushes = 0
        self._floor = 0.0
        self._latest = -math.inf
        self._asked: OrderedDict[str, list[int]] = OrderedDict()
        self._counts: Counter[str] = Counter()
        self._saved = 0.0

    async def around(self, work: Work, proceed: Proceed) -> Done:
        if work.kind != "tool" or not work.pure or not work.key:
            return await proceed()
        key = (work.tenant, work.name, work.key)
        with self.lock:
            asked_at = self._time()
            found = self._find(key, asked_at)
        if found is not None:
            return Done(value=copy.deepcopy(found.value), keep=True, size=found.size, source="memo")
        done = await proceed()
        if done.ok and done.keep and done.size <= self.max_entry:
            try:
                mine = replace(done, value=copy.deepcopy(done.value))
            except Exception:  # what cannot be copied would be shared
                return done
            with self.lock:
                self._keep(key, mine, asked_at)
        return done

    def reuse(self, tool: str) -> float:
        """Learned share of a tool's calls that repeat one whose result was kept, with one pseudo-call of a half."""
        hits, calls = self._asked.get(tool, (0, 0))
        return (hits + 0.5) / (calls + 1.0)

    def stats(self) -> Mapping[str, float]:
        return {**self._counts, "entries": len(self._kept), "bytes": self.bytes, "seconds_saved": round(self._saved, 6)}

    def _time(self) -> float:
        """The time. When the clock was set back, results from after it are dropped, O(n): their age is not known."""
        now = self.clock()
        if now < self._latest:
            for key in [k for k, kept in self._kept.items() if kept.since > now]:
                self._drop(key)
                self._counts["expired"] += 1
        self._latest = now
        return now

    def _find(self, key: _Key, now: float) -> Done | None:
        kept = self._kept.get(key)
        if kept is not None and now >= kept.until:
            self._drop(key)
            self._counts["expired"] += 1
            kept = None
        asked = self._asked.setdefault(key[1], [0, 0])
        self._asked.move_to_end(key[1])
        if len(self._asked) > _TOOLS:
            self._asked.popitem(last=False)
        asked[1] += 1
        if kept is None:
            self._counts["misses"] += 1
            return None
        asked[0] += 1
        kept.uses += 1
        self._counts["hits"] += 1
        self._saved += kept.done.seconds
        self._rank(key, kept)
        return kept.done

    def _keep(self, key: _Key, done: Done, asked_at: float) -> None:
        # A result is as old as its question: what the tool read may have changed since.
        until = asked_at + self.ttls.get(key[1], self.ttl)
        if not asked_at <= self._time() < until:
            return
        self._drop(key)
        kept = self._kept[key] = _Kept(done, asked_at, until)
        self.bytes += done.size
        self._rank(key, kept)
        while self.bytes > self.max_bytes or len(self._kept) > self.max_entries:
            self._evict()
        if len(self._heap) > 64 + 4 * len(self._kept):
            self._heap = []
            for other, entry in self._kept.items():
                self._push(other, entry)
            heapq.heapify(self._heap)

    def _rank(self, key: _Key, kept: _Kept) -> None:
        expected = kept.uses + self.reuse(key[1])
        kept.value = self._floor + expected * (kept.done.seconds + 1e-4) / (kept.done.size + 64)
        self._push(key, kept)

    def _push(self, key: _Key, kept: _Kept) -> None:
        self._pushes += 1
        heapq.heappush(self._heap, (kept.value, self._pushes, key))

    def _evict(self) -> None:
        while self._heap:
            value, _, key = heapq.heappop(self._heap)
            kept = self._kept.get(key)
            if kept is not None and kept.value == value:
                self._floor = value
                self._drop(key)
                self._counts["evicted"] += 1
                return

    def _drop(self, key: _Key) -> None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            self.bytes -= kept.done.size
