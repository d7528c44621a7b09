"""KV of shared segments as agents of a workflow computed it: what corrections start from.

Kept on the host, apart from SGLang's pool, so that eviction there loses none of it. Bounded in bytes; the least
recently used go first, those of ended workflows before all.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from agentflow.cache.kvcmas import SegmentKV

__all__ = ["Found", "Source", "Sources"]

#: Tokens at the beginning of a segment that tell candidates apart.
_HEAD = 8


@dataclass(eq=False, slots=True)
class Source:
    """A segment under one agent. ``exact`` says that nothing before or in it was approximate."""

    workflow: str
    agent: str
    tokens: tuple[int, ...]
    kv: SegmentKV
    exact: bool


class Found(NamedTuple):
    """A source whose first ``tokens`` tokens are those that were looked for."""

    source: Source
    tokens: int


class Sources:
    """All sources of one scheduler. ``limit`` is in bytes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.bytes = 0
        self.dropped = 0
        self._by_use: OrderedDict[int, Source] = OrderedDict()
        self._by_head: dict[tuple[str, tuple[int, ...]], list[Source]] = defaultdict(list)

    def __len__(self) -> int:
        return len(self._by_use)

    def __iter__(self) -> Iterator[Source]:
        return iter(list(self._by_use.values()))

    def add(self, source: Source) -> bool:
        """Keep a source; one of the same agent and tokens is replaced unless it is exact and this one is not.

        False when it was not kept.
        """
        if source.kv.nbytes > self.limit or len(source.tokens) < _HEAD:
            return False
        for old in list(self._by_head.get(_name(source), ())):
            if old.agent == source.agent and old.tokens == source.tokens:
                if old.exact and not source.exact:
                    return False
                self._drop(old)
        self._by_use[id(source)] = source
        self._by_head[_name(source)].append(source)
        self.bytes += source.kv.nbytes
        while self.bytes > self.limit:
            self._drop(next(iter(self._by_use.values())))
            self.dropped += 1
        return id(source) in self._by_use

    def has(self, workflow: str, agent: str, tokens: Sequence[int], *, exact: bool) -> bool:
        """Whether these tokens are kept of this agent; with ``exact``, exactly computed."""
        wanted = tuple(tokens)
        return any(
            s.agent == agent and s.tokens == wanted and (s.exact or not exact)
            for s in self._by_head.get((workflow, wanted[:_HEAD]), ())
        )

    def find(self, workflow: str, tokens: Sequence[int], *, minimum: int) -> list[Found]:
        """Sources that begin with at least ``minimum`` of ``tokens``, in the order in which they came."""
        wanted = tuple(tokens)
        out = []
        for source in self._by_head.get((workflow, wanted[:_HEAD]), ()):
            same = _common(source.tokens, wanted)
            if same >= minimum:
                out.append(Found(source, same))
        return out

    def used(self, source: Source) -> None:
        """The source was of use: it goes later."""
        if id(source) in self._by_use:
            self._by_use.move_to_end(id(source))

    def ended(self, workflow: str) -> None:
        """The workflow needs its sources no more."""
        for source in list(self._by_use.values()):
            if source.workflow == workflow:
                self._drop(source)

    def clear(self) -> None:
        """Forget all."""
        self._by_use.clear()
        self._by_head.clear()
        self.bytes = 0

    def _drop(self, source: Source) -> None:
        del self._by_use[id(source)]
        self.bytes -= source.kv.nbytes
        alike = self._by_head[_name(source)]
        alike.remove(source)
        if not alike:
            del self._by_head[_name(source)]


def _name(source: Source) -> tuple[str, tuple[int, ...]]:
    return source.workflow, source.tokens[:_HEAD]


def _common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    shorter = min(len(a), len(b))
    if a[:shorter] == b[:shorter]:
        return shorter
    return next(i for i in range(shorter) if a[i] != b[i])
