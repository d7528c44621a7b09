"""From token ids to spans and back.

Spans come from an exact compressed trie (:class:`SpanTrie`) over the calls' token ids: it is cut where two calls
part, and where a prompt ends. So two calls share spans exactly as far as they share token ids. The way back
(:class:`SpanTokens`) gives recorded ids, or made-up ones for spans without.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from agentflow.bench.traces.model import Content, Span, Trace
from agentflow.errors import UsageError

__all__ = ["BlockTokens", "Ids", "SpanTokens", "SpanTrie"]

#: Token ids in a row.
Ids: TypeAlias = npt.NDArray[np.int64]


class _Node:
    """A run of tokens ``source[start:end]`` after ``parent``. A call ends where a node ends, or nowhere in it."""

    __slots__ = ("children", "end", "parent", "source", "start")

    def __init__(self, source: Ids, start: int, end: int, parent: _Node | None) -> None:
        self.source, self.start, self.end, self.parent = source, start, end, parent
        self.children: dict[int, _Node] = {}


class SpanTrie:
    """Collects calls, then says of what spans each consists.

    Adding a call costs one array comparison per node on its path and no loop over its tokens.
    """

    def __init__(self, prefix: str = "t") -> None:
        self._prefix = prefix
        self._root = _Node(np.empty(0, np.int64), 0, 0, None)
        self._calls: list[tuple[_Node, _Node]] = []

    def add(self, prompt: Sequence[int] | Ids, output: Sequence[int] | Ids) -> int:
        """Add a call; returns its number."""
        head = np.asarray(prompt, dtype=np.int64)
        path = np.concatenate([head, np.asarray(output, dtype=np.int64)])
        at = self._insert(path, 0, len(head), self._root)
        self._calls.append((at, self._insert(path, len(head), len(path), at)))
        return len(self._calls) - 1

    def contents(self) -> list[tuple[Content, Content]]:
        """Prompt and output of each call in spans, in the order they were added. Calls added later may cut them."""
        spans: dict[int, Span] = {}
        return [(self._spans(self._root, a, spans), self._spans(a, b, spans)) for a, b in self._calls]

    def tokens(self) -> dict[str, tuple[int, ...]]:
        """Token ids of every span of :meth:`contents`."""
        spans: dict[int, Span] = {}
        out: dict[str, tuple[int, ...]] = {}
        for _, last in self._calls:
            fresh = []
            node: _Node | None = last
            while node is not None and node is not self._root and id(node) not in spans:
                fresh.append(node)
                node = node.parent
            for node in reversed(fresh):
                out[self._span(node, spans).id] = tuple(node.source[node.start : node.end].tolist())
        return out

    def _insert(self, path: Ids, start: int, end: int, node: _Node) -> _Node:
        """Walk ``path[start:end]`` down from ``node`` (a whole node); returns the node that ends where it ends."""
        while start < end:
            first = int(path[start])
            child = node.children.get(first)
            if child is None:
                child = _Node(path[start:end].copy(), 0, end - start, node)  # keeps no other part of the path
                node.children[first] = child
                return child
            n = min(end - start, child.end - child.start)
            same = path[start : start + n] == child.source[child.start : child.start + n]
            common = n if same.all() else int(same.argmin())
            node = child if common == child.end - child.start else _split(child, common)
            start += common
        return node

    def _spans(self, top: _Node, bottom: _Node, spans: dict[int, Span]) -> Content:
        nodes = []
        while bottom is not top:
            nodes.append(bottom)
            assert bottom.parent is not None
            bottom = bottom.parent
        return tuple([self._span(n, spans) for n in reversed(nodes)])

    def _span(self, node: _Node, spans: dict[int, Span]) -> Span:
        span = spans.get(id(node))
        if span is None:
            span = spans[id(node)] = Span(f"{self._prefix}{len(spans)}", node.end - node.start)
        return span


def _split(node: _Node, at: int) -> _Node:
    """Cut a node after ``at`` tokens. The lower part stays the same object, for calls end at it; returns the upper."""
    upper = _Node(node.source, node.start, node.start + at, node.parent)
    assert node.parent is not None
    node.parent.children[int(node.source[node.start])] = upper
    node.start += at
    node.parent = upper
    upper.children[int(node.source[node.start])] = node
    return upper


class BlockTokens:
    """Made-up token ids of prompts that are known as block hashes only, to be given to a :class:`SpanTrie`.

    Prompts share ids exactly as far as they share blocks. A last block that is not full has its own hash.
    """

    def __init__(self, block_size: int) -> None:
        if block_size < 1:
            raise UsageError(f"block_size must be at least 1 token, got {block_size}")
        self.block_size = block_size
        self._offsets = np.arange(block_size, dtype=np.int64)
        self._fresh = 0

    def prompt(self, hash_ids: Sequence[int], length: int) -> Ids:
        """Ids of a prompt of ``length`` tokens. Tokens beyond its blocks are like no others.

        Raises ValueError where ``length`` does not reach into the last block, or a hash is negative.
        """
        blocks = np.asarray(hash_ids, dtype=np.int64)
        if len(blocks) and blocks.min() < 0:
            raise ValueError("a hash id is negative")
        if length <= (len(blocks) - 1) * self.block_size:
            raise ValueError(f"{len(blocks)} blocks of {self.block_size} are more than {length} tokens hold")
        ids = (blocks[:, None] * self.block_size + self._offsets[None, :]).ravel()[:length]
        return np.concatenate([ids, self.fresh(length - len(ids))]) if length > len(ids) else ids

    def fresh(self, tokens: int) -> Ids:
        """Ids like no others."""
        self._fresh += tokens
        return np.arange(-self._fresh, tokens - self._fresh, dtype=np.int64)


class SpanTokens:
    """Token ids for the spans of a trace: the recorded ones, else made-up ones that depend on ``seed`` and span.

    Different spans that follow the same prefix get different first tokens, so that prompts share token ids exactly
    as far as they share spans. Made-up ids lie in ``low`` .. ``high`` - 1. Raises
    :class:`~agentflow.errors.UsageError` where more spans follow one prefix than there are ids.
    """

    def __init__(self, trace: Trace, *, low: int = 0, high: int = 32_000, seed: int = 0) -> None:
        if not 0 <= low < high:
            raise UsageError(f"made-up token ids need 0 <= low < high, got {low} and {high}")
        self._low, self._high, self._seed = low, high, seed
        self._known: dict[str, Ids] = {}
        self._recorded: Mapping[str, tuple[int, ...]] = trace.tokens
        contents = (c.prompt + c.output for w in trace.workflows for c in w.calls)
        self._first = self._firsts(contents)

    def ids(self, content: Content) -> list[int]:
        """Token ids of a prompt or an output of the trace."""
        parts = [self._of(s) for s in content]
        ids: list[int] = np.concatenate(parts).tolist() if parts else []
        return ids

    def _of(self, span: Span) -> Ids:
        ids = self._known.get(span.id)
        if ids is None:
            recorded = self._recorded.get(span.id)
            if recorded is not None:
                ids = np.asarray(recorded, dtype=np.int64)
            else:
                ids = _random(self._seed, span.id).integers(self._low, self._high, span.tokens, dtype=np.int64)
                if span.tokens:
                    ids[0] = self._first[span.id]
            self._known[span.id] = ids
        return ids

    def _firsts(self, contents: Iterable[Content]) -> dict[str, int]:
        """First token of each span, different from those of all spans that follow one of its prefixes."""
        places: dict[str, list[int]] = {}
        nodes: dict[tuple[int, str], int] = {}
        for content in contents:
            at = 0
            for span in content:
                if not span.tokens:
                    continue
                key = (at, span.id)
                node = nodes.get(key)
                if node is None:
                    node = nodes[key] = len(nodes) + 1
                    places.setdefault(span.id, []).append(at)
                at = node
        taken: dict[int, set[int]] = {}
        first: dict[str, int] = {}
        for span_id, before in places.items():
            recorded = self._recorded.get(span_id)
            if recorded:
                for at in before:
                    taken.setdefault(at, set()).add(recorded[0])
        for span_id, before in places.items():
            if span_id not in self._recorded:
                sets = [taken.setdefault(at, set()) for at in before]
                first[span_id] = token = self._free(span_id, sets)
                for used in sets:
                    used.add(token)
        return first

    def _free(self, span_id: str, taken: list[set[int]]) -> int:
        size = self._high - self._low
        start = int(_random(self._seed, span_id, "first").integers(size))
        for step in range(size):
            token = self._low + (start + step) % size
            if not any(token in used for used in taken):
                return token
        raise UsageError(f"more spans follow one prefix than the {size} made-up token ids can tell apart: raise high")


def _random(seed: int, *key: Any) -> np.random.Generator:
    digest = hashlib.blake2b(repr((seed, *key)).encode(), digest_size=16).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest, "little")))
