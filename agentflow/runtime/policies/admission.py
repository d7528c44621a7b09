"""Admission control by program: no more workflows at once than the cache holds the state of.

A program is a workflow with those that it started. Beyond saturation, serving all of them a little makes each lose
its KV between two calls and compute it again. Here a program waits until there is room for what it will hold; when
those admitted grow beyond the room, the youngest are paused at a tool boundary and their KV gives way; they
go on when the load is well below the limit (hysteresis), before any new one begins. Whatever the load, a program
that waited for too long goes on, and others are paused for it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from agentflow.cache.ledger import Ledger, NodeRecord
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
from agentflow.events import Event, StateSuperseded, WorkflowEnded, WorkflowPaused

__all__ = ["Admission"]

#: Programs, and workflows started by others, that are followed; the longest silent are forgotten first.
_FOLLOWED = 10_000
#: Notes of pauses that wait to be taken; the oldest go.
_NOTES = 1_000
#: Contexts of a program that are counted, the newest.
_CONTEXTS = 256
#: Workflow, agent and branch.
_Thread = tuple[str, str | None, str | None]


@dataclass(slots=True)
class _Program:
    """One program. ``contexts`` maps its threads to the tokens of their newest call beyond the anchor."""

    id: str
    state: Literal["new", "admitted", "paused"] = "new"
    contexts: dict[_Thread, int] = field(default_factory=dict)
    tokens: int = 0
    most: int = 0
    #: What it counts for in the load.
    load: int = 0
    #: Calls that were sent and are not done, and their workflows.
    calls: dict[str, str] = field(default_factory=dict)
    seen: float = 0.0
    #: Since when calls of it wait to be admitted.
    since: float = 0.0
    order: int = 0


class Admission(Policy):
    """Admits programs up to ``high`` times the pool, and beyond pauses some until the load is below ``low`` times it.

    The load is what the admitted programs' newest contexts take (anchors, which they share, not counted), of each at
    most the pool; a new program is taken for as large as programs were on average. One program is always admitted. A
    program of which nothing was heard for ``silent`` seconds makes no load. The pool holds what runs, and at any time
    many programs wait for tools: in simulation most work was done at about twice the pool, and with less the engine
    stood idle.

    A new program waits for paused ones for at most ``patience`` seconds. Every ``patience`` seconds the program that
    waited longest, if for that long, goes on whatever the load, for as many seconds at least: every call runs in the
    end. ``observe`` and scores are O(1), pausing is O(programs admitted).
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
        patience: float = 300.0,
    ) -> None:
        super().__init__(ledger, clock)
        if not 0 < low < high or silent <= 0 or not patience >= 0:
            raise UsageError(
                "admission: low must be above 0 and below high, silent above 0 seconds, patience at least 0 seconds"
            )
        self.high = high
        self.low = low
        self.silent = silent
        self.patience = patience
        self._pool = 0
        self._load = 0
        self._mean = 0.0
        self._order = 0
        self._programs: OrderedDict[str, _Program] = OrderedDict()
        self._admitted: dict[str, _Program] = {}
        self._paused: dict[str, _Program] = {}
        #: Programs that are not admitted and have calls, by state, the longest waiting first.
        self._waiting: Mapping[str, OrderedDict[str, _Program]] = {"new": OrderedDict(), "paused": OrderedDict()}
        #: Which program last went on whatever the load, and when.
        self._favoured = ""
        self._favoured_at = 0.0
        self._parents: OrderedDict[str, str] = OrderedDict()
        self._flipped: list[str] = []
        self._notes: deque[Note] = deque(maxlen=_NOTES)
        self._looked = 0.0
        self._counts: Counter[str] = Counter()

    def observe(self, observation: Observation) -> None:
        if isinstance(observation, Event):
            self._event(observation)
        elif isinstance(observation, CallArrived):
            self._arrived(observation)
        elif isinstance(observation, CallFinished):
            self._finished(observation)
        elif isinstance(observation, PoolState):
            if observation.total != self._pool:
                self._pool = observation.total
                for program in self._admitted.values():
                    self._weigh(program)
            now = self.clock()
            if now - self._looked > 1.0 or now < self._looked:
                self._forget_silent(now)

    def score_call(self, call: WaitingCall) -> Score:
        thread = call.call.thread
        program = self._programs.get(self._root(thread.workflow.id)) if thread is not None else None
        if program is None or program.state == "admitted" or call.preempted:
            return (0.0,)
        now = self.clock()
        self._waits(program, now)
        if self._fits(program, now):
            self._admit(program)
            return (0.0,)
        self._counts["held"] += 1
        return (HOLD,)

    def score_node(self, node: NodeRecord) -> Score:
        if not self._paused:
            return (1.0,)
        for thread in node.owners:
            if self._root(thread.workflow.id) not in self._paused:
                return (1.0,)
        return (0.0,) if node.owners and not node.anonymous else (1.0,)

    def explain(self, node: NodeRecord) -> Explanation | None:
        if self.score_node(node) != (0.0,):
            return None
        return Explanation("its program is paused to make room", {"load": float(self._load), "pool": float(self._pool)})

    def act(self) -> Sequence[Note]:
        notes = list(self._notes)
        self._notes.clear()
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

    # -- observe ---------------------------------------------------------------------------------------

    def _event(self, event: Event) -> None:
        workflow = event.workflow
        if event.parent is not None and workflow not in self._parents:
            self._adopt(workflow, event.parent)
        if isinstance(event, WorkflowEnded | WorkflowPaused):
            root = self._root(workflow)
            program = self._programs.get(root)
            if root != workflow:
                if program is not None:
                    self._shrink(program, workflow)
                if isinstance(event, WorkflowEnded) and (program is None or workflow not in program.calls.values()):
                    del self._parents[workflow]
            elif program is not None:
                if program.most:
                    self._mean += 0.1 * (program.most - self._mean) if self._mean else program.most
                self._drop(program)
        elif isinstance(event, StateSuperseded) and event.branch is not None:
            program = self._programs.get(self._root(workflow))
            if program is not None:
                self._shrink(program, workflow, event.branch)

    def _arrived(self, seen: CallArrived) -> None:
        thread = seen.call.thread
        if thread is None:
            return
        workflow = thread.workflow.id
        program = self._program(self._root(workflow))
        program.calls[seen.request] = workflow
        if program.state != "admitted":
            self._waits(program, program.seen)
        self._grow(program, {(workflow, thread.agent, thread.branch): seen.tokens - seen.anchor_tokens})

    def _finished(self, seen: CallFinished) -> None:
        thread = seen.call.thread
        root = self._root(thread.workflow.id) if thread is not None else ""
        if root not in self._programs:
            return
        program = self._program(root)
        program.calls.pop(seen.request, None)
        if program.state != "admitted":
            if not program.calls:
                self._waiting[program.state].pop(root, None)
        elif self._load > self.high * self._pool > 0:
            self._pause_some()

    # -- programs --------------------------------------------------------------------------------------

    def _root(self, workflow: str) -> str:
        """The workflow that all began with; a parent may have become known later than the children."""
        while (parent := self._parents.get(workflow)) is not None:
            workflow = parent
        return workflow

    def _adopt(self, workflow: str, parent: str) -> None:
        """The workflow belongs to its parent's program, with the calls that were made before that was known."""
        root = self._root(parent)
        if root == workflow:
            return
        own = self._programs.get(workflow)
        self._parents[workflow] = root
        if len(self._parents) > _FOLLOWED:
            self._parents.popitem(last=False)
        if own is None:
            return
        admitted = own.state == "admitted"
        self._drop(own)
        program = self._program(root)
        program.calls |= own.calls
        if program.state != "admitted":
            if admitted:
                self._admit(program)
            elif program.calls:
                self._waits(program, program.seen)
        self._grow(program, own.contexts)

    def _program(self, name: str) -> _Program:
        """The program of that name, made when it is new; it was heard of now."""
        program = self._programs.get(name)
        if program is None:
            self._order += 1
            program = self._programs[name] = _Program(name, order=self._order)
            if len(self._programs) > _FOLLOWED:
                self._drop(next(iter(self._programs.values())))
        self._programs.move_to_end(name)
        program.seen = self.clock()
        return program

    def _grow(self, program: _Program, contexts: Mapping[_Thread, int]) -> None:
        for thread, tokens in contexts.items():
            program.tokens += tokens - program.contexts.pop(thread, 0)
            program.contexts[thread] = tokens
            if len(program.contexts) > _CONTEXTS:
                program.tokens -= program.contexts.pop(next(iter(program.contexts)))
        program.most = max(program.most, program.tokens)
        self._weigh(program)

    def _shrink(self, program: _Program, workflow: str, branch: str | None = None) -> None:
        """Count no longer what a workflow, or one branch of it, held."""
        for thread in [t for t in program.contexts if t[0] == workflow and branch in (None, t[2])]:
            program.tokens -= program.contexts.pop(thread)
        self._weigh(program)

    def _weigh(self, program: _Program) -> None:
        """Bring the load up to date. More than the pool of one program cannot be cached."""
        load = min(program.tokens, self._pool) if program.state == "admitted" else 0
        self._load += load - program.load
        program.load = load

    # -- who runs --------------------------------------------------------------------------------------

    def _waits(self, program: _Program, now: float) -> None:
        waiting = self._waiting[program.state]
        if program.id not in waiting:
            program.since = now
            waiting[program.id] = program

    def _fits(self, program: _Program, now: float) -> bool:
        if not self._admitted or not self._pool:
            return True
        waited = now - program.since
        if program.state == "paused":
            limit, needed = self.low, float(program.tokens)
        else:
            limit, needed = self.high, max(program.tokens, self._mean)
            if self._waiting["paused"] and waited < self.patience:
                return False  # those that were interrupted go on first
        if self._load + min(needed, self._pool) <= limit * self._pool:
            return True
        if waited < self.patience or now - self._favoured_at < self.patience or self._longest_waiting() is not program:
            return False
        self._favoured, self._favoured_at = program.id, now
        self._counts["favoured"] += 1
        return True

    def _longest_waiting(self) -> _Program:
        return min((next(iter(w.values())) for w in self._waiting.values() if w), key=lambda p: p.since)

    def _admit(self, program: _Program) -> None:
        resumed = program.state == "paused"
        self._out(program)
        program.state = "admitted"
        self._admitted[program.id] = program
        self._weigh(program)
        self._counts["resumed" if resumed else "admitted"] += 1

    def _pause_some(self) -> None:
        """Pause the youngest programs that have no call out, until the rest is within the limit.

        The one that went on whatever the load is left alone for ``patience`` seconds.
        """
        favoured = self._favoured if self.clock() - self._favoured_at < self.patience else ""
        for program in sorted(self._admitted.values(), key=lambda p: -p.order):
            if self._load <= self.high * self._pool or len(self._admitted) == 1:
                return
            if program.calls or program.id == favoured:
                continue
            self._out(program)
            program.state = "paused"
            self._paused[program.id] = program
            self._rank_again(program)
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

    def _out(self, program: _Program) -> None:
        """Take the program out of where its state had put it; it is as new."""
        self._admitted.pop(program.id, None)
        if self._paused.pop(program.id, None) is not None:
            self._rank_again(program)
        for waiting in self._waiting.values():
            waiting.pop(program.id, None)
        program.state = "new"
        self._weigh(program)

    def _rank_again(self, program: _Program) -> None:
        self._flipped += {program.id, *(thread[0] for thread in program.contexts)}

    def _drop(self, program: _Program) -> None:
        self._out(program)
        del self._programs[program.id]

    def _forget_silent(self, now: float) -> None:
        if now < self._looked:  # the clock was set back
            self._favoured_at = min(self._favoured_at, now)
            for program in self._programs.values():
                program.seen = min(program.seen, now)
                program.since = min(program.since, now)
        self._looked = now
        silent = []
        for program in self._programs.values():
            if now - program.seen <= self.silent:
                break
            if not program.calls:
                silent.append(program)
        for program in silent:
            self._counts["silent"] += program.state == "admitted"
            self._drop(program)
