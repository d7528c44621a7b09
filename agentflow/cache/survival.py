"""Who runs next, by counting: transitions between agents in a sliding window, and hops on the graph that they make.

The learner and the score of CacheSage (arXiv 2605.27744): first-order transition counts of the newest transitions,
thresholded to a graph; how likely an agent is to run within the next K steps is approximated by how many hops away
it is from the agents that run now.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

__all__ = ["OUTSIDE", "Transitions"]

#: Where a workflow is before its first agent and after its last.
OUTSIDE = 0
#: Transitions after which the graph is made anew in any case.
_LOOK_EVERY = 64
#: Farther than any hop count.
_FAR = 255


class Transitions:
    """Transitions between at most ``agents`` agents (numbers from 1, 0 is :data:`OUTSIDE`), the newest ``window``.

    ``learn`` is O(1); hop counts are found anew, in O(agents^2), after the graph changed. Holds
    2 * window + 3 * agents^2 bytes, whatever was observed.
    """

    __slots__ = ("_at", "_counts", "_hops", "_size", "_stale", "_totals", "_window", "names", "threshold")

    def __init__(self, *, agents: int = 24, window: int = 1_024, threshold: float = 0.1) -> None:
        self.names: dict[str, int] = {}
        self.threshold = threshold
        self._size = agents + 1
        self._counts = array("H", bytes(2 * self._size * self._size))
        self._totals = array("L", bytes(array("L").itemsize * self._size))
        self._window = array("H", [0xFFFF]) * window
        self._at = 0
        self._hops = bytearray()
        self._stale = True

    def number(self, agent: str) -> int | None:
        """The agent's number, given at its first mention; None when too many are known."""
        found = self.names.get(agent)
        if found is None and len(self.names) + 1 < self._size:
            found = self.names[agent] = len(self.names) + 1
            self._stale = True
        return found

    def learn(self, before: int, after: int) -> None:
        """``after`` ran after ``before``."""
        size = self._size
        at = self._at
        old = self._window[at]
        if old != 0xFFFF:
            self._change(old, -1)
        pair = before * size + after
        self._window[at] = pair
        self._change(pair, 1)
        self._at = at + 1 if at + 1 < len(self._window) else 0

    def probability(self, before: int, after: int) -> float:
        """Share of the transitions from ``before`` that led to ``after``; 0.0 when there were none."""
        total = self._totals[before]
        return self._counts[before * self._size + after] / total if total else 0.0

    def following(self, before: int) -> list[tuple[int, float]]:
        """What follows ``before`` at least ``threshold`` of the time, most likely first."""
        total = self._totals[before]
        if not total:
            return []
        row = self._counts[before * self._size : before * self._size + len(self.names) + 1]
        out = [(i, n / total) for i, n in enumerate(row) if n and n / total >= self.threshold]
        out.sort(key=lambda pair: -pair[1])
        return out

    def hops(self, before: int, after: int) -> int:
        """Steps of the thresholded graph from ``before`` until ``after`` runs; 0 for itself, 255 when never."""
        if self._stale:
            self._search()
        return self._hops[before * self._size + after]

    def nearest(self, running: Iterable[int]) -> Sequence[int]:
        """For every agent number the fewest hops from any of ``running``."""
        if self._stale:
            self._search()
        size = self._size
        rows = [self._hops[a * size : (a + 1) * size] for a in running]
        if not rows:
            return bytes([_FAR]) * size
        return rows[0] if len(rows) == 1 else bytes(map(min, *rows))

    @property
    def learned(self) -> bool:
        """Whether any transition is counted."""
        return any(self._totals)

    def _change(self, pair: int, by: int) -> None:
        before = pair // self._size
        count, total = self._counts[pair], self._totals[before]
        self._counts[pair] = count + by
        self._totals[before] = total + by
        if self._at % _LOOK_EVERY == 0:
            self._stale = True
        elif not self._stale:
            # The share of this transition may cross the threshold. Those of others from the same agent move a little
            # with the total, which the next regular look catches up with.
            was = total > 0 and count >= self.threshold * total
            now = total + by > 0 and count + by >= self.threshold * (total + by) and count + by > 0
            self._stale = was != now

    def _search(self) -> None:
        """Breadth-first search from every agent."""
        size, known = self._size, len(self.names) + 1
        edges = [[after for after, _ in self.following(before)] for before in range(known)]
        hops = bytearray([_FAR]) * (size * size)
        for source in range(known):
            base = source * size
            hops[base + source] = 0
            ring, distance = [source], 0
            while ring and distance < _FAR - 1:
                distance += 1
                following = []
                for node in ring:
                    for after in edges[node]:
                        if hops[base + after] == _FAR:
                            hops[base + after] = distance
                            following.append(after)
                ring = following
        self._hops = hops
        self._stale = False
