"""The record that every decision leaves behind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["Decision", "DecisionKind", "DecisionOutcome"]

DecisionKind = Literal[
    "evict", "evict_host", "demote", "pin", "release", "prefetch", "warm", "adapter", "correct", "fallback", "reject"
]
DecisionOutcome = Literal["used", "wasted", "regretted"]


@dataclass(slots=True, kw_only=True)
class Decision:
    """One decision about cached KV (or about a call), why it was taken, and later what came of it.

    ``seq`` grows by one with each decision of an engine; ``time`` is in seconds since the epoch; ``tokens``
    is how many tokens of KV it concerns; ``workflows`` and ``agents`` are those that had used them;
    ``request`` is the call (or the prefetch) for which it was taken, if any; ``terms`` holds the numbers it was
    based on.
    """

    seq: int
    time: float
    kind: DecisionKind
    policy: str
    reason: str
    tokens: int = 0
    node: int | None = None
    workflows: tuple[str, ...] = ()
    agents: tuple[str, ...] = ()
    request: str | None = None
    terms: Mapping[str, float] = field(default_factory=dict)
    outcome: DecisionOutcome | None = None

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict; empty fields are left out."""
        out: dict[str, Any] = {"seq": self.seq, "time": self.time, "kind": self.kind, "policy": self.policy}
        out["reason"] = self.reason
        if self.tokens:
            out["tokens"] = self.tokens
        if self.node is not None:
            out["node"] = self.node
        if self.workflows:
            out["workflows"] = list(self.workflows)
        if self.agents:
            out["agents"] = list(self.agents)
        if self.request is not None:
            out["request"] = self.request
        if self.terms:
            out["terms"] = dict(self.terms)
        if self.outcome is not None:
            out["outcome"] = self.outcome
        return out

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Decision:
        """The inverse of :meth:`to_json`; unknown keys are ignored."""
        return cls(
            seq=data["seq"],
            time=data["time"],
            kind=data["kind"],
            policy=data["policy"],
            reason=data["reason"],
            tokens=data.get("tokens", 0),
            node=data.get("node"),
            workflows=tuple(data.get("workflows", ())),
            agents=tuple(data.get("agents", ())),
            request=data.get("request"),
            terms=dict(data.get("terms", {})),
            outcome=data.get("outcome"),
        )
