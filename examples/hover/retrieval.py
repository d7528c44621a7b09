"""BM25 search over passages."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import bm25s

from agentflow.errors import UsageError
from examples.hover.data import Passage

__all__ = ["Found", "Index"]


class Found(NamedTuple):
    """A passage that a search found, with its BM25 score (higher is better)."""

    passage: Passage
    score: float


class Index:
    """A BM25 index in memory over titles and texts. Searching is thread-safe and takes well under a millisecond
    for a few thousand passages; a whole Wikipedia of openings (5 million) wants some 20 GB and minutes to build.
    """

    def __init__(self, passages: Iterable[Passage]) -> None:
        self.passages: Sequence[Passage] = list(passages)
        if not self.passages:
            raise UsageError("an index needs at least one passage")
        # The title counts twice: an article about a thing should win over one that mentions it.
        texts = [_fold(f"{p.title} {p.title} {p.text}") for p in self.passages]
        self._index = bm25s.BM25()
        self._index.index(bm25s.tokenize(texts, show_progress=False), show_progress=False)

    def __len__(self) -> int:
        return len(self.passages)

    def search(self, query: str, *, k: int = 3) -> list[Found]:
        """The ``k`` best passages with a score above 0, best first; none for a query without a known word."""
        tokens = bm25s.tokenize([_fold(query)], return_ids=False, show_progress=False)
        ids, scores = self._index.retrieve(tokens, k=min(k, len(self.passages)), show_progress=False)
        return [
            Found(self.passages[int(i)], float(s)) for i, s in zip(ids[0], scores[0], strict=True) if float(s) > 0.0
        ]


def _fold(text: str) -> str:
    """Text without accents, so that a query typed on a plain keyboard finds Dvořák."""
    return "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
