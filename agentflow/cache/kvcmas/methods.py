"""Methods by name: an estimator, how anchors are kept for it, and what is recomputed beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from agentflow.cache.kvcmas.estimators import Estimator
from agentflow.cache.kvcmas.kernel import TokenKernel
from agentflow.cache.kvcmas.kvcomm import KVComm
from agentflow.cache.kvcmas.recompute import Choice
from agentflow.cache.kvcmas.ridge import Ridge
from agentflow.cache.kvcmas.segment import SegmentSum
from agentflow.cache.kvcmas.token_id import TokenId
from agentflow.errors import UsageError

__all__ = ["METHODS", "Method", "method"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """``estimator`` None adds nothing. ``low_rank`` False keeps anchors in full dimension. ``derotated`` False leaves
    keys as they are rotated at the target's positions. ``base_share`` is the bases' part of the rank: with r the rank,
    bases get ``base_share * r`` and differences ``(2 - base_share) * r``, which takes the same room for any share.
    ``recompute`` and ``choice`` are used unless told otherwise."""

    title: str
    estimator: Estimator | None = None
    low_rank: bool = True
    derotated: bool = True
    base_share: float = 1.0
    recompute: float = 0.0
    choice: Choice = "change"


METHODS: Mapping[str, Method] = {
    "none": Method(title="reuse unchanged, keys moved (FullShared)"),
    "cacheblend": Method(title="reuse unchanged, part of the tokens recomputed", recompute=0.15, choice="first"),
    "kvcomm": Method(
        title="KVComm as released: full-dimension anchors, rotated keys",
        estimator=KVComm(), low_rank=False, derotated=False,
    ),
    "kvcomm-derotated": Method(
        title="KVComm with de-rotated keys", estimator=KVComm(), low_rank=False
    ),
    "segment": Method(title="KVCMAS: weighted sum of low-rank deltas", estimator=SegmentSum()),
    "token-id": Method(title="mean delta of the same token", estimator=TokenId()),
    "ridge": Method(title="ridge regression on principal components", estimator=Ridge()),
    "token-kernel": Method(
        title="kernel regression token by token",
        estimator=TokenKernel(), base_share=0.75, recompute=0.20, choice="first",
    ),
}  # fmt: skip


def method(name: str) -> Method:
    """By its name in :data:`METHODS`. Raises UsageError for others."""
    if name not in METHODS:
        raise UsageError(f"no KV correction method {name!r}; known: {', '.join(METHODS)}")
    return METHODS[name]
