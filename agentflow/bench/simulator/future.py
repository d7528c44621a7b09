"""What a recorded load will read, for the oracle policy."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from agentflow.bench.simulator.content import Content
from agentflow.bench.traces.model import Trace, TraceCall, TraceWorkflow
from agentflow.cache.ledger import NodeRecord

if TYPE_CHECKING:
    from agentflow.bench.simulator.tree import Tree

__all__ = ["TreeFuture", "Uses", "nominal_order"]


def nominal_order(trace: Trace) -> list[tuple[float, TraceWorkflow, TraceCall]]:
    """The calls in the order in which they would be made if no call took time, each with that time in seconds.

    Calls of the same time come in the order of the trace. A call that waits for one that is not there does not
    wait for it.
    """
    timed: list[tuple[float, int, TraceWorkflow, TraceCall]] = []
    for workflow in trace.workflows:
        done: dict[str, float] = {}
        for call in workflow.calls:
            start = max((done[w] for w in call.wait_for if w in done), default=workflow.arrival) + call.delay
            done[call.id] = start
            timed.append((start, len(timed), workflow, call))
    timed.sort(key=lambda item: item[:2])
    return [(start, workflow, call) for start, _, workflow, call in timed]


class Uses:
    """Which calls read which path, in the order of ``names``; ``prompts`` are theirs.

    Calls that were served no longer count. Lookups are O(1) amortised.
    """

    def __init__(self, names: Sequence[str], prompts: Sequence[Content]) -> None:
        self._numbers = {name: number for number, name in enumerate(names)}
        self._served = bytearray(len(prompts))
        self._uses: dict[int, array[int]] = {}
        for number in range(len(prompts) - 1, -1, -1):  # the next use comes last, where it is popped once served
            for link in prompts[number].links:
                uses = self._uses.get(link)
                if uses is None:
                    uses = self._uses[link] = array("q")
                uses.append(number)

    def served(self, name: str) -> None:
        """The call has read its prompt. Names that are not known are ignored."""
        number = self._numbers.get(name)
        if number is not None:
            self._served[number] = 1

    def next(self, link: int) -> float:
        """The number of the next call that reads the path, infinity when none will."""
        uses = self._uses.get(link)
        if uses is None:
            return math.inf
        while uses and self._served[uses[-1]]:
            uses.pop()
        return float(uses[-1]) if uses else math.inf

    def future(self) -> TreeFuture:
        """The oracle's view of it on one engine."""
        return TreeFuture(self)


class TreeFuture:
    """Answers for the nodes of one tree: a node is needed when its first token is."""

    def __init__(self, uses: Uses) -> None:
        self._uses = uses
        self._tree: Tree | None = None

    def bind(self, tree: Tree) -> None:
        """Say whose nodes are asked about."""
        self._tree = tree

    def next_use(self, node: NodeRecord) -> float:
        """See :class:`agentflow.cache.baselines.oracle.Future`."""
        assert self._tree is not None
        found = self._tree.nodes[node.id]
        return self._uses.next(found.content.link_at(found.start))
