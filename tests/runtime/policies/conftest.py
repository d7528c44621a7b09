"""Helpers for tests of policies: a clock to move, and calls and nodes by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from agentflow.cache.ledger import NodeRecord
from agentflow.cache.policy import CallArrived, CallFinished, PolicySpec, PoolState, Touched, WaitingCall
from agentflow.events import AgentEnded, AgentStarted, WorkflowEnded, WorkflowStarted
from agentflow.runtime import Runtime


class World:
    """A runtime with policies and a clock, and what the engine and the framework would tell it."""

    def __init__(self, policies: Sequence[PolicySpec], *, pool: int = 10_000) -> None:
        self.now = 100.0
        self.runtime = Runtime(policies, clock=lambda: self.now)
        self.pool = pool
        self.seq = 0
        self.nodes = 0
        self.runtime.observe(PoolState(pool, pool))

    def event(self, kind: type, workflow: str, **fields: object) -> None:
        self.seq += 1
        self.runtime.observe(kind(workflow=workflow, seq=self.seq, time=self.now, **fields))

    def begin(self, workflow: str, *, tenant: str | None = None, graph: str = "g") -> None:
        self.event(WorkflowStarted, workflow, tenant=tenant, graph=graph)

    def end(self, workflow: str) -> None:
        self.event(WorkflowEnded, workflow)

    def step(self, workflow: str, agent: str) -> None:
        self.event(AgentStarted, workflow, agent=agent)

    def step_ended(self, workflow: str, agent: str) -> None:
        self.event(AgentEnded, workflow, agent=agent)

    def arrive(
        self,
        request: str,
        workflow: str | None,
        agent: str = "a",
        *,
        tokens: int = 100,
        anchor: int = 0,
        **more: object,
    ) -> WaitingCall:
        call = self.runtime.call(workflow, agent, None, request)
        anchor_tokens = 50 if anchor else 0
        self.runtime.observe(CallArrived(request, call, tokens, anchor, anchor_tokens, **more))  # type: ignore[arg-type]
        return WaitingCall(request, call, tokens, 0, self.now, anchor=anchor)

    def touch(self, call: WaitingCall, node: NodeRecord | None = None, *, tokens: int = 100) -> NodeRecord:
        if node is None:
            self.nodes += 1
            node = NodeRecord(self.nodes, tokens, self.now)
        self.runtime.ledger.touch(node, call.call)
        self.runtime.observe(Touched(node, call.call))
        return node

    def finish(self, call: WaitingCall, *, output: int = 10, cached: int = 0) -> None:
        self.runtime.observe(CallFinished(call.request, call.call, call.tokens, cached, output))

    def score(self, call: WaitingCall) -> tuple[float, ...]:
        return self.runtime.score_call(call)

    def order(self, calls: Sequence[WaitingCall]) -> list[str]:
        ranked = sorted(((*self.score(c), float(i)), c.request) for i, c in enumerate(calls))
        return [request for _, request in ranked]


@pytest.fixture
def world() -> type[World]:
    return World
