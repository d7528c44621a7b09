"""Batch shaping: calls of one agent, which begin with the same anchor, run next to each other.

What runs together shares the KV of its beginning, which is computed once and stays while it is used, instead of
being pushed out by another agent's between two calls. Nobody waits longer for it than ``max_delay``.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import ClassVar

from agentflow.cache.ledger import CallRef, Ledger
from agentflow.cache.policy import CallArrived, CallFinished, Observation, Policy, Score, Touched, WaitingCall
from agentflow.errors import UsageError

__all__ = ["Shaping"]

#: Waiting and running calls that are followed; the oldest are forgotten first.
_FOLLOWED = 10_000
_Group = int | str


class Shaping(Policy):
    """Groups waiting calls by anchor, or by agent where no anchor is known.

    The group whose oldest waiting call came first runs first, with all that joined it since. A call that has waited
    ``max_delay`` seconds is ahead of all groups. O(1) per call. (To prefer groups that run already was tried: hit
    rates rose no further, and workflows took longer, since those at their first agent overtook those near their end.)
    """

    name: ClassVar[str] = "shaping"
    precedence: ClassVar[int] = 30

    def __init__(self, ledger: Ledger, clock: Callable[[], float], *, max_delay: float = 2.0) -> None:
        super().__init__(ledger, clock)
        if max_delay < 0:
            raise UsageError("shaping: max_delay must not be negative")
        self.max_delay = max_delay
        #: Calls not yet seen running -> group, and when each group's first waiting call came.
        self._waiting: OrderedDict[CallRef, _Group] = OrderedDict()
        self._queued: Counter[_Group] = Counter()
        self._since: dict[_Group, float] = {}
        self._running: OrderedDict[CallRef, _Group] = OrderedDict()
        self._active: Counter[_Group] = Counter()
        self._counts: Counter[str] = Counter()

    def observe(self, observation: Observation) -> None:
        kind = type(observation)
        if kind is Touched:
            call = observation.call  # type: ignore[union-attr]
            group = self._waiting.pop(call, None)
            if group is not None:
                self._began(call, group)
        elif kind is CallArrived:
            if observation.call.thread is not None:  # type: ignore[union-attr]
                self._arrived(observation)  # type: ignore[arg-type]
        elif kind is CallFinished:
            self._left(observation.call)  # type: ignore[union-attr]

    def score_call(self, call: WaitingCall) -> Score:
        if self.clock() - call.arrived >= self.max_delay:
            return (0.0, call.arrived)
        return (1.0, self._since.get(_group(call.call, call.anchor), call.arrived))

    def stats(self) -> Mapping[str, float]:
        return {"groups_waiting": len(self._since), "groups_running": len(self._active), **self._counts}

    def _arrived(self, seen: CallArrived) -> None:
        group = _group(seen.call, seen.anchor)
        self._waiting[seen.call] = group
        self._queued[group] += 1
        self._since.setdefault(group, self.clock())
        if len(self._waiting) > _FOLLOWED:
            _, gone = self._waiting.popitem(last=False)
            self._unqueue(gone)

    def _began(self, call: CallRef, group: _Group) -> None:
        self._unqueue(group)
        if self._active.get(group):
            self._counts["joined_running_group"] += 1
        self._counts["calls"] += 1
        self._running[call] = group
        self._active[group] += 1
        if len(self._running) > _FOLLOWED:
            self._left(next(iter(self._running)))

    def _left(self, call: CallRef) -> None:
        group = self._waiting.pop(call, None)
        if group is not None:
            self._unqueue(group)
        group = self._running.pop(call, None)
        if group is not None:
            self._active[group] -= 1
            if self._active[group] <= 0:
                del self._active[group]

    def _unqueue(self, group: _Group) -> None:
        self._queued[group] -= 1
        if self._queued[group] <= 0:
            del self._queued[group]
            self._since.pop(group, None)


def _group(call: CallRef, anchor: int) -> _Group:
    if anchor:
        return anchor
    return (call.thread.agent or "") if call.thread is not None else ""
