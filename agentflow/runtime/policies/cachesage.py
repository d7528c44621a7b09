"""CacheSage (arXiv 2605.27744): what agents that are about to run begin with stays, or is there before they do.

Transitions between agents are learned online, per workload (graph). A cached node is worth what its agents' chance to
run within the next steps says, in hops from the agents that run now, combined with recency; where nothing is learned
the order is plain LRU. Between scheduler steps, anchors (system prompt and tools, known by a hash of their tokens) of
agents that will run soon are computed ahead when they are not cached.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from agentflow.cache.ledger import Ledger, NodeRecord
from agentflow.cache.policy import (
    CallArrived,
    CallFinished,
    Effect,
    Evicted,
    Explanation,
    Forecast,
    Observation,
    Policy,
    Score,
    WarmUp,
)
from agentflow.cache.survival import OUTSIDE, Transitions
from agentflow.errors import UsageError
from agentflow.events import AgentStarted, Event, WorkflowEnded, WorkflowPaused, WorkflowStarted

__all__ = ["CacheSage"]

#: Workloads (graphs) that are learned; the longest silent is forgotten first.
_WORKLOADS = 64
#: Owners of a node that are asked about, the newest: they say enough.
_OWNERS = 3
#: Workflows whose place is followed, the longest silent forgotten first.
_WORKFLOWS = 10_000
#: A step counts for at most so many mean steps, or a second: one that waited for hours is no measure of the others.
_LONGEST_STEP = 4.0


class _Anchor:
    __slots__ = ("agent", "first", "shared", "tokens", "wanted")

    def __init__(self, agent: int, tokens: int, first: int) -> None:
        self.agent = agent
        self.tokens = tokens
        #: A hash of the first workflow that used it, and whether another one did: an anchor of one workflow alone may
        #: hold what belongs to its session, and is not computed ahead.
        self.first = first
        self.shared = False
        self.wanted = False


class _Workload:
    """What is learned of one graph: at most 20 KB."""

    __slots__ = ("anchors", "begins", "live", "nearest", "step", "transitions")

    def __init__(self, agents: int, window: int, threshold: float) -> None:
        self.transitions = Transitions(agents=agents, window=window, threshold=threshold)
        self.anchors: OrderedDict[int, _Anchor] = OrderedDict()
        #: How many workflows are at each agent now.
        self.live: Counter[int] = Counter()
        #: Hops of every agent from the nearest running one, found when asked for; None when something changed.
        self.nearest: Sequence[int] | None = None
        #: Mean seconds of a step.
        self.step = 1.0
        self.begins = 0


class CacheSage(Policy):
    """Keeps and computes ahead by learned transitions.

    ``window`` transitions are remembered per workload, of at most ``agents`` agents; ``threshold`` is the share of
    transitions that makes an edge of the graph, ``horizon`` the steps looked ahead. A node whose agents are ``h`` hops
    away counts as used ``(1 - h / (horizon + 1)) * horizon * weight`` mean steps later than it was; the time that a
    workflow is paused is no part of a step. ``warm_up`` allows computing anchors ahead, with at most ``budget`` of the
    tokens that calls computed.
    ``observe`` costs about a microsecond, scores a few.
    """

    name: ClassVar[str] = "cachesage"

    def __init__(
        self,
        ledger: Ledger,
        clock: Callable[[], float],
        *,
        window: int = 1_024,
        agents: int = 24,
        threshold: float = 0.1,
        horizon: int = 3,
        weight: float = 4.0,
        warm_up: bool = True,
        budget: float = 0.1,
    ) -> None:
        super().__init__(ledger, clock)
        if not 0 < threshold <= 1 or horizon < 1 or weight < 0 or budget < 0 or not 1 <= window <= 2_048:
            raise UsageError(
                "cachesage: threshold must be above 0 and at most 1, horizon at least 1, window from 1 to 2048, weight"
                " and budget not negative"
            )
        if not 1 <= agents <= 32:
            raise UsageError("cachesage: agents must be from 1 to 32")
        self.window = window
        self.agents = agents
        self.threshold = threshold
        self.horizon = horizon
        self.weight = weight
        self.warm_up = warm_up
        self.budget = budget
        self._workloads: OrderedDict[str, _Workload] = OrderedDict()
        #: Workflow -> its workload, its agent, since when; None when it was paused since.
        self._places: OrderedDict[str, tuple[_Workload, int, float | None]] = OrderedDict()
        #: Anchors that are wanted now.
        self._wanted: dict[int, _Workload] = {}
        self._computed = 0
        self._warmed = 0
        self._counts: Counter[str] = Counter()

    # -- observe ---------------------------------------------------------------------------------------

    def observe(self, observation: Observation) -> None:
        kind = type(observation)
        if kind is CallArrived:
            self._arrived(observation)  # type: ignore[arg-type]
        elif kind is CallFinished:
            self._computed += observation.tokens - observation.cached_tokens  # type: ignore[union-attr]
        elif kind is Evicted:
            if observation.node.anchor and observation.tier == "device":  # type: ignore[union-attr]
                self._gone(observation.node.anchor)  # type: ignore[union-attr]
        elif kind is AgentStarted:
            if observation.agent is not None:  # type: ignore[union-attr]
                self._entered(observation.workflow, observation.agent)  # type: ignore[union-attr]
        elif kind is WorkflowStarted:
            self._left(observation.workflow)  # type: ignore[union-attr]
        elif kind is WorkflowPaused:
            self._paused(observation.workflow)  # type: ignore[union-attr]
        elif kind is WorkflowEnded:
            self._ended(observation)  # type: ignore[arg-type]

    def _entered(self, workflow: str, agent: str) -> None:
        """A workflow goes on with an agent: a transition, from outside if it is its first."""
        now = self.clock()
        place = self._places.get(workflow)
        if place is None:
            known = self.ledger.workflows.get(workflow)
            workload = self._workload((known.graph if known is not None else None) or "")
            before, since = OUTSIDE, None
        else:
            workload, before, since = place
        number = workload.transitions.number(agent)
        if number is None:
            return
        workload.transitions.learn(before, number)
        if before != OUTSIDE:
            if since is not None and now >= since:  # unless the clock was set back
                seconds = min(now - since, max(1.0, _LONGEST_STEP * workload.step))
                workload.step += 0.05 * (seconds - workload.step)
            self._count(workload, before, -1)
        else:
            workload.begins += 1
        self._count(workload, number, 1)
        self._places[workflow] = (workload, number, now)
        self._places.move_to_end(workflow)
        if len(self._places) > _WORKFLOWS:
            self._left(next(iter(self._places)))
        if self.warm_up:
            self._look_ahead(workload, number)

    def _paused(self, workflow: str) -> None:
        """The time until it goes on is somebody else's, not that of a step."""
        place = self._places.get(workflow)
        if place is not None:
            self._places[workflow] = (place[0], place[1], None)

    def _ended(self, event: Event) -> None:
        place = self._left(event.workflow)
        if place is not None:
            place[0].transitions.learn(place[1], OUTSIDE)

    def _left(self, workflow: str) -> tuple[_Workload, int, float | None] | None:
        place = self._places.pop(workflow, None)
        if place is not None:
            self._count(place[0], place[1], -1)
        return place

    def _arrived(self, seen: CallArrived) -> None:
        thread = seen.call.thread
        if thread is None or thread.agent is None:
            return
        workflow = thread.workflow
        place = self._places.get(workflow.id)
        if place is None or not workflow.sends_events:  # of callers without events, calls are all that is heard
            self._entered(workflow.id, thread.agent)
            place = self._places.get(workflow.id)
        if place is None or not seen.anchor:
            return
        workload = place[0]
        anchor = workload.anchors.get(seen.anchor)
        who = hash(workflow.id)
        if anchor is None:
            number = workload.transitions.number(thread.agent)
            if number is None:
                return
            workload.anchors[seen.anchor] = _Anchor(number, seen.anchor_tokens, who)
            if len(workload.anchors) > self.agents:
                workload.anchors.popitem(last=False)
        else:
            anchor.shared = anchor.shared or anchor.first != who
            anchor.wanted = False
            workload.anchors.move_to_end(seen.anchor)
            self._wanted.pop(seen.anchor, None)

    # -- score -----------------------------------------------------------------------------------------

    def score_node(self, node: NodeRecord) -> Score:
        if not self._places and not self._workloads:
            return (0.0,)  # nothing is known: recency alone
        if node.anchor:
            for workload in self._workloads.values():
                anchor = workload.anchors.get(node.anchor)
                if anchor is not None:
                    return (node.last_access + self._bonus(workload, self._hops(workload, anchor.agent)),)
        best, nearest = None, self.horizon + 1
        places, shared = self._places, node.shared
        for number, thread in enumerate(reversed(node.owners)):
            if number == _OWNERS:
                break
            place = places.get(thread.workflow.id)
            known = place[0] if place is not None else self._workloads.get(thread.workflow.graph or "")
            if known is None or (place is None and not shared):
                continue
            agent = known.transitions.names.get(thread.agent or "")
            if agent is None:
                continue
            # Text of one workflow is worth what its own place says; shared text what that of all workflows does.
            if shared or place is None:
                hops = known.nearest[agent] if known.nearest is not None else self._hops(known, agent)
            else:
                hops = known.transitions.hops(place[1], agent)
            if hops < nearest:
                best, nearest = known, hops
        return (node.last_access if best is None else node.last_access + self._bonus(best, nearest),)

    def explain(self, node: NodeRecord) -> Explanation | None:
        if not self._workloads:
            return None
        score = self.score_node(node)[0]
        ahead = score - node.last_access
        reason = "no agent that will use it is near" if ahead == 0 else "its agents are not among the next"
        return Explanation(f"cachesage: {reason}", {"last_access": node.last_access, "bonus_seconds": round(ahead, 6)})

    def _hops(self, workload: _Workload, agent: int) -> int:
        """Hops from the nearest place of any workflow; the next workflow's first agent is one hop from outside."""
        if workload.nearest is None:
            running = [a for a, n in workload.live.items() if n > 0]
            if workload.begins > 1:
                running.append(OUTSIDE)
            workload.nearest = workload.transitions.nearest(running)
        return workload.nearest[agent]

    def _bonus(self, workload: _Workload, hops: int) -> float:
        horizon = self.horizon
        if hops > horizon:
            return 0.0
        return (1.0 - hops / (horizon + 1.0)) * horizon * self.weight * workload.step

    # -- predict, act ----------------------------------------------------------------------------------

    def predict(self, horizon: int) -> Sequence[Forecast]:
        out = []
        for workflow, (workload, agent, _) in self._places.items():
            names = {n: name for name, n in workload.transitions.names.items()}
            row = {agent: 1.0}
            steps = []
            for _ in range(horizon):
                following: Counter[int] = Counter()
                for a, p in row.items():
                    for b, q in workload.transitions.following(a):
                        if b != OUTSIDE:
                            following[b] += p * q  # type: ignore[assignment]
                row = dict(following)
                steps.append({names[a]: p for a, p in row.items()})
            out.append(Forecast(workflow, tuple(steps)))
        return out

    def act(self) -> Sequence[Effect]:
        if not self._wanted or self._warmed > self.budget * self._computed:
            return ()
        key, workload = next(iter(self._wanted.items()))
        del self._wanted[key]
        anchor = workload.anchors.get(key)
        if anchor is None:
            return ()
        anchor.wanted = False
        self._warmed += anchor.tokens
        self._counts["asked_for"] += 1
        hops = self._hops(workload, anchor.agent)
        name = next((n for n, i in workload.transitions.names.items() if i == anchor.agent), "")
        return [WarmUp(key, f"agent {name} is {hops} hops away and its anchor is not cached", 1.0 / (1 + hops))]

    def stats(self) -> Mapping[str, float]:
        return {
            "workloads": len(self._workloads),
            "workflows": len(self._places),
            "agents": sum(len(w.transitions.names) for w in self._workloads.values()),
            "anchors": sum(len(w.anchors) for w in self._workloads.values()),
            "warm_tokens": self._warmed,
            **self._counts,
        }

    def _gone(self, key: int) -> None:
        """An anchor left the device: it is wanted back if an agent of its is near."""
        for workload in self._workloads.values():
            anchor = workload.anchors.get(key)
            if anchor is not None:
                anchor.wanted = anchor.shared
                if anchor.wanted and self.warm_up and self._hops(workload, anchor.agent) <= 1:
                    self._wanted[key] = workload
                return

    def _look_ahead(self, workload: _Workload, agent: int) -> None:
        """Want the anchors that are gone of those that probably follow."""
        if not any(a.wanted for a in workload.anchors.values()):
            return
        near = {a for a, _ in workload.transitions.following(agent)}
        near.update(a for a, _ in workload.transitions.following(OUTSIDE))
        for key, anchor in workload.anchors.items():
            if anchor.wanted and anchor.agent in near:
                self._wanted[key] = workload

    # -- state -----------------------------------------------------------------------------------------

    def _workload(self, graph: str) -> _Workload:
        workload = self._workloads.get(graph)
        if workload is None:
            workload = self._workloads[graph] = _Workload(self.agents, self.window, self.threshold)
            if len(self._workloads) > _WORKLOADS:
                _, gone = self._workloads.popitem(last=False)
                for workflow in [w for w, place in self._places.items() if place[0] is gone]:
                    del self._places[workflow]
        self._workloads.move_to_end(graph)
        return workload

    @staticmethod
    def _count(workload: _Workload, agent: int, by: int) -> None:
        live = workload.live
        live[agent] += by
        if live[agent] <= 0:
            del live[agent]
        workload.nearest = None
