"""What goes in and out of KV correction: a segment's KV, the edge it travels on, an estimate or a refusal.

A *segment* is a run of tokens that several agents' prompts share (a user's question, another agent's answer). Its KV
differs under each agent's prefix. An *edge* is one way of a segment through a workflow: the slot it fills, the agent
whose KV is at hand, the agent that wants it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch

__all__ = ["CONTEXT_FREE", "Correction", "Edge", "Estimate", "Refusal", "SegmentKV"]

#: The source of an edge whose reference is the segment prefilled alone, at position 0, by nobody in the workflow.
CONTEXT_FREE = ""


class SegmentKV(NamedTuple):
    """KV of a segment, at positions ``start`` to ``start + tokens - 1``.

    ``keys`` and ``values`` have the shape (layers, tokens, KV heads, head size), any float type, any device. Keys
    are as an engine stores them: rotated for their positions.
    """

    keys: torch.Tensor
    values: torch.Tensor
    start: int

    @property
    def tokens(self) -> int:
        """How many tokens it holds."""
        return int(self.keys.shape[1])

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.start + self.tokens

    @property
    def nbytes(self) -> int:
        """Bytes of both tensors."""
        return int(self.keys.nbytes + self.values.nbytes)

    def part(self, first: int, end: int) -> SegmentKV:
        """A view of the tokens ``first`` to ``end - 1``, counted from the segment's first."""
        return SegmentKV(self.keys[:, first:end], self.values[:, first:end], self.start + first)


class Edge(NamedTuple):
    """A shared segment's way from one agent to another.

    ``slot`` names the place that the segment fills in prompts. ``source`` is the agent whose cache is the reference
    (:data:`CONTEXT_FREE` for none), ``target`` the agent that wants the segment under its own prefix.
    """

    slot: str
    source: str
    target: str


class Refusal(NamedTuple):
    """No estimate: prefill the segment densely. ``reason`` is a short fixed text that can be counted."""

    reason: str
    terms: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The KV that a segment would have under the target's prefix, as far as it can be told without a forward pass.

    ``kv`` is for the target's positions, in the source's float type and on its device, and shares no memory with it.
    ``recompute`` are offsets in the segment, sorted, whose KV is to be computed through the model with everything
    before them in place, estimated tokens included. Either run by run (``runs`` groups them, in order), or all in one
    pass in which each layer first writes the new KV of all of them into the segment's slots and each token then looks
    at the slots up to its own, as a decode batch does whose rows share those slots: the result is the same.
    ``confidence`` lies in [0, 1], more is better. ``terms`` are the numbers behind it, for the log of decisions.
    """

    kv: SegmentKV
    recompute: tuple[int, ...]
    confidence: float
    method: str
    terms: Mapping[str, float] = field(default_factory=dict)

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """``recompute`` as runs of neighbours, each (first offset, offset after the last): one extend pass each."""
        out: list[tuple[int, int]] = []
        for offset in self.recompute:
            if out and out[-1][1] == offset:
                out[-1] = (out[-1][0], offset + 1)
            else:
                out.append((offset, offset + 1))
        return tuple(out)

    @property
    def reused(self) -> int:
        """Tokens that are taken as estimated."""
        return self.kv.tokens - len(self.recompute)


class Correction(Protocol):
    """Turns one agent's KV of a segment into another's. ``Corrector`` implements it.

    One thread at a time. Nothing here runs the model. Memory is bounded. Every call is safe to leave out: a lost
    ``learn`` or ``drifted`` costs quality of later estimates, nothing else.
    """

    def estimate(
        self, edge: Edge, token_ids: Sequence[int], source: SegmentKV, start: int, *, exact: int = 0
    ) -> Estimate | Refusal:
        """The target's KV at positions from ``start``, out of ``source``, or why it cannot be told.

        The first ``exact`` tokens are known to be right (or will be computed anyway) and count as no saving.
        Raises UsageError when shapes do not fit the model or each other.
        """
        ...

    def learn(self, edge: Edge, token_ids: Sequence[int], source: SegmentKV, target: SegmentKV) -> bool:
        """Take both agents' KV of a segment, the target's from a dense prefill, as a candidate for an anchor.

        Copies the tensors and returns; :meth:`work` makes the anchor. False when it was not taken: the queue is
        full, the edge has this segment already, or the method needs no anchors.
        """
        ...

    def work(self, *, until: Callable[[], bool] | None = None) -> int:
        """Do what ``learn`` put off (truncated SVDs, bases), piece by piece until ``until()``; how much is left."""
        ...

    def drifted(self, edge: Edge, kl: float, agreement: float, *, confidence: float | None = None) -> bool:
        """A corrected call was run again densely: how far they were apart. True when the edge is (now) turned off.

        ``kl`` is the mean KL(dense || corrected) over compared positions in nats, ``agreement`` the share of
        positions with the same most likely token, ``confidence`` that of the estimate.
        """
        ...

    def stats(self) -> Mapping[str, float]:
        """Counts, bytes and thresholds since the start."""
        ...
