"""The radix tree of one simulated engine: SGLang's unified radix cache without the KV.

Kept as there: compressed nodes that are cut where prompts part; locks along the path of a running request;
eviction of leaves first, a parent following its last child; a host tier written through on a node's first
hit, with demotion, load-back and its own eviction; and the order in which recency is given out.
Page size is 1 token.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

from agentflow.bench.simulator.config import EngineSpec
from agentflow.bench.simulator.content import Content
from agentflow.cache.decision import DecisionKind
from agentflow.cache.leaves import Leaves, Scoring
from agentflow.cache.ledger import CallRef, NodeRecord
from agentflow.cache.policy import Score, Touched
from agentflow.runtime import Runtime

__all__ = ["Match", "Node", "Tree"]

#: Evicted paths remembered to tell regret. An engine remembers fewer, because there each holds its tokens.
GHOSTS = 200_000


class Node:
    """Tokens ``start`` to ``end`` of ``content``, and where their KV is."""

    __slots__ = (
        "children", "content", "device", "device_children", "end", "hits", "host", "lock", "parent", "recency",
        "record", "start",
    )  # fmt: skip

    def __init__(self, parent: Node | None, content: Content, start: int, end: int, record: NodeRecord) -> None:
        self.parent = parent
        self.content = content
        self.start = start
        self.end = end
        self.record = record
        self.children: dict[int, Node] = {}
        self.device = False
        self.host = False
        #: Children with KV on the device.
        self.device_children = 0
        self.lock = 0
        self.hits = 0
        self.recency = 0.0

    @property
    def tokens(self) -> int:
        """Its own tokens."""
        return self.end - self.start


class Match:
    """What a prompt finds: ``device`` tokens down to ``node``, then ``host`` tokens down to ``best``."""

    __slots__ = ("best", "device", "host", "node")

    def __init__(self, node: Node, device: int, best: Node, host: int) -> None:
        self.node = node
        self.device = device
        self.best = best
        self.host = host


class Tree:
    """The cache of one engine. ``free`` counts device slots that hold nothing, ``host_free`` those of the host."""

    def __init__(self, spec: EngineSpec, runtime: Runtime) -> None:
        self.spec = spec
        self.runtime = runtime
        self.free = spec.pool_tokens
        self.host_free = spec.host_tokens
        #: Tokens on the device that could be evicted, and that are locked by running requests or transfers.
        self.evictable = 0
        self.protected = 0
        #: The request for which room is being made.
        self.cause: str | None = None
        #: Nodes by the number of their record.
        self.nodes: dict[int, Node] = {}
        #: Nodes to copy to the host, with the tokens of each; the engine times them and unlocks them when done.
        self.writes: list[Node] = []
        self._tick = 0.0
        self._last_id = 0
        self._ghosts: OrderedDict[tuple[int, int], tuple[Content, int, int]] = OrderedDict()
        self.root = Node(None, Content([], []), 0, 0, NodeRecord(0, 0, runtime.clock()))
        self.root.device = True
        self.root.lock = 1
        scoring = Scoring.ALWAYS
        if not runtime.ranks_nodes:
            scoring = Scoring.RECENCY
        elif runtime.scores_by_owner:
            scoring = Scoring.BY_OWNER
        self.device_leaves = Leaves(self._score, scoring, clock=runtime.clock)
        self.host_leaves = Leaves(self._score, scoring, clock=runtime.clock)
        self._stamp = self._policies()

    # -- what the engine asks --------------------------------------------------------------------------

    def match(self, content: Content, limit: int) -> Match:
        """Find the longest beginning of the first ``limit`` tokens. Counts as a use of it, and cuts a node that
        holds more than matches."""
        node = self.root
        at = 0
        while at < limit:
            child = node.children.get(content.link_at(at))
            if child is None:
                break
            common = content.common(child.content, min(child.end, limit))
            if common < child.end:
                node = self._split(child, common)
                break
            node = child
            at = child.end
        best = node
        tick = self._next_tick()
        above: Node | None = best
        while above is not None:
            self._used(above, tick)
            tick -= 0.00001
            above = above.parent
        device = best
        while not device.device:
            assert device.parent is not None
            device = device.parent
        return Match(device, device.end, best, best.end - device.end)

    def insert(
        self, content: Content, end: int, *, protected: int, inserted: int, known: Node | None = None
    ) -> tuple[Node, int]:
        """Take in the first ``end`` tokens, of which the request computed those from ``protected`` on.

        ``inserted`` tokens were counted as a hit for this request before. ``known`` is a locked node on the path,
        if there is one: what is above it need not be searched. Returns the last node, and how many of the request's
        slots held what the tree has already: they are free again.
        """
        node = self.root
        self.root.recency = self._next_tick()
        at = 0
        duplicates = 0
        if known is not None and known is not node:
            for node in self._path(known):
                node.recency = self._next_tick()
                if node.end > inserted:
                    self._hit(node)
            at = known.end
        while at < end:
            child = node.children.get(content.link_at(at))
            if child is None:
                break
            self._used(child, self._next_tick())
            common = content.common(child.content, min(child.end, end))
            node = self._split(child, common) if common < child.end else child
            if node.device:
                duplicates += max(0, node.end - max(at, protected))
            else:
                self._on_device(node)
            at = node.end
            if at > inserted:
                self._hit(node)
        if at < end:
            leaf = self._new(node, content, at, end)
            self._on_device(leaf)
            self._regret(content, at, end)
            node = leaf
            if end > inserted:
                self._hit(leaf)
        self.free += duplicates
        return node, duplicates

    def cut(self, node: Node, at: int) -> None:
        """Use the first ``at`` tokens of the path to the locked ``node``, and cut it there."""
        self.root.recency = self._next_tick()
        for above in self._path(node):
            if above.start >= at:
                break
            above.recency = self._next_tick()
            if above.end > at:
                self._split(above, at)

    def touch(self, node: Node, call: CallRef, anchor: tuple[int, int] = (0, 0)) -> None:
        """Note in the ledger that a call used the node and all above it, and which lie within its anchor: its number,
        and where it ends."""
        runtime = self.runtime
        ledger = runtime.ledger
        watches = runtime.watches_nodes
        at: Node | None = node
        while at is not None and at is not self.root:
            record = at.record
            ledger.touch(record, call)
            if at.end <= anchor[1]:
                record.anchor = anchor[0]
            if record.prefetched_by:
                runtime.settle(record.prefetched_by, "used", record.tokens)
                record.prefetched_by = 0
            if watches:
                runtime.observe(Touched(record, call))
            at = at.parent

    def warmed(self, node: Node, anchor: tuple[int, int]) -> None:
        """Note that the node and all above it were computed ahead, for nobody yet."""
        for at in self._path(node):
            if not at.record.owners and not at.record.anonymous:
                at.record.shared = True
                at.record.anchor = anchor[0]

    def lock(self, node: Node) -> None:
        """Keep the node and all above it from eviction."""
        at: Node | None = node
        while at is not None and at is not self.root:
            if at.lock == 0:
                if at.device:
                    tokens = at.end - at.start
                    self.evictable -= tokens
                    self.protected += tokens
                    self.device_leaves.discard(at.record)
                else:
                    self.host_leaves.discard(at.record)
            at.lock += 1
            at = at.parent

    def unlock(self, node: Node) -> None:
        """Undo one :meth:`lock` of the same node."""
        at: Node | None = node
        while at is not None and at is not self.root:
            at.lock -= 1
            if at.lock == 0:
                if at.device:
                    tokens = at.end - at.start
                    self.evictable += tokens
                    self.protected -= tokens
                self._update(at)
            at = at.parent

    def make_room(self, tokens: int, gives_way: Callable[[Node], bool] | None = None) -> bool:
        """Evict until ``tokens`` slots are free, nothing is left to evict, or the leaf to go next is one that does
        not give way. Says whether they are free."""
        if self.free >= tokens:
            return True
        if self.evictable <= 0:
            return False
        self._start(self.device_leaves)
        while self.free < tokens:
            record = self.device_leaves.lowest()
            if record is None or (gives_way is not None and not gives_way(self.nodes[record.id])):
                return False
            self.device_leaves.pop()
            self._evict(self.nodes[record.id])
        return True

    def load_back(self, node: Node) -> int:
        """Bring the node's KV, and that of its ancestors, back to the device. Returns the tokens to transfer, 0
        when there are too few or no room can be made. The caller locks what is in transfer."""
        tokens = 0
        chain: list[Node] = []
        at = node
        while not at.device:
            tokens += at.tokens
            chain.append(at)
            assert at.parent is not None
            at = at.parent
        if tokens < max(1, self.spec.load_back_threshold):
            return 0
        self.lock(node)
        room = self.make_room(tokens)
        if room:
            for at in reversed(chain):
                self.free -= at.tokens
                self._on_device(at)
        self.unlock(node)
        if not room:
            return 0
        above: Node | None = node
        while above is not None and above is not self.root:
            record = above.record
            if record.demoted_by:
                self.runtime.loaded(record)
            above = above.parent
        return tokens

    def changed(self, workflow: str) -> None:
        """Something of a workflow was observed."""
        self.device_leaves.changed(workflow)
        self.host_leaves.changed(workflow)

    # -- moving ----------------------------------------------------------------------------------------

    def _evict(self, node: Node) -> None:
        tokens = node.tokens
        kind: DecisionKind = "demote" if node.host else "evict"
        node.device = False
        self.free += tokens
        self.evictable -= tokens
        parent = node.parent
        assert parent is not None
        parent.device_children -= 1
        self._left(node, kind)
        if node.host:
            self._update(node)
        else:
            self._remove(node)
        self._update(parent)

    def _evict_host(self, tokens: int) -> bool:
        """Make ``tokens`` slots free on the host, if that can be done; what was dropped stays dropped."""
        self._start(self.host_leaves)
        while self.host_free < tokens:
            record = self.host_leaves.pop()
            if record is None:
                return False
            node = self.nodes[record.id]
            node.host = False
            self.host_free += node.tokens
            parent = node.parent
            assert parent is not None
            self._left(node, "evict_host")
            self._remove(node)
            self._update(parent)
        return True

    def _left(self, node: Node, kind: DecisionKind) -> None:
        record = node.record
        runtime = self.runtime
        if record.prefetched_by:
            runtime.settle(record.prefetched_by, "wasted", record.tokens)
            record.prefetched_by = 0
        decision = runtime.evicted(record, kind, request=self.cause)
        if kind == "demote":
            record.demoted_by = decision.seq
            return
        key = (node.start, node.content.link_at(node.start))
        self._ghosts.pop(key, None)
        self._ghosts[key] = (node.content, node.end, decision.seq)
        if len(self._ghosts) > GHOSTS:
            self._ghosts.popitem(last=False)

    def _regret(self, content: Content, at: int, end: int) -> None:
        """Tokens ``at`` to ``end`` were computed: settle the evictions that made it necessary."""
        while at < end and self._ghosts:
            ghost = self._ghosts.pop((at, content.link_at(at)), None)
            if ghost is None:
                return
            held, until, seq = ghost
            common = content.common(held, min(until, end))
            self.runtime.settle(seq, "regretted", common - at)
            if common < until:
                return
            at = common

    def _hit(self, node: Node) -> None:
        node.hits += 1
        if not self.spec.host_tokens or node.host or node.hits < self.spec.write_through_threshold:
            return
        chain: list[Node] = []
        at: Node | None = node
        while at is not None and at is not self.root and not at.host:
            chain.append(at)
            at = at.parent
        for at in reversed(chain):
            if self.host_free < at.tokens and not self._evict_host(at.tokens):
                return
            self.host_free -= at.tokens
            at.host = True
            self.lock(at)
            self.writes.append(at)

    def _on_device(self, node: Node) -> None:
        node.device = True
        if node.parent is not None:
            node.parent.device_children += 1
        if node.lock:
            self.protected += node.tokens
        else:
            self.evictable += node.tokens
        self.host_leaves.discard(node.record)
        self._update(node)
        if node.parent is not None:
            self._update(node.parent)

    def _path(self, node: Node) -> list[Node]:
        """The nodes from the first below the root down to ``node``."""
        path: list[Node] = []
        at: Node | None = node
        while at is not None and at is not self.root:
            path.append(at)
            at = at.parent
        path.reverse()
        return path

    # -- nodes -----------------------------------------------------------------------------------------

    def _new(self, parent: Node, content: Content, start: int, end: int) -> Node:
        self._last_id += 1
        record = NodeRecord(self._last_id, end - start, self.runtime.clock())
        node = Node(parent, content, start, end, record)
        record.path_hash = content.link_at(end - 1)
        node.recency = self._next_tick()
        parent.children[content.link_at(start)] = node
        self.nodes[record.id] = node
        return node

    def _split(self, child: Node, at: int) -> Node:
        """Cut ``child`` at token ``at``; returns the new node above it."""
        parent = child.parent
        assert parent is not None
        self._last_id += 1
        head = Node(parent, child.content, child.start, at, child.record.split(self._last_id, at - child.start))
        head.record.path_hash = child.content.link_at(at - 1)
        head.device = child.device
        head.host = child.host
        head.lock = child.lock
        head.hits = child.hits
        head.recency = self._next_tick()
        head.children[child.content.link_at(at)] = child
        head.device_children = int(child.device)
        parent.children[child.content.link_at(child.start)] = head
        child.parent = head
        child.start = at
        self.nodes[head.record.id] = head
        self._used(child, self._next_tick())
        return head

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[node.content.link_at(node.start)]
        del self.nodes[node.record.id]

    def _update(self, node: Node) -> None:
        """Put the node among the leaves of its tier, or take it out."""
        if node.lock:
            return
        if node.device:
            if node.device_children == 0:
                self.device_leaves.add(node.record, node.recency)
            else:
                self.device_leaves.discard(node.record)
        elif node.host and not node.children:
            self.host_leaves.add(node.record, node.recency)

    def _used(self, node: Node, tick: float) -> None:
        node.recency = tick
        if not node.lock and not node.device_children:
            (self.device_leaves if node.device else self.host_leaves).touch(node.record, tick)

    def _next_tick(self) -> float:
        self._tick += 1.0
        return self._tick

    # -- order -----------------------------------------------------------------------------------------

    def _score(self, record: NodeRecord) -> Score:
        return self.runtime.score_node(record, 0.0)[:-1]

    def _start(self, leaves: Leaves) -> None:
        stamp = self._policies()
        if stamp != self._stamp:
            self._stamp = stamp
            self.device_leaves.refresh()
            self.host_leaves.refresh()
        leaves.start()

    def _policies(self) -> tuple[int, int]:
        """Changes when scores may have changed with nothing observed: a policy left out, a workflow forgotten."""
        return len(self.runtime.policies), self.runtime.ledger.dropped_workflows

    def check(self) -> list[str]:
        """What does not add up, for tests: slots, locks and leaves."""
        problems: list[str] = []
        device = host = evictable = 0
        leaves: set[int] = set()
        host_leaves: set[int] = set()
        for node in self._all():
            if node.record.tokens != node.tokens or node.tokens <= 0:
                problems.append(f"node {node.record.id} holds {node.tokens}, its record says {node.record.tokens}")
            if not node.device and not node.host:
                problems.append(f"node {node.record.id} is nowhere")
            assert node.parent is not None
            if node.device and not node.parent.device:
                problems.append(f"node {node.record.id} is on the device, its parent is not")
            if node.lock < max((c.lock for c in node.children.values()), default=0):
                problems.append(f"node {node.record.id} is locked less than a child")
            if sum(c.device for c in node.children.values()) != node.device_children:
                problems.append(f"node {node.record.id} counts its children on the device wrong")
            device += node.tokens * node.device
            host += node.tokens * node.host
            evictable += node.tokens * (node.device and not node.lock)
            if node.device and not node.lock and not node.device_children:
                leaves.add(node.record.id)
            if node.host and not node.device and not (node.lock or node.children):
                host_leaves.add(node.record.id)
        if device != self.evictable + self.protected or evictable != self.evictable:
            problems.append(f"device {device} of which {evictable} evictable; counted {self.evictable, self.protected}")
        if host + self.host_free != self.spec.host_tokens:
            problems.append(f"host {host} + free {self.host_free} is not {self.spec.host_tokens}")
        if leaves != {r.id for r in self.device_leaves}:
            problems.append("device leaves are wrong")
        if host_leaves != {r.id for r in self.host_leaves}:
            problems.append("host leaves are wrong")
        return problems

    def _all(self) -> Iterator[Node]:
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node
