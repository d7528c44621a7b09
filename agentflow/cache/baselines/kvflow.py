"""KVFlow (arXiv 2507.07400): eviction and prefetch by steps to an agent's next invocation."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

from agentflow.cache.ledger import Ledger, NodeRecord, Thread, Workflow
from agentflow.cache.policy import (
    CallArrived,
    CallFinished,
    Evicted,
    Explanation,
    Observation,
    Policy,
    Prefetch,
    Score,
    Touched,
)
from agentflow.events import AgentEnded, AgentStarted, WorkflowEnded

__all__ = ["KVFlow", "KVFlowOracle", "START"]

#: The node of ``edges`` from which a workflow begins, as LangGraph spells it.
START = "__start__"
_HOST_NODES = 16_384


class KVFlow(Policy):
    """The paper's and the released rules, with the distances of a static step graph.

    ``edges`` maps an agent to the agents that may follow it (``__start__`` to the first ones). The steps of an
    agent are the shortest way in it from the agent that runs now (which itself has 0 while it runs, and its
    shortest way back to itself after). A node's hold value is the minimum over the agents attached to it of
    min(limit + 1, steps); agents of ended workflows, unreachable and unknown ones have limit + 1. The farthest
    goes first. ``ties``: ``recency`` as in the paper; ``none`` as in the released code, where equals go in the
    order in which they were made. KV on the host of agents one step away is prefetched, once, into space
    that is free.
    """

    name = "kvflow"
    scores_by_owner = True

    def __init__(
        self,
        ledger: Ledger,
        clock: Callable[[], float],
        *,
        edges: Mapping[str, Sequence[str]] | None = None,
        limit: int = 8,
        ties: Literal["recency", "none"] = "recency",
        distances: Literal["static"] = "static",
        prefetch: bool = True,
    ) -> None:
        super().__init__(ledger, clock)
        if limit < 1:
            raise ValueError("limit must be at least 1")
        if ties not in ("recency", "none"):
            raise ValueError("ties must be 'recency' or 'none'")
        if distances != "static":
            raise ValueError("distances must be 'static'; the variant told the truth is named kvflow-oracle")
        self.limit = limit
        self._ties = ties
        self._prefetching = prefetch
        self._tables = _all_distances(edges or {}, limit)
        #: The agent that each workflow runs, and whether only a call tells so (then its end tells the end).
        self._running: OrderedDict[str, tuple[str | None, bool]] = OrderedDict()
        self._host = _HostNodes(_HOST_NODES)
        self._due: dict[str, None] = {}

    # -- observe ---------------------------------------------------------------------------------------

    def observe(self, observation: Observation) -> None:
        kind = type(observation)
        if kind is Touched:
            assert isinstance(observation, Touched)
            self._host.remove(observation.node.id)
        elif isinstance(observation, CallArrived):
            thread = observation.call.thread
            if thread is not None and self._running.get(thread.workflow.id) != (thread.agent, False):
                self._entered(thread.workflow.id, thread.agent, by_call=True)
        elif isinstance(observation, CallFinished):
            thread = observation.call.thread
            if thread is not None and self._running.get(thread.workflow.id) == (thread.agent, True):
                del self._running[thread.workflow.id]
        elif isinstance(observation, Evicted):
            if observation.tier == "device":
                self._host.add(observation.node)
            else:
                self._host.remove(observation.node.id)
        elif isinstance(observation, AgentStarted):
            self._entered(observation.workflow, observation.agent, by_call=False)
        elif isinstance(observation, AgentEnded):
            self._running.pop(observation.workflow, None)
        elif isinstance(observation, WorkflowEnded):
            self._running.pop(observation.workflow, None)
            self._due.pop(observation.workflow, None)
            self._host.forget(observation.workflow)

    def _entered(self, workflow: str, agent: str | None, *, by_call: bool) -> None:
        self._running[workflow] = (agent, by_call)
        self._running.move_to_end(workflow)
        if len(self._running) > self.ledger.limits.workflows:
            self._running.popitem(last=False)
        if self._prefetching:
            self._due[workflow] = None
            if len(self._due) > self.ledger.limits.workflows:
                del self._due[next(iter(self._due))]

    # -- score -----------------------------------------------------------------------------------------

    def steps(self, thread: Thread) -> int:
        """Steps until the thread's agent is invoked next, at most limit + 1."""
        workflow = thread.workflow
        if workflow.state == "ended":
            return self.limit + 1
        return self._steps(workflow, thread.agent)

    def _steps(self, workflow: Workflow, agent: str | None) -> int:
        if agent is None:
            return self.limit + 1
        if self._is_running(workflow, agent):
            return 0
        table = self._tables.get(workflow.agent if workflow.agent is not None else START)
        return self.limit + 1 if table is None else table.get(agent, self.limit + 1)

    def _is_running(self, workflow: Workflow, agent: str) -> bool:
        running = self._running.get(workflow.id)
        return running is not None and running[0] == agent

    def hold(self, node: NodeRecord) -> int:
        """The node's hold value. O(owners)."""
        best = self.limit + 1
        for thread in node.owners:
            steps = self.steps(thread)
            if steps < best:
                best = steps
                if not best:
                    break
        return best

    def score_node(self, node: NodeRecord) -> Score:
        hold = float(-self.hold(node))
        return (hold,) if self._ties == "recency" else (hold, float(node.id))

    def explain(self, node: NodeRecord) -> Explanation | None:
        hold = self.hold(node)
        away = f"{hold} steps away" if hold <= self.limit else f"over {self.limit} steps away or unknown"
        return Explanation(f"its nearest agent is {away}", {"steps": float(hold)})

    # -- act -------------------------------------------------------------------------------------------

    def act(self) -> Sequence[Prefetch]:
        """Fetch what agents one step away have on the host. O(host nodes of workflows that made a step)."""
        if not self._due:
            return ()
        out: list[Prefetch] = []
        for workflow in self._due:
            for node in self._host.of(workflow):
                if self.hold(node) == 1:
                    out.append(Prefetch(node.id, "an agent one step away", value=float(node.tokens)))
        self._due.clear()
        return out


class KVFlowOracle(KVFlow):
    """KVFlow told the true steps: an upper bound of what its rule can reach on a dynamic workflow.

    ``futures`` maps workflows to the agents of their calls in order, as a trace has them; :meth:`tell` adds
    one. The steps of an agent are the calls until its next one. Workflows not told of have limit + 1.
    """

    name = "kvflow-oracle"

    def __init__(
        self,
        ledger: Ledger,
        clock: Callable[[], float],
        *,
        futures: Mapping[str, Sequence[str]] | None = None,
        limit: int = 8,
        ties: Literal["recency", "none"] = "recency",
        prefetch: bool = True,
    ) -> None:
        super().__init__(ledger, clock, limit=limit, ties=ties, prefetch=prefetch)
        self._futures: dict[str, _Future] = {}
        for workflow, agents in (futures or {}).items():
            self.tell(workflow, agents)

    def tell(self, workflow: str, agents: Sequence[str]) -> None:
        """The agents that the workflow's calls will invoke, in order, from its first call on."""
        self._futures[workflow] = _Future(agents)

    def observe(self, observation: Observation) -> None:
        super().observe(observation)
        if isinstance(observation, CallArrived) and observation.call.thread is not None:
            future = self._futures.get(observation.call.thread.workflow.id)
            if future is not None:
                future.advance()
        elif isinstance(observation, WorkflowEnded):
            self._futures.pop(observation.workflow, None)

    def _steps(self, workflow: Workflow, agent: str | None) -> int:
        if agent is None:
            return self.limit + 1
        if self._is_running(workflow, agent):
            return 0
        future = self._futures.get(workflow.id)
        return self.limit + 1 if future is None else min(self.limit + 1, future.steps(agent))


class _Future:
    """Where each agent comes next in a known sequence. Both operations are O(1) amortised."""

    def __init__(self, agents: Sequence[str]) -> None:
        self._at = 0
        self._places: dict[str, deque[int]] = {}
        for place, agent in enumerate(agents):
            self._places.setdefault(agent, deque()).append(place)

    def advance(self) -> None:
        self._at += 1

    def steps(self, agent: str) -> int:
        places = self._places.get(agent)
        while places and places[0] < self._at:
            places.popleft()
        return places[0] - self._at + 1 if places else 2**31


class _HostNodes:
    """Nodes that left the device and may be on the host, by workflow; the newest ``limit``."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._nodes: OrderedDict[int, tuple[NodeRecord, tuple[str, ...]]] = OrderedDict()
        self._by_workflow: dict[str, set[int]] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def add(self, node: NodeRecord) -> None:
        self.remove(node.id)
        alive = dict.fromkeys(t.workflow.id for t in node.owners if t.workflow.state != "ended")
        workflows = tuple(alive)[:8]
        if not workflows:
            return
        self._nodes[node.id] = (node, workflows)
        for workflow in workflows:
            self._by_workflow.setdefault(workflow, set()).add(node.id)
        if len(self._nodes) > self._limit:
            self.remove(next(iter(self._nodes)))

    def remove(self, node_id: int) -> None:
        found = self._nodes.pop(node_id, None)
        if found is not None:
            for workflow in found[1]:
                ids = self._by_workflow[workflow]
                ids.discard(node_id)
                if not ids:
                    del self._by_workflow[workflow]

    def of(self, workflow: str) -> list[NodeRecord]:
        return [self._nodes[i][0] for i in sorted(self._by_workflow.get(workflow, ()))]

    def forget(self, workflow: str) -> None:
        for node_id in list(self._by_workflow.get(workflow, ())):
            if self._nodes[node_id][1] == (workflow,):
                self.remove(node_id)


def _all_distances(edges: Mapping[str, Sequence[str]], limit: int) -> dict[str, dict[str, int]]:
    """Shortest ways of at least one step between all agents, up to ``limit`` steps: breadth first from each."""
    return {origin: _distances(edges, origin, limit) for origin in edges}


def _distances(edges: Mapping[str, Iterable[str]], origin: str, limit: int) -> dict[str, int]:
    found: dict[str, int] = {}
    front = [origin]
    for step in range(1, limit + 1):
        reached = dict.fromkeys(n for a in front for n in edges.get(a, ()) if n not in found)
        found.update(dict.fromkeys(reached, step))
        front = list(reached)
        if not front:
            break
    return found
