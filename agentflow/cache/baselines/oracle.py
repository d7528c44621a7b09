"""Belady's rule: evict what is needed farthest in the future.

It needs to know the future, so only a simulation of a recorded load can run it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from agentflow.cache.ledger import Ledger, NodeRecord
from agentflow.cache.policy import Explanation, Policy, Score

__all__ = ["Belady", "Future"]


class Future(Protocol):
    """What is known of the rest of a recorded load."""

    def next_use(self, node: NodeRecord) -> float:
        """When the node is read next, in any unit that grows with time; infinity when it never is. Should cost
        O(1)."""
        ...


class Belady(Policy):
    """The farthest next use goes first (L. A. Belady, 1966), among the leaves that a prefix cache may evict.

    **When this is optimal.** Let cached pages be of one size, let every call need all pages of its path at once
    (nothing bypasses the cache), and count a hit for each page of the prompt that is there when the call comes.
    Keeping a page from one use to the next, which reads it, earns one hit and takes one place at every call in
    between. A choice of what to keep is feasible when at each call the pages kept across it and the call's own
    fit together. Choosing the most intervals of unit worth under capacities that vary with time is solved by
    going through time and, where too many overlap, dropping the one that ends last: all of them have begun, so it
    covers at every later call whatever any other would, and exchanging it for another in any optimal choice
    keeps that feasible. That is this rule. The restriction to leaves costs nothing: whoever reads a page reads
    all above it, so a page's next use is never before its parent's, and among the farthest there is always a leaf.

    **When it is not.** (1) Where an answer repeats, word for word, what was cached after the same prompt, writing
    it anew earns nothing, but pages behind it may: the rule can then fall short of the best, and
    :func:`agentflow.bench.simulator.most_hits` remains an upper bound. (2) With nodes of different sizes, two tiers, or
    service that takes time (so that the order of calls depends on what is cached), it is a strong heuristic.
    """

    name = "belady"

    def __init__(self, ledger: Ledger, clock: Callable[[], float], *, future: Future | None = None) -> None:
        if future is None:
            raise ValueError("it needs the recorded future, which only agentflow.bench.simulator has")
        super().__init__(ledger, clock)
        self.future = future

    def score_node(self, node: NodeRecord) -> Score:
        return (-self.future.next_use(node),)

    def explain(self, node: NodeRecord) -> Explanation | None:
        next_use = self.future.next_use(node)
        if math.isinf(next_use):
            return Explanation("never needed again")
        return Explanation("needed farthest in the future", {"next_use": next_use})
