"""Admission control by program: no more workflows at once than the cache holds the state of.

A program is a workflow with those that it started. Beyond saturation, serving all of them a little makes each lose
its KV between two calls and compute it again. Here a program waits until there is room for what it will hold; when
those admitted grow beyond the room, the youngest are paused at a tool boundary and their KV gives way; they
go on when the load is well below the limit (hysteresis), before any new one begins.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from agentflow.cache.ledger import CallRef, Ledger, NodeRecord
from agentflow.cache.policy import (
    HOLD,
    CallArrived,
    CallFinished,
    Explanation,
    Note,
    Observation,
    Policy,
    PoolState,
    Score,
    WaitingCall,
)
from agentflow.errors import UsageError
from agentflow.events import Event, WorkflowEnded, WorkflowPaused

__all__ = ["Admission"]

#: Programs that are followed; the longest silent are forgotten first.
_FOLLOWED = 10_000


@dataclass(slots=True)
class _Program:
    """One program. ``contexts`` maps its threads to the tokens of their newest call beyond the anchor."""

    id: str
    state: Literal["new", "admitted", "paused"] = "new"
    contexts: dict[tuple[str, str | None, str | None], int] = field(default_factory=dict)
    tokens: int = 0
    #: Calls that were sent and are not done.
    out: int = 0
    seen: float = 0.0
    order: int = 0


class Admission(Policy):
    """Admits programs up to ``high`` times the pool, and beyond pauses some until the load is below ``low`` times it.

    The load is what the admitted programs' newest contexts take (anchors, which they share, not counted); a new
    program is taken for as large as programs were on average. One program is always admitted. A program of which
    nothing was heard for ``silent`` seconds makes no load. The pool holds what runs, and at any time many programs wait
    for tools: in simulation most work was done at about twice the pool, and with less the engine stood idle.
    ``observe`` and scores are O(1), pausing is
    O(programs admitted).
    """

    name: ClassVar[str] = "admission"
    precedence: ClassVar[int] = 10
    scores_by_owner: ClassVar[bool] = True
    wants_pool_state: ClassVar[bool] = True

    def __init__(
        self,
        ledger: Ledger,
        clock: Callable[[], float],
        *,
        high: float = 2.0,
        low: float = 1.5,
        silent: float = 120.0,
    ) -> None:
        super().__init__(ledger, clock)
        if not 0 < low < high or silent <= 0:
            raise UsageError("admission: low must be above 0 and below high, silent above 0 seconds")
        self.high = high
        self.low = low
        self.silent = silent
        self._pool = 0
        self._load = 0
        self._mean = 0.0
        self._order = 0
        self._programs: OrderedDict[str, _Program] = OrderedDict()
        self._admitted: dict[str, _Program] = {}
        self._paused: dict[str, _Program] = {}
        self._parents: OrderedDict[str, str] = OrderedDict()
        self._flipped: list[str] = []
        self._notes: list[Note] = []
        self._looked = 0.0
        self._counts: Counter[str] = Counter()

    def observe(self, observation: Observation) -> None:
        if isinstance(observation, Event):
            self._event(observation)
        elif isinstance(observation, CallArrived):
            program = self._of(observation.call)
            if program is not None:
                program.out += 1
                self._sized(program, observation.call, observation.tokens - observation.anchor_tokens)
        elif isinstance(observation, CallFinished):
            program = self._of(observation.call)
            if program is not None:
                program.out = max(0, program.out - 1)
                if program.state == "admitted" and self._load > self.high * self._pool > 0:
                    self._pause_some()
        elif isinstance(observation, PoolState):
            self._pool = observation.total
            now = self.clock()
            if now - self._looked > 1.0 or now < self._looked:
                self._looked = now
                self._forget_silent(now)

    def score_call(self, call: WaitingCall) -> Score:
        program = self._of(call.call)
        if program is None or program.state == "admitted" or call.preempted:
            return (0.0,)
        if self._fits(program):
            self._admit(program)
            return (0.0,)
        self._counts["held"] += 1
        return (HOLD,)

    def score_node(self, node: NodeRecord) -> Score:
        if not self._paused:
            return (1.0,)
        for thread in node.owners:
            if self._parents.get(thread.workflow.id, thread.workflow.id) not in self._paused:
                return (1.0,)
        return (0.0,) if node.owners and not node.anonymous else (1.0,)

    def explain(self, node: NodeRecord) -> Explanation | None:
        if self.score_node(node) != (0.0,):
            return None
        return Explanation("its program is paused to make room", {"load": float(self._load), "pool": float(self._pool)})

    def act(self) -> Sequence[Note]:
        notes, self._notes = self._notes, []
        return notes

    def rescored(self) -> Sequence[str]:
        flipped, self._flipped = self._flipped, []
        return flipped

    def stats(self) -> Mapping[str, float]:
        return {
            "admitted": len(self._admitted),
            "paused": len(self._paused),
            "load": self._load,
            "pool": self._pool,
            **{f"total_{name}": n for name, n in self._counts.items()},
        }

    # -- programs --------------------------------------------------------------------------------------

    def _event(self, event: Event) -> None:
        if event.parent is not None and event.workflow not in self._parents:
            self._parents[event.workflow] = self._parents.get(event.parent, event.parent)
            if len(self._parents) > _FOLLOWED:
                self._parents.popitem(last=False)
        if isinstance(event, WorkflowEnded | WorkflowPaused):
            root = self._parents.pop(event.workflow, event.workflow)
            if root == event.workflow and (program := self._programs.pop(root, None)) is not None:
                if program.tokens:
                    self._mean += 0.1 * (program.tokens - self._mean) if self._mean else program.tokens
                self._leave(program)

    def _of(self, call: CallRef) -> _Program | None:
        if call.thread is None:
            return None
        name = call.thread.workflow.id
        name = self._parents.get(name, name)
        program = self._programs.get(name)
        if program is None:
            self._order += 1
            program = self._programs[name] = _Program(name, order=self._order)
            if len(self._programs) > _FOLLOWED:
                self._leave(self._programs.popitem(last=False)[1])
        program.seen = self.clock()
        return program

    def _sized(self, program: _Program, call: CallRef, tokens: int) -> None:
        assert call.thread is not None
        key = (call.thread.workflow.id, call.thread.agent, call.thread.branch)
        more = tokens - program.contexts.get(key, 0)
        program.contexts[key] = tokens
        if len(program.contexts) > 256:
            more -= program.contexts.pop(next(iter(program.contexts)))
        program.tokens += more
        if program.state == "admitted":
            self._load += more

    def _fits(self, program: _Program) -> bool:
        if not self._admitted or not self._pool:
            return True
        needed = max(program.tokens, self._mean if program.state == "new" else 0.0)
        if program.state == "paused":
            return self._load + needed <= self.low * self._pool
        if any(p.out for p in self._paused.values()):
            return False  # those that were interrupted go on first
        return self._load + needed <= self.high * self._pool

    def _admit(self, program: _Program) -> None:
        resumed = program.state == "paused"
        self._paused.pop(program.id, None)
        program.state = "admitted"
        self._admitted[program.id] = program
        self._load += program.tokens
        self._counts["resumed" if resumed else "admitted"] += 1
        if resumed:
            self._flipped.append(program.id)

    def _pause_some(self) -> None:
        """Pause the youngest programs that have no call out, until the rest is within the limit."""
        for program in sorted(self._admitted.values(), key=lambda p: -p.order):
            if self._load <= self.high * self._pool or len(self._admitted) == 1:
                return
            if program.out:
                continue
            self._leave(program)
            program.state = "paused"
            self._paused[program.id] = program
            self._flipped.append(program.id)
            self._counts["paused"] += 1
            self._notes.append(
                Note(
                    "release",
                    "paused at a tool boundary: the programs admitted need more than the pool",
                    program.tokens,
                    program.id,
                    terms={"load": float(self._load), "pool": float(self._pool)},
                )
            )

    def _leave(self, program: _Program) -> None:
        if self._admitted.pop(program.id, None) is not None:
            self._load -= program.tokens
        if self._paused.pop(program.id, None) is not None:
            self._flipped.append(program.id)
        program.state = "new"

    def _forget_silent(self, now: float) -> None:
        for program in [p for p in self._admitted.values() if not p.out and now - p.seen > self.silent]:
            self._leave(program)
            self._counts["silent"] += 1
        for program in [p for p in self._paused.values() if not p.out and now - p.seen > self.silent]:
            self._leave(program)
