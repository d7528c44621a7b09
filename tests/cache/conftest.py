"""Policies driven by hand: calls, touches and events at the times that a test sets."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest

from agentflow.cache.ledger import CallRef, NodeRecord
from agentflow.cache.policy import CallArrived, CallFinished, Policy, PolicySpec, Touched, WaitingCall
from agentflow.events import Event, ToolEnded, ToolStarted, WorkflowEnded
from agentflow.runtime import Runtime


@dataclass
class Request:
    id: str
    call: CallRef
    tokens: int
    arrived: float


class Drive:
    """A runtime with some policies, its clock, and nodes by name."""

    def __init__(self, *policies: PolicySpec) -> None:
        self.now = 1000.0
        self.runtime = Runtime(policies, clock=lambda: self.now)
        self.nodes: dict[str, NodeRecord] = {}
        self.recency: dict[str, float] = {}
        self._numbers = count(1)

    @property
    def policy(self) -> Any:
        """The first policy."""
        return self.runtime.policies[0]

    def arrive(
        self, workflow: str | None, agent: str = "a", *, tokens: int = 100, branch: str | None = None, priority: int = 0
    ) -> Request:
        request = f"r{next(self._numbers)}"
        call = self.runtime.call(workflow, agent if workflow else None, branch, request, priority=priority)
        self.runtime.observe(CallArrived(request, call, tokens))
        return Request(request, call, tokens, self.now)

    def touch(self, request: Request, names: Iterable[str], tokens: int = 10) -> None:
        for name in names:
            node = self.nodes.get(name)
            if node is None:
                node = self.nodes[name] = NodeRecord(next(self._numbers), tokens, self.now)
            self.runtime.ledger.touch(node, request.call)
            self.recency[name] = float(next(self._numbers))
            self.runtime.observe(Touched(node, request.call))

    def finish(self, request: Request, **told: Any) -> None:
        self.runtime.observe(CallFinished(request.id, request.call, request.tokens, **told))

    def run(
        self, workflow: str | None, agent: str = "a", nodes: str = "", *, takes: float = 0.0, **options: Any
    ) -> Request:
        """A whole call that touches the nodes of these one-letter names; options of a finish begin with ``told_``."""
        told = {k.removeprefix("told_"): options.pop(k) for k in list(options) if k.startswith("told_")}
        request = self.arrive(workflow, agent, **options)
        self.now += takes
        self.touch(request, nodes)
        self.finish(request, **told)
        return request

    def event(self, event: Event) -> None:
        self.runtime.observe(event)

    def tool(
        self, workflow: str, tool: str, call_id: str = "t", agent: str | None = None, variant: str | None = None
    ) -> None:
        self.event(ToolStarted(workflow=workflow, tool=tool, call_id=call_id, agent=agent, variant=variant))

    def tool_done(self, workflow: str, tool: str, duration: float, call_id: str = "t", outcome: Any = "ok") -> None:
        self.event(ToolEnded(workflow=workflow, tool=tool, call_id=call_id, duration=duration, outcome=outcome))

    def learn(self, tool: str, durations: Iterable[float]) -> None:
        """Let a workflow of its own run the tool that often."""
        for i, seconds in enumerate(durations):
            self.tool("teacher", tool, f"learn{i}")
            self.tool_done("teacher", tool, seconds, f"learn{i}")

    def end(self, workflow: str, outcome: Any = "done") -> None:
        # A number above all of the workflow's before.
        self.event(WorkflowEnded(workflow=workflow, seq=next(self._numbers) + 10**6, outcome=outcome))

    def score(self, name: str) -> tuple[float, ...]:
        return self.runtime.score_node(self.nodes[name], self.recency[name])

    def order(self, names: Iterable[str] | None = None) -> str:
        """The nodes in the order in which they would be evicted."""
        return "".join(sorted(names or self.nodes, key=self.score))

    def queue(self, *requests: Request, preempted: Iterable[Request] = ()) -> list[str]:
        """The ids of waiting requests in the order in which they would run."""
        gone = [p.id for p in preempted]

        def rank(request: Request) -> tuple[float, ...]:
            waiting = WaitingCall(
                request=request.id,
                call=request.call,
                tokens=request.tokens,
                cached_tokens=0,
                arrived=request.arrived,
                preempted=request.id in gone,
            )
            return self.runtime.score_call(waiting)

        return [r.id for r in sorted(requests, key=rank)]

    def why(self, name: str) -> Any:
        policy: Policy = self.runtime.policies[0]
        return policy.explain(self.nodes[name])


@pytest.fixture
def drive() -> Callable[..., Drive]:
    """Makes a driven runtime: ``drive("lru")``, ``drive({"name": "slru", "protected_threshold": 3})``."""
    return Drive
