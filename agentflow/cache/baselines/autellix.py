"""Autellix (arXiv 2502.13965): the program that was served least runs first."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence

from agentflow.cache.ledger import Ledger
from agentflow.cache.policy import CallArrived, CallFinished, Observation, Policy, Score, WaitingCall
from agentflow.events import WorkflowEnded

__all__ = ["Autellix"]


class Autellix(Policy):
    """PLAS: program-level attained service in a multi-level queue; KV is evicted by recency.

    A program's level is the number of ``thresholds`` (decode steps) that its calls so far reached or passed: a
    call starts at the level of its program. Within a level first come, first served. A program whose waiting
    time is at least ``promote`` times its time of service goes back to the first level, and both are counted
    anew. Calls without a workflow are programs of their own. Running calls are not preempted by level: the order
    of the waiting queue is all that a policy decides. O(log levels).
    """

    name = "autellix"

    def __init__(
        self,
        ledger: Ledger,
        clock: Callable[[], float],
        *,
        thresholds: Sequence[float] = (2, 4, 8, 16, 32, 64),
        promote: float = 8.0,
    ) -> None:
        super().__init__(ledger, clock)
        self.thresholds = sorted(float(t) for t in thresholds)
        if not self.thresholds or self.thresholds[0] <= 0 or not promote > 0:
            raise ValueError("thresholds and promote must be above 0")
        self.promote = promote
        self._programs: OrderedDict[str, _Service] = OrderedDict()

    def observe(self, observation: Observation) -> None:
        if isinstance(observation, CallArrived):
            thread = observation.call.thread
            if thread is not None:
                self._program(thread.workflow.id).calls[observation.request] = self.clock()
        elif isinstance(observation, CallFinished):
            thread = observation.call.thread
            program = self._programs.get(thread.workflow.id) if thread is not None else None
            if program is not None:
                self._served(program, observation)
        elif isinstance(observation, WorkflowEnded):
            self._programs.pop(observation.workflow, None)

    def _served(self, program: _Service, finished: CallFinished) -> None:
        arrived = program.calls.pop(finished.request, None)
        if arrived is None:
            return
        in_all = max(0.0, self.clock() - arrived)
        waited = min(max(0.0, finished.queue_seconds), in_all)
        if self._starved(program, waited):
            program.steps, program.waited, program.served = 0, 0.0, 0.0
        else:
            program.waited += waited
        program.served += in_all - waited
        program.steps += finished.output_tokens

    def level(self, call: WaitingCall) -> int:
        """The queue that the call is in, 0 the first."""
        thread = call.call.thread
        program = self._programs.get(thread.workflow.id) if thread is not None else None
        if program is None or self._starved(program, self.clock() - call.arrived):
            return 0
        return bisect_right(self.thresholds, program.steps)

    def score_call(self, call: WaitingCall) -> Score:
        return (float(self.level(call)), call.arrived)

    def _starved(self, program: _Service, waiting: float) -> bool:
        return program.served > 0.0 and (program.waited + waiting) / program.served >= self.promote

    def _program(self, program_id: str) -> _Service:
        program = self._programs.get(program_id)
        if program is None:
            program = self._programs[program_id] = _Service()
            if len(self._programs) > self.ledger.limits.workflows:
                self._programs.popitem(last=False)
        else:
            self._programs.move_to_end(program_id)
        return program


class _Service:
    """What a program got: decode steps, seconds waited and served, and when its open calls arrived."""

    __slots__ = ("calls", "served", "steps", "waited")

    def __init__(self) -> None:
        self.steps = 0
        self.waited = 0.0
        self.served = 0.0
        self.calls: dict[str, float] = {}
