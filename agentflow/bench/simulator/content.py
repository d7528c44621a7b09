"""What a call reads and writes, as places on paths that all calls of a simulation share.

Every distinct beginning of a prompt gets a number: the *link* of a span at a place is the number of the path that
ends with it. Two contents are equal up to a span exactly when their links there are equal, so that comparing two
prompts of thousands of tokens costs a few integer comparisons.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from agentflow.bench.traces.model import Content as Spans

__all__ = ["Content", "Links"]


class Content:
    """Spans in order: ``links[i]`` names the path up to span ``i``, which ends at token ``ends[i]``."""

    __slots__ = ("ends", "links", "tokens")

    def __init__(self, links: list[int], ends: list[int]) -> None:
        self.links = links
        self.ends = ends
        self.tokens = ends[-1] if ends else 0

    def link_at(self, token: int) -> int:
        """The link of the span that holds token number ``token`` (from 0)."""
        return self.links[bisect_right(self.ends, token)]

    def common(self, other: Content, limit: int) -> int:
        """How many of the first ``limit`` tokens are the same in both. O(log spans), mostly O(1)."""
        if limit <= 0:
            return 0
        limit = min(limit, self.tokens, other.tokens)
        if self is other:
            return limit
        links, others = self.links, other.links
        last = bisect_left(self.ends, limit)
        if last < len(others) and links[last] == others[last]:
            return limit
        low, high = 0, min(last, len(others))
        while low < high:
            middle = (low + high) // 2
            if links[middle] == others[middle]:
                low = middle + 1
            else:
                high = middle
        return self.ends[low - 1] if low else 0


class Links:
    """Gives every path its number. Grows with the distinct paths of a trace."""

    def __init__(self) -> None:
        self._links: dict[tuple[int, str, int], int] = {}

    def __len__(self) -> int:
        return len(self._links)

    def content(self, *parts: Spans) -> Content:
        """The content of the parts' spans, one after the other. Empty spans are left out."""
        known = self._links
        links: list[int] = []
        ends: list[int] = []
        link = end = 0
        for part in parts:
            for name, tokens in part:
                if tokens <= 0:
                    continue
                key = (link, name, tokens)
                found = known.get(key)
                if found is None:
                    found = known[key] = len(known) + 1
                link = found
                end += tokens
                links.append(link)
                ends.append(end)
        return Content(links, ends)
