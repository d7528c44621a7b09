"""Effects of policies, carried out in the simulated cache as an engine does between its steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from agentflow.bench.simulator.tree import Node, Tree
from agentflow.cache.policy import Effect, Prefetch, WarmUp

__all__ = ["carry_out"]


def carry_out(
    tree: Tree,
    effects: Sequence[Effect],
    load: Callable[[Node, int], object],
    warm_up: Callable[[WarmUp], bool] | None = None,
) -> None:
    """Carry out what can be, highest value first; the rest is counted as refused.

    ``load(node, tokens)`` starts the transfer of a path whose slots are taken, and holds it until that is done;
    ``warm_up`` sends a request that computes an anchor. Adapters are not simulated.
    """
    for effect in sorted(effects, key=lambda e: -e.value):
        if not isinstance(effect, Prefetch):
            if not isinstance(effect, WarmUp) or warm_up is None or not warm_up(effect):
                tree.runtime.counters["effects_refused"] += 1
            continue
        tree.cause = f"prefetch of node {effect.node}"
        done = _prefetch(tree, effect, load)
        tree.cause = None
        tree.runtime.counters["prefetches" if done else "prefetches_refused"] += 1


def _prefetch(tree: Tree, effect: Prefetch, load: Callable[[Node, int], object]) -> bool:
    node = tree.nodes.get(effect.node)
    if node is None or node.device:
        return False
    path: list[Node] = []
    above = node
    while not above.device:
        path.append(above)
        assert above.parent is not None
        above = above.parent
    needed = sum(n.tokens for n in path)
    if not _make_room(tree, needed, effect, above) or not tree.load_back(node):
        return False
    load(node, needed)
    decision = tree.runtime.log.add(
        "prefetch",
        time=tree.runtime.clock(),
        policy=tree.runtime.name,
        reason=effect.reason,
        tokens=needed,
        node=effect.node,
        workflows=tuple(dict.fromkeys(t.workflow.id for t in list(node.record.owners)[:8])),
        terms={"value": effect.value},
    )
    for loaded in path:
        loaded.record.prefetched_by = decision.seq
    return True


def _make_room(tree: Tree, needed: int, effect: Prefetch, anchor: Node) -> bool:
    """Have ``needed`` tokens free, displacing no more than the effect allows.

    Retired leaves go one by one, lowest first, and stay gone when they do not suffice. ``anchor``, the node that the
    load hangs on, is kept.
    """
    if tree.free >= needed:
        return True
    if effect.displace == "nothing":
        return False
    if effect.displace == "active":
        return True  # load_back evicts for itself, in the policies' order
    ledger = tree.runtime.ledger
    return tree.make_room(needed, gives_way=lambda lowest: lowest is not anchor and not ledger.is_live(lowest.record))
