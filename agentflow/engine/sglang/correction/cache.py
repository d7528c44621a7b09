"""The radix cache with corrected KV: where it enters, how it is keyed, and when it is kept for others."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from agentflow.engine.sglang.correction.manager import Corrections, Wish, wish_of
from agentflow.engine.sglang.correction.namespace import marked, with_key
from agentflow.engine.sglang.correction.options import CorrectionOptions
from agentflow.engine.sglang.radix_cache import AgentRadixCache
from agentflow.events import Event, WorkflowEnded

__all__ = ["CorrectingRadixCache"]

logger = logging.getLogger("agentflow.engine")


class CorrectingRadixCache(AgentRadixCache):
    """Exact calls see no difference. Calls that opted in may match KV that is approximate, and leave such KV."""

    #: Boundary and namespace of the request whose KV is being inserted.
    _inserting: tuple[int, int] | None = None

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.corrections = Corrections(self, CorrectionOptions.from_environment())

    def reset(self) -> None:
        if (corrections := getattr(self, "corrections", None)) is not None:
            corrections.forget()
        super().reset()

    def observe(self, events: Sequence[Event], refused: int, **more: Any) -> None:
        super().observe(events, refused, **more)
        for event in events:
            if isinstance(event, WorkflowEnded):
                self.corrections.sources.ended(event.workflow)

    def arrived(self, req: Any) -> None:
        if getattr(req, "agentflow", None) is not None:
            return
        super().arrived(req)
        state = req.agentflow
        if state.hint is not None and state.hint.reuse == "corrected":
            state.correction = self.corrections.wish(req, state.hint)

    # -- keys ------------------------------------------------------------------------------------------

    def match_prefix(self, params: Any) -> Any:
        """The longest that a request may use: exact KV, or for one that opted in approximate KV of the same tokens."""
        result = super().match_prefix(params)
        wish = wish_of(params.req) if params.req is not None else None
        if wish is None or self.disable:
            return result
        wish.boundary = None
        wish.namespace = self.corrections.namespace
        best, boundary = _length(result), None
        for place in self._branches(params.key, result):
            candidate = super().match_prefix(with_key(params, place, self.corrections.namespace))
            if _length(candidate) > best:
                result, best, boundary = candidate, _length(candidate), place
        wish.boundary = boundary
        return result

    def _branches(self, key: Any, result: Any) -> list[int]:
        """Positions where approximate KV of the same tokens hangs on the exact path."""
        core = self.tree_core
        path = []
        node = core.node_by_id(result.best_match_node)
        while node is not core.root_node:
            path.append(node)
            node = node.parent
        all_marked = type(key)(
            marked(key.token_ids, 0, self.corrections.namespace), key.extra_key, cache_salt=key.cache_salt
        )
        out = []
        at = 0
        for node in (core.root_node, *reversed(path)):
            at += len(node.key) if node is not core.root_node else 0
            if at < len(key) and all_marked.child_key_at(at, self.page_size) in node.children:
                out.append(at)
        return out

    def insert(self, params: Any) -> Any:
        if self._inserting is None:
            return super().insert(params)
        boundary, namespace = self._inserting
        params = with_key(params, boundary, namespace)
        result = super().insert(params)
        if 0 < boundary < len(params.key):
            # Part the node there: exact KV shares none with approximate. What is inserted is in the tree already.
            head = replace(
                params,
                key=params.key[:boundary],
                value=params.value[:boundary],
                prev_prefix_len=boundary,
                inserted_len=boundary,
            )
            super().insert(head)
        return result

    def checkpoint_into_tree(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        wish = wish_of(req)
        if wish is None:
            super().checkpoint_into_tree(req, up_to=up_to, **kwargs)
            return
        if wish.boundary is not None:
            self._inserting = (wish.boundary, wish.namespace)
        try:
            super().checkpoint_into_tree(req, up_to=up_to, **kwargs)
        finally:
            self._inserting = None
        self._computed(req, wish, up_to)

    def _computed(self, req: Any, wish: Wish, up_to: int) -> None:
        if self.disable:
            return
        try:
            self.corrections.computed(req, wish, up_to)
        except Exception:  # bookkeeping must not fail a request
            self.runtime.counters["internal_errors"] += 1
            logger.exception("noting KV of request %s failed; the request is not affected", req.rid)

    def left(self, req: Any) -> None:
        super().left(req)
        wish = wish_of(req)
        if wish is not None:
            if wish.watch is not None and req.finished() and wish.namespace == self.corrections.namespace:
                self.corrections.checks.finished(req, wish.watch, wish.edges)
            wish.plan = None  # its KV is in the pool, or not wanted any more


def _length(result: Any) -> int:
    return int(result.device_prefix_len) + int(result.host_hit_length)
