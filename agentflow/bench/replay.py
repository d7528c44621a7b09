"""Replay of a trace on a real engine, every policy seeing the same calls.

The recorded answers are forced token by token, so what an engine is asked does not depend on what it says.
Workflows arrive as :class:`~agentflow.bench.simulator.config.Arrivals` says, delays and tools are waited for on
a scaled clock, and the framework's events are emitted as a live graph would. The result has the simulator's
form, so that both can be set side by side.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Coroutine
from typing import Any

from agentflow.bench.simulator.anchors import anchor_lengths, anchor_of
from agentflow.bench.simulator.config import Arrivals
from agentflow.bench.simulator.result import CallResult, SimResult, WorkflowResult
from agentflow.bench.traces.model import Trace, TraceCall, TraceTool, TraceWorkflow
from agentflow.bench.traces.spans import SpanTokens
from agentflow.engine.base import Call, Completion, Coordinates, Engine, Sampling, Segment
from agentflow.engine.workflow import WorkflowRun
from agentflow.errors import UsageError
from agentflow.events import (
    AgentEnded,
    AgentStarted,
    StateSuperseded,
    ToolEnded,
    ToolStarted,
    WorkflowEnded,
    WorkflowStarted,
)

__all__ = ["replay"]

_OUTCOMES = ("done", "error", "cancelled", "limit")
_TOOL_OUTCOMES = ("ok", "error", "timeout", "cancelled")


def replay(
    trace: Trace,
    engine: Engine,
    *,
    arrivals: Arrivals | None = None,
    seed: int = 0,
    tokens: SpanTokens | None = None,
    policy: str | None = None,
) -> SimResult:
    """Serve ``trace`` by ``engine`` and measure it. Blocks until the last workflow has ended.

    The engine should be empty and idle. ``tokens`` gives the spans' token ids (made up where none were recorded);
    pass the same object to replays that are compared, it keeps what it made. ``policy`` names the result.

    Raises :class:`~agentflow.errors.UsageError` for a trace whose calls do not fit the engine or wait for calls that
    are not there; nothing has run then.
    """
    if tokens is None:
        tokens = SpanTokens(trace, low=1_000, high=30_000)
    run = _Replay(trace, engine, arrivals or Arrivals(), seed, tokens)
    before = dict(engine.stats().counters)
    result = asyncio.run(run.run())
    engine.flush()
    stats = engine.stats()
    counters = {k: v - before.get(k, 0) for k, v in stats.counters.items()}
    return SimResult(
        policy=policy or stats.policy,
        seconds=result,
        calls=run.calls,
        workflows=run.workflows,
        counters=counters,
        prefill_tokens=sum(c.prompt_tokens - c.cached_device - c.cached_host for c in run.calls),
    )


class _Replay:
    def __init__(self, trace: Trace, engine: Engine, arrivals: Arrivals, seed: int, tokens: SpanTokens) -> None:
        self.trace = trace
        self.anchor_lengths = anchor_lengths(trace)
        self.engine = engine
        self.arrivals = arrivals
        self.seed = seed
        self.tokens = tokens
        self.calls: list[CallResult] = []
        self.workflows: list[WorkflowResult] = []
        self._begun = 0.0
        for workflow in trace.workflows:
            ids = {c.id for c in workflow.calls}
            for call in workflow.calls:
                if not ids.issuperset(call.wait_for):
                    raise UsageError(f"call {call.id} of workflow {workflow.id} waits for a call that is not there")
                if call.prompt_tokens + call.output_tokens > engine.context_length:
                    raise UsageError(
                        f"call {call.id} of workflow {workflow.id} is longer than the engine's context of"
                        f" {engine.context_length} tokens: generate the trace at a smaller scale"
                    )
                if not call.output_tokens or not call.prompt_tokens:
                    raise UsageError(f"call {call.id} of workflow {workflow.id} has no prompt or no answer to force")

    async def run(self) -> float:
        """Seconds from the first arrival to the last end."""
        self._begun = time.perf_counter()
        workflows = self.trace.workflows
        kind = self.arrivals.kind
        jobs: list[Coroutine[Any, Any, None]]
        if kind == "closed":
            waiting = list(reversed(workflows))
            jobs = [self._chain(waiting) for _ in range(min(self.arrivals.concurrency, len(workflows)))]
        else:
            rng = random.Random(self.seed)
            at = 0.0
            jobs = []
            for workflow in workflows:
                at = at + rng.expovariate(self.arrivals.rate) if kind == "poisson" else workflow.arrival
                jobs.append(self._after(at if kind == "poisson" else at / self.arrivals.speed, workflow))
        async with asyncio.TaskGroup() as group:
            for job in jobs:
                group.create_task(job)
        return self._now()

    async def _chain(self, waiting: list[TraceWorkflow]) -> None:
        while waiting:
            await self._workflow(waiting.pop())

    async def _after(self, at: float, workflow: TraceWorkflow) -> None:
        await asyncio.sleep(max(0.0, at - self._now()))
        await self._workflow(workflow)

    def _now(self) -> float:
        return time.perf_counter() - self._begun

    async def _workflow(self, workflow: TraceWorkflow) -> None:
        run = WorkflowRun(self.engine, workflow.id, tenant=workflow.tenant)
        started = self._now()
        run.emit(WorkflowStarted, graph=workflow.graph, tenant=workflow.tenant)
        done = {call.id: asyncio.Event() for call in workflow.calls}
        agents = {call.id: call.agent for call in workflow.calls}
        async with asyncio.TaskGroup() as group:
            for call in workflow.calls:
                group.create_task(self._call(run, call, done, agents))
        outcome = workflow.outcome if workflow.outcome in _OUTCOMES else "error"
        run.emit(WorkflowEnded, outcome=outcome)
        self.workflows.append(
            WorkflowResult(
                workflow=workflow.id, engine=0, started=started, finished=self._now(), calls=len(workflow.calls)
            )
        )

    async def _call(
        self, run: WorkflowRun, call: TraceCall, done: dict[str, asyncio.Event], agents: dict[str, str]
    ) -> None:
        for waited in call.wait_for:
            await done[waited].wait()
        asked_by = agents[call.wait_for[-1]] if call.wait_for else call.agent
        speed = self.arrivals.tool_speed
        async with asyncio.TaskGroup() as group:
            for number, tool in enumerate(call.tools):
                group.create_task(_tool(run, tool, f"{call.id}/{number}", asked_by, speed))
            group.create_task(asyncio.sleep(call.delay / speed))
        run.emit(AgentStarted, agent=call.agent, step=run.next_step())
        request = Call(
            token_ids=self.tokens.ids(call.prompt),
            segments=tuple(Segment(*s) for s in call.segments),  # type: ignore[arg-type]
            anchor=anchor_of(call, self.anchor_lengths),
            at=Coordinates(workflow=run.workflow, agent=call.agent, branch=call.branch, tenant=run.tenant),
            sampling=Sampling(
                max_tokens=call.output_tokens, ignore_eos=True, forced_tokens=tuple(self.tokens.ids(call.output))
            ),
        )
        arrived = self._now()
        completion = await self.engine.agenerate(request)
        self._note(run.workflow, call, arrived, completion)
        run.emit(AgentEnded, agent=call.agent)
        if call.superseded:
            run.emit(StateSuperseded, agent=call.agent, request=request.request_id)
        done[call.id].set()

    def _note(self, workflow: str, call: TraceCall, arrived: float, completion: Completion) -> None:
        usage, timings = completion.usage, completion.timings
        self.calls.append(
            CallResult(
                workflow=workflow,
                call=call.id,
                agent=call.agent,
                engine=0,
                outcome="done" if completion.finish != "abort" else "aborted",
                arrived=arrived,
                admitted=arrived + timings.queue,
                first_token=arrived + timings.first_token,
                finished=arrived + timings.total,
                prompt_tokens=usage.prompt_tokens,
                cached_device=usage.cached_device,
                cached_host=usage.cached_host,
                output_tokens=usage.completion_tokens,
            )
        )


async def _tool(run: WorkflowRun, tool: TraceTool, call_id: str, agent: str, speed: float) -> None:
    await asyncio.sleep(tool.start / speed)
    run.emit(ToolStarted, agent=agent, tool=tool.name, call_id=call_id)
    await asyncio.sleep(tool.duration / speed)
    outcome = tool.outcome if tool.outcome in _TOOL_OUTCOMES else "error"
    run.emit(ToolEnded, agent=agent, tool=tool.name, call_id=call_id, duration=tool.duration / speed, outcome=outcome)
