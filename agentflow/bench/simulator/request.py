"""A call in the simulated engine."""

from __future__ import annotations

from typing import Literal

from agentflow.bench.simulator.content import Content
from agentflow.bench.simulator.tree import Node
from agentflow.cache.ledger import CallRef

__all__ = ["Request"]


class Request:
    """A call in the engine. Tokens are counted as in SGLang: the KV of the last token sampled is never computed."""

    __slots__ = (
        "admitted", "anchor", "arrived", "cached_device", "cached_host", "call", "content", "filled", "finished",
        "first_token", "inserted", "internal", "joined", "limit", "node", "outcome", "prefix", "private", "produced",
        "prompt", "protected", "retracted", "rid", "target", "tie", "token_limit",
    )  # fmt: skip

    def __init__(
        self, rid: str, content: Content, prompt: int, answer: int, arrived: float, *, anchor: int = 0
    ) -> None:
        self.rid = rid
        #: Number of the anchor that it begins with, and how many tokens that has; whether it only computes that.
        self.anchor = (0, anchor)
        self.internal = False
        self.content = content
        self.prompt = prompt
        #: Tokens that it will produce, and the limit that it asked for.
        self.target = answer
        self.token_limit = answer
        self.arrived = arrived
        self.call = CallRef(None)
        self.outcome: Literal["done", "rejected", "aborted"] = "done"
        self.admitted = -1.0
        self.first_token = -1.0
        self.finished = -1.0
        self.cached_device = 0
        self.cached_host = 0
        self.retracted = 0
        self.produced = 0
        #: The decode step count of the engine when it joined the running batch.
        self.joined = 0
        #: Its place in the order of joining; 0 while it is not in the running batch.
        self.tie = 0
        #: Tokens found in the cache, tokens with KV after the current pass, tokens of its prompt to fill now.
        self.prefix = 0
        self.filled = 0
        self.limit = prompt
        #: Tokens that the tree holds for it, how many were counted as hits, slots of its own.
        self.protected = 0
        self.inserted = 0
        self.private = 0
        self.node: Node | None = None
