"""What a recorded load will read, for the oracle policy."""

from __future__ import annotations

import math
from array import array
from typing import TYPE_CHECKING

from agentflow.bench.simulator.content import Content, Links
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
    """Which calls of a trace read which path, and when each is expected.

    What is known of the future: all calls, what they read, their delays; what is not: how long a call takes. A call
    is expected when the delays and the calls on the longest way from the last call of its workflow that ended have
    passed, each call as long as calls took lately. Workflows not begun come at their arrival, where that is known, else
    after all others. Lookups are O(1) amortised for what one workflow reads; of what several read, the first
    ``SCAN`` calls to come are looked at.
    """

    SCAN = 16
    _LATELY = 0.05

    def __init__(self, trace: Trace, links: Links, *, tool_speed: float = 1.0) -> None:
        self._numbers: dict[tuple[str, str], int] = {}
        self._served: list[bool] = []
        #: Per call: its workflow, and the delays and calls on the longest way to it from the workflow's start.
        self._calls: list[tuple[int, float, int]] = []
        self._workflows = {w.id: number for number, w in enumerate(trace.workflows)}
        #: Per workflow: when its last call ended or it began, and the delays and calls on the way to there.
        self._at: list[tuple[float, float, int]] = [(1e12 + n, 0.0, 0) for n in range(len(trace.workflows))]
        self._mean = 0.0
        self._uses: dict[int, array[int]] = {}
        places: dict[tuple[str, str], tuple[float, int]] = {}
        read: list[Content] = []
        for _, workflow, call in nominal_order(trace):
            before = [places[(workflow.id, w)] for w in call.wait_for if (workflow.id, w) in places]
            delay = max((p[0] for p in before), default=0.0) + call.delay / tool_speed
            depth = max((p[1] for p in before), default=-1) + 1
            places[(workflow.id, call.id)] = (delay, depth)
            self._numbers[(workflow.id, call.id)] = len(self._calls)
            self._calls.append((self._workflows[workflow.id], delay, depth))
            read.append(links.content(call.prompt))
        self._served = [False] * len(self._calls)
        for number in range(len(read) - 1, -1, -1):  # the next use comes last, where it is popped once served
            for link in read[number].links:
                uses = self._uses.get(link)
                if uses is None:
                    uses = self._uses[link] = array("q")
                uses.append(number)

    def begins(self, workflow: str, at: float) -> None:
        """The workflow begins, or will begin, at ``at`` seconds."""
        self._at[self._workflows[workflow]] = (at, 0.0, 0)

    def ended(self, workflow: str, call: str, at: float, seconds: float) -> None:
        """A call ended that took ``seconds``."""
        number = self._numbers[(workflow, call)]
        self._served[number] = True
        index, delay, depth = self._calls[number]
        self._at[index] = (at, delay, depth + 1)
        self._mean += (seconds - self._mean) * (self._LATELY if self._mean else 1.0)

    def next(self, link: int) -> float:
        """When a call is expected to read the path next, in seconds; infinity when none will."""
        uses = self._uses.get(link)
        if uses is None:
            return math.inf
        while uses and self._served[uses[-1]]:
            uses.pop()
        best = math.inf
        for number in uses[: -self.SCAN - 1 : -1]:
            if not self._served[number]:
                index, delay, depth = self._calls[number]
                at, passed, calls = self._at[index]
                best = min(best, at + max(0.0, delay - passed) + max(0, depth - calls) * self._mean)
        return best

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
