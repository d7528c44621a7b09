"""Transfers between the tiers of the simulated cache: one queue in each direction, each as fast as the bus."""

from __future__ import annotations

from collections import deque

from agentflow.bench.simulator.cost import Cost
from agentflow.bench.simulator.tree import Node, Tree

__all__ = ["Transfers"]


class Transfers:
    """What is under way. A node is locked while its KV moves."""

    def __init__(self, tree: Tree, cost: Cost) -> None:
        self.tree = tree
        self.cost = cost
        self._writes = _Lane()
        self._loads = _Lane()

    def write(self, now: float) -> None:
        """Start the writes to the host that the tree asks for; it has locked their nodes."""
        for node in self.tree.writes:
            self._writes.add(node, now, self.cost.transfer(node.tokens))
        self.tree.writes.clear()

    def load(self, node: Node, tokens: int, now: float) -> float:
        """Start the load of a node's path, of ``tokens`` tokens, to the device; returns when it is done, in seconds."""
        self.tree.lock(node)
        return self._loads.add(node, now, self.cost.transfer(tokens))

    def settle(self, now: float) -> None:
        """Release what is done."""
        for lane in (self._writes, self._loads):
            for node in lane.done(now):
                self.tree.unlock(node)

    @property
    def next_done(self) -> float | None:
        """When the next one is done, in seconds; None when nothing is under way."""
        return min((lane.queue[0][0] for lane in (self._writes, self._loads) if lane.queue), default=None)


class _Lane:
    def __init__(self) -> None:
        self.queue: deque[tuple[float, Node]] = deque()
        self._free = 0.0

    def add(self, node: Node, now: float, seconds: float) -> float:
        self._free = max(now, self._free) + seconds
        self.queue.append((self._free, node))
        return self._free

    def done(self, now: float) -> list[Node]:
        found = []
        while self.queue and self.queue[0][0] <= now:
            found.append(self.queue.popleft()[1])
        return found
