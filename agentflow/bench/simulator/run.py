"""The simulation: workflows, their tools and gaps, and the engines that serve them, event by event."""

from __future__ import annotations

import heapq
import random
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from agentflow.bench.simulator.anchors import anchor_lengths, anchor_of
from agentflow.bench.simulator.config import Arrivals, EngineSpec
from agentflow.bench.simulator.content import Links
from agentflow.bench.simulator.cost import Cost
from agentflow.bench.simulator.engine import Engine, Request
from agentflow.bench.simulator.future import Uses
from agentflow.bench.simulator.informed import informed
from agentflow.bench.simulator.result import CallResult, SimResult, WorkflowResult
from agentflow.bench.simulator.timeline import Timeline
from agentflow.bench.traces.model import Trace, TraceCall, TraceWorkflow
from agentflow.cache.policy import PolicySpec, spec_name
from agentflow.errors import UsageError
from agentflow.events import (
    AgentEnded,
    AgentStarted,
    StateSuperseded,
    ToolEnded,
    ToolStarted,
    WorkflowEnded,
    WorkflowOutcome,
    WorkflowStarted,
)
from agentflow.runtime import Runtime

__all__ = ["ORACLE", "engine_of", "request_id", "simulate"]

#: The policy that needs to know the future, which only a simulation can tell it.
ORACLE = "belady"
_OUTCOMES: dict[str, WorkflowOutcome] = {"done": "done", "error": "error", "cancelled": "cancelled", "limit": "limit"}
#: Decisions that a simulation with a timeline keeps.
_TIMELINE_DECISIONS = 2_000_000


def request_id(workflow: str, call: str) -> str:
    """The id under which a call of a trace reaches an engine."""
    return f"{workflow}/{call}"


def engine_of(workflow: str, engines: int) -> int:
    """The engine that a workflow-affine router sends all calls of a workflow to; the same in every process."""
    return zlib.crc32(workflow.encode()) % engines


def simulate(
    trace: Trace,
    spec: EngineSpec,
    cost: Cost,
    policies: Sequence[PolicySpec] = ("lifecycle",),
    *,
    arrivals: Arrivals | None = None,
    engines: int = 1,
    seed: int = 0,
    timeline: bool = False,
    sample_seconds: float = 1.0,
) -> SimResult:
    """Serve a trace by ``engines`` engines of the same kind, each with policies of its own.

    The same arguments give the same result, in any process. ``policies`` are as in
    :class:`~agentflow.runtime.Runtime`; ``belady`` is told the recorded future, and the others what
    :func:`~agentflow.bench.simulator.informed.informed` says. ``timeline`` keeps what happened,
    and the state of memory every ``sample_seconds`` of simulated time.

    Raises :class:`~agentflow.errors.UsageError` for unknown policies, bad options, ids that occur twice, or calls that
    wait for calls that are not before them.
    """
    if engines < 1:
        raise UsageError("a simulation needs at least one engine")
    _check(trace)
    return _Simulation(
        trace, spec, cost, informed(policies, trace), arrivals or Arrivals(), engines, seed, timeline, sample_seconds
    ).run()


def _check(trace: Trace) -> None:
    known: set[str] = set()
    for workflow in trace.workflows:
        if workflow.id in known:
            raise UsageError(f"the trace has two workflows {workflow.id}")
        known.add(workflow.id)
        calls: set[str] = set()
        for call in workflow.calls:
            for waited in call.wait_for:
                if waited not in calls:
                    raise UsageError(
                        f"call {call.id} of workflow {workflow.id} waits for {waited}, which is not before it"
                    )
            if call.id in calls:
                raise UsageError(f"workflow {workflow.id} has two calls {call.id}")
            calls.add(call.id)


class _Run:
    """One workflow under way."""

    __slots__ = ("agents", "called", "done", "engine", "seq", "started", "todo", "waits", "workflow")

    def __init__(self, workflow: TraceWorkflow, engine: int, started: float) -> None:
        self.workflow = workflow
        self.engine = engine
        self.started = started
        self.seq = 0
        self.called = 0
        self.todo = len(workflow.calls)
        self.agents = {c.id: c.agent for c in workflow.calls}
        #: How many calls each call still waits for, and who waits for each.
        self.waits: dict[str, int] = {}
        self.done: dict[str, list[TraceCall]] = {}


class _Simulation:
    def __init__(
        self,
        trace: Trace,
        spec: EngineSpec,
        cost: Cost,
        policies: Sequence[PolicySpec],
        arrivals: Arrivals,
        engines: int,
        seed: int,
        timeline: bool,
        sample_seconds: float,
    ) -> None:
        self.trace = trace
        self.arrivals = arrivals
        self.seed = seed
        self.now = 0.0
        self.links = Links()
        self._anchor_lengths = anchor_lengths(trace)
        self.calls: list[CallResult] = []
        self.workflows: list[WorkflowResult] = []
        self.timeline = Timeline(sample_seconds) if timeline else None
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._seq = 0
        self._requests: dict[str, tuple[_Run, TraceCall]] = {}
        self._later: list[TraceWorkflow] = []
        self._open = 0
        self._clock = lambda: self.now
        self._uses = self._futures(policies)
        self.engines: list[Engine] = []
        for number in range(engines):
            specs, bind = self._with_future(policies)
            runtime = Runtime(specs, clock=self._clock, log_limit=_TIMELINE_DECISIONS if timeline else 10_000)
            engine = Engine(spec, cost, runtime, self._finisher(number))
            if bind is not None:
                bind(engine)
            self.engines.append(engine)
        self._due: list[float | None] = [None] * engines
        self.policy = self.engines[0].runtime.name

    # -- the loop --------------------------------------------------------------------------------------

    def run(self) -> SimResult:
        self._begin()
        while self._events and (self._open or self._later):
            self.now, _, happen = heapq.heappop(self._events)
            if self.timeline is not None and self.timeline.due(self.now):
                self.timeline.sample(self.now, self.engines)
            happen()
        counters: Counter[str] = Counter()
        for engine in self.engines:
            counters.update(engine.runtime.counters)
        return SimResult(
            policy=self.policy,
            seconds=self.now,
            calls=self.calls,
            workflows=self.workflows,
            counters=counters,
            passes=sum(e.passes for e in self.engines),
            decode_steps=sum(e.decode_steps for e in self.engines),
            prefill_tokens=sum(e.prefill_tokens for e in self.engines),
            retractions=sum(e.retractions for e in self.engines),
            busy_seconds=sum(e.busy_seconds for e in self.engines),
            engines=len(self.engines),
            timeline=self.timeline.rows(self.engines) if self.timeline is not None else (),
        )

    def _at(self, time: float, happen: Callable[[], None]) -> None:
        self._seq += 1
        heapq.heappush(self._events, (time, self._seq, happen))

    def _schedule(self, number: int) -> None:
        """Have the engine advanced when it next is due."""
        due = self.engines[number].due
        if due is not None and due != self._due[number]:
            self._due[number] = due
            self._at(due, lambda: self._advance(number, due))

    def _advance(self, number: int, due: float) -> None:
        engine = self.engines[number]
        if engine.due != due or self._due[number] != due:
            return  # it was rescheduled
        self._due[number] = None
        engine.advance(self.now)
        self._schedule(number)

    # -- workflows -------------------------------------------------------------------------------------

    def _begin(self) -> None:
        workflows = self.trace.workflows
        kind = self.arrivals.kind
        if kind == "closed":
            n = self.arrivals.concurrency
            self._later = list(reversed(workflows[n:]))
            times = [(0.0, w) for w in workflows[:n]]
        elif kind == "poisson":
            rng = random.Random(self.seed)
            at = 0.0
            times = []
            for workflow in workflows:
                at += rng.expovariate(self.arrivals.rate)
                times.append((at, workflow))
        else:
            times = [(w.arrival / self.arrivals.speed, w) for w in workflows]
        for time, workflow in times:
            self._open += 1
            self._at(time, self._starter(workflow))
            if self._uses is not None:
                self._uses.begins(workflow.id, time)

    def _starter(self, workflow: TraceWorkflow) -> Callable[[], None]:
        return lambda: self._start(workflow)

    def _start(self, workflow: TraceWorkflow) -> None:
        run = _Run(workflow, engine_of(workflow.id, len(self.engines)), self.now)
        if self._uses is not None:
            self._uses.begins(workflow.id, self.now)
        for call in workflow.calls:
            run.waits[call.id] = len(set(call.wait_for))
            for waited in set(call.wait_for):
                run.done.setdefault(waited, []).append(call)
        self._tell(run, WorkflowStarted(**self._common(run), graph=workflow.graph, tenant=workflow.tenant))
        if self.timeline is not None:
            self.timeline.add(self.now, "workflow_started", run.engine, workflow=workflow.id)
        if not workflow.calls:
            self._end(run)
        for call in workflow.calls:
            if not call.wait_for:
                self._ready(run, call, call.agent)

    def _ready(self, run: _Run, call: TraceCall, asked_by: str) -> None:
        """All that the call waits for is done: its tools run, and it is sent after its delay and after them."""
        speed = self.arrivals.tool_speed
        send = self.now + call.delay / speed
        for number, tool in enumerate(call.tools):
            ident = f"{call.id}/{number}"
            fields: dict[str, Any] = {"tool": tool.name, "call_id": ident, "agent": asked_by}
            outcome: Any = tool.outcome if tool.outcome in ("ok", "error", "timeout", "cancelled") else "error"
            duration = tool.duration / speed
            start = self.now + tool.start / speed

            def begin(fields: dict[str, Any] = fields) -> None:
                self._tell(run, ToolStarted(**self._common(run), **fields))

            def end(fields: dict[str, Any] = fields, outcome: Any = outcome, duration: float = duration) -> None:
                self._tell(run, ToolEnded(**self._common(run), **fields, duration=duration, outcome=outcome))

            self._at(start, begin)
            self._at(start + duration, end)
            send = max(send, start + duration)
        self._at(send, lambda: self._send(run, call))

    def _send(self, run: _Run, call: TraceCall) -> None:
        workflow = run.workflow
        rid = request_id(workflow.id, call.id)
        self._requests[rid] = (run, call)
        self._tell(run, AgentStarted(**self._common(run), agent=call.agent, step=run.called))
        run.called += 1
        content = self.links.content(call.prompt, call.output)
        anchor = anchor_of(call, self._anchor_lengths)
        request = Request(rid, content, call.prompt_tokens, call.output_tokens, self.now, anchor=anchor)
        self.engines[run.engine].arrive(request, workflow.id, call.agent, call.branch, self.now)
        self._schedule(run.engine)

    def _finisher(self, number: int) -> Callable[[Request, float], None]:
        return lambda request, now: self._finished(number, request, now)

    def _finished(self, number: int, request: Request, now: float) -> None:
        run, call = self._requests.pop(request.rid)
        self.calls.append(
            CallResult(
                workflow=run.workflow.id,
                call=call.id,
                agent=call.agent,
                engine=number,
                outcome=request.outcome,
                arrived=request.arrived,
                admitted=request.admitted,
                first_token=request.first_token,
                finished=now,
                prompt_tokens=request.prompt,
                cached_device=request.cached_device,
                cached_host=request.cached_host,
                output_tokens=request.produced,
                retracted=request.retracted,
            )
        )
        if self.timeline is not None:
            self.timeline.call(self.calls[-1])
        if self._uses is not None:
            self._uses.ended(run.workflow.id, call.id, now, now - request.arrived)
        # What follows from it happens after the engine's step, as it would for a caller outside.
        self._at(now, lambda: self._follow(run, call))

    def _follow(self, run: _Run, call: TraceCall) -> None:
        self._tell(run, AgentEnded(**self._common(run), agent=call.agent, step=run.called - 1))
        if call.superseded:
            rid = request_id(run.workflow.id, call.id)
            self._tell(run, StateSuperseded(**self._common(run), agent=call.agent, request=rid))
        run.todo -= 1
        for follower in run.done.get(call.id, ()):
            run.waits[follower.id] -= 1
            if not run.waits[follower.id]:
                self._ready(run, follower, run.agents[follower.wait_for[-1]])
        if not run.todo:
            self._end(run)

    def _end(self, run: _Run) -> None:
        workflow = run.workflow
        self._tell(run, WorkflowEnded(**self._common(run), outcome=_OUTCOMES.get(workflow.outcome, "error")))
        self._open -= 1
        self.workflows.append(
            WorkflowResult(
                workflow=workflow.id,
                engine=run.engine,
                started=run.started,
                finished=self.now,
                calls=len(workflow.calls),
            )
        )
        if self.timeline is not None:
            self.timeline.add(self.now, "workflow_ended", run.engine, workflow=workflow.id)
        if self._later:
            self._open += 1
            self._at(self.now, self._starter(self._later.pop()))

    def _common(self, run: _Run) -> dict[str, Any]:
        run.seq += 1
        return {"workflow": run.workflow.id, "seq": run.seq, "time": self.now}

    def _tell(self, run: _Run, event: Any) -> None:
        self.engines[run.engine].observe(event, self.now)
        self._schedule(run.engine)

    # -- the oracle ------------------------------------------------------------------------------------

    def _futures(self, policies: Sequence[PolicySpec]) -> Uses | None:
        if not any(spec_name(p) == ORACLE for p in policies):
            return None
        return Uses(self.trace, self.links, tool_speed=self.arrivals.tool_speed)

    def _with_future(self, policies: Sequence[PolicySpec]) -> tuple[list[PolicySpec], Callable[[Engine], None] | None]:
        """The policies with the recorded future told to the oracle, and what ties that to its engine."""
        if self._uses is None:
            return list(policies), None
        future = self._uses.future()
        specs: list[PolicySpec] = [
            {"name": ORACLE, "future": future} if spec_name(p) == ORACLE else p for p in policies
        ]
        return specs, lambda engine: future.bind(engine.tree)
