"""Evictable leaves of a cache tree, and which of them goes first.

Leaves come and go far more often than they are evicted, and an eviction needs only the lowest few. A heap with
lazy deletion holds them by (score, recency); a touch costs nothing until the leaf comes up. What remains is
when scores must be asked for again, which :class:`Scoring` names.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator
from enum import Enum

from agentflow.cache.ledger import NodeRecord
from agentflow.cache.policy import Score

__all__ = ["Leaves", "Scoring"]


class Scoring(Enum):
    """How long a leaf's score stays valid."""

    #: There are no scores: the order is recency alone.
    RECENCY = "recency"
    #: Until the leaf is touched or a workflow that owns it is heard of (:attr:`Policy.scores_by_owner`).
    BY_OWNER = "by_owner"
    #: For the moment: every leaf is scored at the start of every eviction.
    ALWAYS = "always"


class _Leaf:
    __slots__ = ("pushed", "recency", "record", "score", "workflows")

    def __init__(self, record: NodeRecord, recency: float, score: Score) -> None:
        self.record = record
        self.recency = recency
        self.score = score
        #: The lowest entry of this leaf in the heap; None when there is none.
        self.pushed: tuple[Score, float] | None = None
        #: The workflows under which it is indexed.
        self.workflows: set[str] = set()


class Leaves:
    """The evictable leaves of one tier, lowest (score, recency) first.

    ``score`` is asked for the score of a record, without its recency. ``clock`` in seconds and ``max_age`` bound,
    with ``Scoring.BY_OWNER``, how long a score is kept although nothing was heard: a silent workflow may
    expire. One owner, one thread.

    ``add``, ``discard``, ``touch`` and ``changed`` cost O(log n) or less; ``start`` costs O(n) with
    ``Scoring.ALWAYS``, otherwise as much as was changed; ``pop`` costs O(log n) amortised.
    """

    def __init__(
        self,
        score: Callable[[NodeRecord], Score],
        scoring: Scoring = Scoring.ALWAYS,
        *,
        clock: Callable[[], float] | None = None,
        max_age: float = 60.0,
    ) -> None:
        self.scoring = scoring
        self.max_age = max_age
        self._score = score
        self._clock = clock
        self._leaves: dict[int, _Leaf] = {}
        self._heap: list[tuple[Score, float, int]] = []
        self._unscored: set[int] = set()
        self._changed: set[str] = set()
        self._owned: dict[str, set[int]] = {}
        self._refreshed = -math.inf

    def __len__(self) -> int:
        return len(self._leaves)

    def __contains__(self, record: object) -> bool:
        return isinstance(record, NodeRecord) and record.id in self._leaves

    def __iter__(self) -> Iterator[NodeRecord]:
        return (leaf.record for leaf in self._leaves.values())

    def add(self, record: NodeRecord, recency: float) -> None:
        """Take in a leaf, or give the recency, and where they changed the owners, of one that is in."""
        leaf = self._leaves.get(record.id)
        if leaf is not None:
            self._disown(leaf)
            leaf.recency = recency
        else:
            leaf = self._leaves[record.id] = _Leaf(record, recency, ())
        if self.scoring is Scoring.RECENCY:
            self._push(leaf)
            return
        self._unscored.add(record.id)
        if self.scoring is Scoring.BY_OWNER:
            leaf.workflows = {thread.workflow.id for thread in record.owners}
            for workflow in leaf.workflows:
                self._owned.setdefault(workflow, set()).add(record.id)

    def touch(self, record: NodeRecord, recency: float) -> bool:
        """Give the recency of a leaf whose owners did not change; False when it was so already.

        Does nothing for a leaf that is not in.
        """
        leaf = self._leaves.get(record.id)
        if leaf is None or leaf.recency == recency:
            return False
        leaf.recency = recency
        if leaf.pushed is not None:
            self._push(leaf)
        return True

    def discard(self, record: NodeRecord) -> None:
        """Drop a leaf that can no longer be evicted or is gone. Does nothing for one that is not in."""
        leaf = self._leaves.pop(record.id, None)
        if leaf is not None:
            self._unscored.discard(record.id)
            self._disown(leaf)

    def changed(self, workflow: str) -> None:
        """Tell that something of the workflow was observed that may change the scores of what it owns."""
        if self.scoring is Scoring.BY_OWNER and workflow in self._owned:
            self._changed.add(workflow)

    def refresh(self) -> None:
        """Have every leaf scored anew at the next ``start``."""
        self._refreshed = -math.inf

    def start(self) -> None:
        """Begin an eviction: ask for the scores that may have changed. What ``add`` brings until the next
        ``start`` is scored when it comes up."""
        if self.scoring is Scoring.ALWAYS:
            self._rebuild()
        elif self.scoring is Scoring.BY_OWNER:
            now = self._clock() if self._clock is not None else 0.0
            if now - self._refreshed > self.max_age or now < self._refreshed:
                self._refreshed = now
                self._rebuild()
            else:
                self._rescore({i for w in self._changed for i in self._owned.get(w, ())})
        self._changed.clear()

    def lowest(self) -> NodeRecord | None:
        """The leaf that goes first, or None when there is none."""
        if self._unscored:
            self._rescore(self._unscored)
            self._unscored = set()
        if len(self._heap) > 64 + 3 * len(self._leaves):
            self._compact()
        heap = self._heap
        while heap:
            score, recency, node = heap[0]
            leaf = self._leaves.get(node)
            if leaf is None or leaf.pushed != (score, recency):
                heapq.heappop(heap)
            elif leaf.score == score and leaf.recency == recency:
                return leaf.record
            else:
                leaf.pushed = (leaf.score, leaf.recency)
                heapq.heapreplace(heap, (leaf.score, leaf.recency, node))
        return None

    def pop(self) -> NodeRecord | None:
        """Take out and return the leaf that goes first."""
        record = self.lowest()
        if record is not None:
            heapq.heappop(self._heap)
            self.discard(record)
        return record

    def _rescore(self, ids: Iterable[int]) -> None:
        for node in ids:
            leaf = self._leaves.get(node)
            if leaf is None:
                continue
            score = self._score(leaf.record)
            if score != leaf.score or leaf.pushed is None:
                leaf.score = score
                self._push(leaf)

    def _rebuild(self) -> None:
        for leaf in self._leaves.values():
            leaf.score = self._score(leaf.record)
        self._unscored.clear()
        self._compact()

    def _compact(self) -> None:
        for leaf in self._leaves.values():
            leaf.pushed = (leaf.score, leaf.recency)
        self._heap = [(leaf.score, leaf.recency, node) for node, leaf in self._leaves.items()]
        heapq.heapify(self._heap)

    def _push(self, leaf: _Leaf) -> None:
        """Make sure that the heap has an entry not above the leaf's place."""
        place = (leaf.score, leaf.recency)
        if leaf.pushed is None or place < leaf.pushed:
            leaf.pushed = place
            heapq.heappush(self._heap, (*place, leaf.record.id))

    def _disown(self, leaf: _Leaf) -> None:
        for workflow in leaf.workflows:
            owned = self._owned[workflow]
            owned.discard(leaf.record.id)
            if not owned:
                del self._owned[workflow]
        leaf.workflows = set()
