"""Anchors in the simulated engine: which prompts begin with one, and computing one ahead."""

from __future__ import annotations

from collections import Counter, OrderedDict

from agentflow.bench.simulator.content import Content
from agentflow.bench.simulator.tree import Tree
from agentflow.bench.traces.model import Trace, TraceCall
from agentflow.cache.policy import WarmUp

__all__ = ["Anchors", "anchor_lengths", "anchor_of"]


def anchor_lengths(trace: Trace) -> dict[str, int]:
    """Per first span of a prompt that several workflows begin with: its tokens. The rest has no anchor.

    Traces do not say where an agent's own text ends; what workflows that have nothing else in common begin with is it.
    """
    users: Counter[str] = Counter()
    lengths: dict[str, int] = {}
    for workflow in trace.workflows:
        first = {c.prompt[0].id: c.prompt[0].tokens for c in workflow.calls if c.prompt}
        users.update(first.keys())
        lengths.update(first)
    return {span: lengths[span] for span, n in users.items() if n > 1}


def anchor_of(call: TraceCall, lengths: dict[str, int]) -> int:
    """Tokens of the call's anchor, 0 for none."""
    return lengths.get(call.prompt[0].id, 0) if call.prompt else 0


class Anchors:
    """The anchors that an engine saw, the newest 256, as in the real one."""

    LIMIT = 256

    def __init__(self) -> None:
        self._known: OrderedDict[int, tuple[Content, int]] = OrderedDict()
        self._sent = 0

    def seen(self, content: Content, tokens: int) -> int:
        """The number of the anchor that a content begins with; 0 for none."""
        if tokens <= 0:
            return 0
        key = content.link_at(tokens - 1)
        self._known[key] = (content, tokens)
        self._known.move_to_end(key)
        if len(self._known) > self.LIMIT:
            self._known.popitem(last=False)
        return key

    def ahead(self, tree: Tree, effect: WarmUp) -> tuple[str, Content, int] | None:
        """The id, content and tokens of a request that computes an anchor ahead; None when there is nothing to do, or
        no room for it."""
        content, tokens = self._known.get(effect.anchor, (None, 0))
        if content is None:
            return None
        missing = tokens - on_device(tree, content, tokens)
        if missing <= 0:
            return None
        ledger = tree.runtime.ledger
        if effect.displace == "nothing" and tree.free <= missing:
            return None
        if effect.displace == "retired" and not tree.make_room(
            missing + 1, gives_way=lambda lowest: not ledger.is_live(lowest.record)
        ):
            return None
        self._sent += 1
        rid = f"warm-up-{self._sent}"
        tree.runtime.log.add(
            "warm",
            time=tree.runtime.clock(),
            policy=tree.runtime.name,
            reason=effect.reason,
            tokens=missing,
            request=rid,
            terms={"value": effect.value},
        )
        tree.runtime.counters["warm_ups"] += 1
        tree.runtime.counters["warm_up_tokens"] += missing
        return rid, content, tokens


def on_device(tree: Tree, content: Content, tokens: int) -> int:
    """How many of the first ``tokens`` are on the device. Counts as no use of them."""
    node, at = tree.root, 0
    while at < tokens:
        child = node.children.get(content.link_at(at))
        if child is None or not child.device:
            break
        at = content.common(child.content, min(child.end, tokens))
        if at < child.end:
            break
        node = child
    return at
