"""Soft pins on the KV that programs left behind, and program-level FCFS: the common part of all TTL policies.

A pin is a higher score, never a lock. Order of release: what is not pinned first, by recency; then, under
pressure, the pins of the program that arrived last; the program that arrived first keeps its KV longest. With
every pin held some node always has the lowest score, so the pool can never wedge. Expiry is seen when a node
is scored.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from agentflow.cache.ledger import Ledger, NodeRecord, Thread
from agentflow.cache.policy import (
    CallArrived,
    CallFinished,
    Effect,
    Explanation,
    Note,
    Observation,
    Policy,
    PoolState,
    Score,
    WaitingCall,
)
from agentflow.cache.ttl.programs import Left, Pin, Program, Programs
from agentflow.cache.ttl.tools import ToolDurations, ToolKey
from agentflow.cache.ttl.utility import Memorability, MissCost, QueueingDelay
from agentflow.events import ToolEnded, ToolStarted, WorkflowEnded, WorkflowPaused

__all__ = ["Lifetime", "Retention"]

UNPINNED: Score = (0.0, 0.0)
_NOTES = 512


class Lifetime(NamedTuple):
    """How long to keep something, in seconds, why, and from which numbers."""

    ttl: float
    reason: str
    terms: Mapping[str, float]


class Retention(Policy):
    """Base of TTL policies: a subclass says in :meth:`lifetime` for how long a tool call is worth waiting.

    ``budget`` is the share of the pool that pins may hold together (as far as the pool's size is known); beyond
    it the pins of the program that arrived last are released. ``order_calls`` is program-level FCFS.
    ``patience``: a call that waits for longer than that many seconds ranks with the pinned ones, so that a
    stream of pinned programs cannot starve it. Scoring a node is O(owners), a call O(pins of its program).
    """

    #: Whether preempted calls come before all others.
    preempted_first = True

    wants_pool_state = True

    def __init__(
        self,
        ledger: Ledger,
        clock: Callable[[], float],
        *,
        durations: ToolDurations,
        budget: float = 1.0,
        order_calls: bool = True,
        patience: float = math.inf,
        programs: int = 10_000,
        timeouts: str = "censored",
    ) -> None:
        super().__init__(ledger, clock)
        if not 0.0 < budget <= 1.0:
            raise ValueError("budget is a share of the pool: above 0 and at most 1")
        if timeouts not in ("censored", "returned"):
            raise ValueError("timeouts must be 'censored' or 'returned'")
        if programs < 1 or not patience >= 0:
            raise ValueError("programs must be at least 1 and patience at least 0")
        self.durations = durations
        self.budget = budget
        self.patience = patience
        self.miss = MissCost()
        self.delay = QueueingDelay()
        self.memorability = Memorability()
        self.pool: PoolState | None = None
        self.counts: Counter[str] = Counter()
        self.programs = Programs(programs, self._dropped)
        self._ordering = order_calls
        self._timeouts_return = timeouts == "returned"
        self._pins: dict[Thread, Pin] = {}
        self._pinned_tokens = 0
        self._deadlines: list[tuple[float, int, Pin]] = []
        self._latest: list[tuple[float, int, Pin]] = []
        self._made = 0
        self._notes: deque[Note] = deque(maxlen=_NOTES)
        self._handlers: dict[type, Callable[[Any], None]] = {
            CallArrived: self._arrived,
            CallFinished: self._finished,
            PoolState: self._pool_state,
            ToolStarted: self._tool_started,
            ToolEnded: self._tool_ended,
            WorkflowEnded: self._workflow_ended,
            WorkflowPaused: self._workflow_paused,
        }

    # -- what a subclass decides -----------------------------------------------------------------------

    def lifetime(self, program: Program, left: Left, tools: Sequence[ToolKey], now: float) -> Lifetime:
        """How long to keep what a call left behind, now that it waits for ``tools``."""
        raise NotImplementedError

    def after_call(self, program: Program, thread: Thread, left: Left, now: float) -> Lifetime | None:
        """How long to keep it when the call is over and no tool has started yet; None for no pin."""
        return None

    def tools_done(self, program: Program, thread: Thread, left: Left, now: float) -> Lifetime | None:
        """How long to keep it once all its tools have returned; None to leave the pin as it is."""
        return None

    def returned(self, program: Program, thread: Thread, left: Left, now: float) -> None:
        """The thread's next call is there."""

    # -- observe ---------------------------------------------------------------------------------------

    def observe(self, observation: Observation) -> None:
        handler = self._handlers.get(type(observation))
        if handler is not None:
            handler(observation)

    def _pool_state(self, state: PoolState) -> None:
        self.pool = state

    def _arrived(self, arrived: CallArrived) -> None:
        thread = arrived.call.thread
        if thread is None:
            return
        now = self.clock()
        self._sweep(now)
        program = self.programs.arrived(thread, arrived.request, arrived.tokens, now)
        left = program.left.get(thread)
        if left is not None:
            if left.had_tools:
                self.counts["returned_to_pin" if thread in self._pins else "returned_to_none"] += 1
            self.returned(program, thread, left, now)

    def _finished(self, finished: CallFinished) -> None:
        thread = finished.call.thread
        if thread is None:
            return
        program = self.programs.finished(thread, finished.request)
        if program is None:
            return
        now = self.clock()
        before = program.left.get(thread)
        expected = before.tokens if before is not None else 0
        self.miss.finished(finished, expected=expected)
        if expected and finished.cached_tokens - finished.host_tokens < 0.9 * min(expected, finished.tokens):
            self.delay.add(finished.queue_seconds)
        program.steps += 1
        self._release(thread)
        if before is not None:
            for call_id in before.tools:
                program.tools.pop(call_id, None)
        left = Left(finished.call.index, finished.tokens + finished.output_tokens, now)
        program.leave(thread, left, self.ledger.limits.threads_per_workflow)
        if finished.tool is not None:
            self._out(
                program, thread, left, f"answer:{finished.request}", ToolKey(finished.tool, finished.variant), now
            )
            return
        lifetime = self.after_call(program, thread, left, now)
        if lifetime is not None:
            self._decide(program, thread, left, lifetime, now)

    def _tool_started(self, event: ToolStarted) -> None:
        now = self.clock()
        key = ToolKey(event.tool, event.variant)
        self.durations.started((event.workflow, event.call_id), key, now)
        program = self.programs.get(event.workflow)
        if program is None:
            return
        thread = program.waiting_for(event.agent)
        if thread is None:
            return
        left = program.left[thread]
        for call_id in [c for c in left.tools if c.startswith("answer:")]:
            del left.tools[call_id]  # what was only guessed from the answer is known now
            program.tools.pop(call_id, None)
        self._out(program, thread, left, event.call_id, key, now)

    def _out(self, program: Program, thread: Thread, left: Left, call_id: str, key: ToolKey, now: float) -> None:
        left.tools[call_id] = key
        left.had_tools = True
        program.tools[call_id] = thread
        if len(program.tools) > self.ledger.limits.tools_per_workflow:
            self._back(program, next(iter(program.tools)))
        self._decide(program, thread, left, self.lifetime(program, left, list(left.tools.values()), now), now)

    def _tool_ended(self, event: ToolEnded) -> None:
        cut = event.outcome == "cancelled" or (event.outcome == "timeout" and not self._timeouts_return)
        self.durations.ended((event.workflow, event.call_id), event.tool, event.duration, censored=cut)
        program = self.programs.get(event.workflow)
        if program is None:
            return
        thread, left = self._back(program, event.call_id)
        if thread is None or left is None or left.tools or thread in program.busy:
            return
        now = self.clock()
        lifetime = self.tools_done(program, thread, left, now)
        if lifetime is not None:
            self._decide(program, thread, left, lifetime, now)

    def _back(self, program: Program, call_id: str) -> tuple[Thread | None, Left | None]:
        thread = program.tools.pop(call_id, None)
        left = program.left.get(thread) if thread is not None else None
        if left is not None:
            left.tools.pop(call_id, None)
        return thread, left

    def _workflow_ended(self, event: WorkflowEnded) -> None:
        program = self.programs.drop(event.workflow)
        if program is not None and event.outcome != "cancelled":
            self.memorability.finished(program.steps)

    def _workflow_paused(self, event: WorkflowPaused) -> None:
        program = self.programs.get(event.workflow)
        for thread in list(program.pins) if program is not None else ():
            self._release(thread, "its workflow waits for somebody outside")

    def _dropped(self, program: Program) -> None:
        now = self.clock()
        for thread in list(program.pins):
            self._release(thread, "its workflow is over")
        for call_id in program.tools:
            self.durations.gone((program.id, call_id), now)

    # -- pins ------------------------------------------------------------------------------------------

    @property
    def pins(self) -> int:
        """Pins that are held, expired ones that nobody asked for yet included."""
        return len(self._pins)

    @property
    def pinned_tokens(self) -> int:
        """Tokens under all pins; what several share counts for each."""
        return self._pinned_tokens

    def _decide(self, program: Program, thread: Thread, left: Left, lifetime: Lifetime, now: float) -> None:
        self._release(thread)
        left.verdict, left.terms = lifetime.reason, lifetime.terms
        if lifetime.ttl > 0.0:
            self._pin(
                Pin(program, thread, left, since=now, ttl=lifetime.ttl, reason=lifetime.reason, tokens=left.tokens)
            )
            self._note("pin", lifetime.reason, self._pins.get(thread))
            self._keep_budget()
        else:
            self.counts["not_kept"] += 1
        self._sweep(now)

    def _pin(self, pin: Pin) -> None:
        self._pins[pin.thread] = pin.program.pins[pin.thread] = pin
        self._pinned_tokens += pin.tokens
        self._made += 1
        heapq.heappush(self._deadlines, (pin.deadline, self._made, pin))
        heapq.heappush(self._latest, (-pin.program.arrival, self._made, pin))
        if len(self._latest) > 2 * len(self._pins) + 64:
            self._latest = [e for e in self._latest if self._pins.get(e[2].thread) is e[2]]
            heapq.heapify(self._latest)
            self._deadlines = [e for e in self._deadlines if self._pins.get(e[2].thread) is e[2]]
            heapq.heapify(self._deadlines)

    def _release(self, thread: Thread, reason: str | None = None) -> None:
        """Take a pin away; without a reason because something newer takes its place."""
        pin = self._pins.pop(thread, None)
        if pin is None:
            return
        pin.program.pins.pop(thread, None)
        self._pinned_tokens -= pin.tokens
        if reason is not None:
            left = pin.program.left.get(thread)
            if left is not None:
                left.verdict = reason
            self._note("release", reason, pin)

    def _keep_budget(self) -> None:
        if self.pool is None or self.budget >= 1.0:
            return
        allowed = self.budget * self.pool.total
        while self._pinned_tokens > allowed and self._latest:
            pin = heapq.heappop(self._latest)[2]
            if self._pins.get(pin.thread) is pin:
                self.counts["over_budget"] += 1
                self._release(pin.thread, "over the budget of pins; its program arrived last")

    def _sweep(self, now: float) -> None:
        """Drop pins whose deadline has passed and whose request is not there. O(log n) each."""
        while self._deadlines and self._deadlines[0][0] < now:
            pin = heapq.heappop(self._deadlines)[2]
            # One that is held for its request is dropped when that is over.
            if self._pins.get(pin.thread) is pin and pin.thread not in pin.program.busy:
                self.counts["expired"] += 1
                self._release(pin.thread, f"its time-to-live of {pin.ttl:.3g} s is over")

    def _note(self, kind: Any, reason: str, pin: Pin | None) -> None:
        if pin is not None:
            self._notes.append(
                Note(kind, reason, tokens=pin.tokens, workflow=pin.program.id, agent=pin.thread.agent, terms=pin.terms)
            )

    # -- score, act, explain ---------------------------------------------------------------------------

    def pin_of(self, node: NodeRecord) -> Pin | None:
        """The live pin that keeps the node: of several that of the program that arrived first. O(owners)."""
        pins = self._pins
        if not pins:
            return None
        best: Pin | None = None
        for thread, index in node.owners.items():
            pin = pins.get(thread)
            if pin is None or index < pin.index or not pin.live(self.clock()):
                continue
            if best is None or pin.program.arrival < best.program.arrival:
                best = pin
        return best

    def score_node(self, node: NodeRecord) -> Score:
        pin = self.pin_of(node)
        return UNPINNED if pin is None else (1.0, -pin.program.arrival)

    def score_call(self, call: WaitingCall) -> Score:
        if not self._ordering:
            return ()
        thread = call.call.thread
        program = self.programs.get(thread.workflow.id) if thread is not None else None
        arrival = program.arrival if program is not None else call.arrived
        if call.preempted and self.preempted_first:
            tier = 0.0
        else:
            now = self.clock()
            kept = program is not None and any(p.ttl > 0.0 and p.live(now) for p in program.pins.values())
            tier = 1.0 if kept or now - call.arrived > self.patience else 2.0
        return (tier, arrival, call.arrived)

    def act(self) -> Sequence[Effect | Note]:
        """Pins and releases since the last time, for the log. O(1) when there are none."""
        if self._deadlines:
            self._sweep(self.clock())
        if not self._notes:
            return ()
        notes = list(self._notes)
        self._notes.clear()
        return notes

    def explain(self, node: NodeRecord) -> Explanation | None:
        pin = self.pin_of(node)
        now = self.clock()
        if pin is not None:
            rest = {**pin.terms, "ttl": pin.ttl, "seconds_left": pin.deadline - now}
            return Explanation("pinned, released early for want of room: its program arrived last", rest)
        for thread, index in node.owners.items():
            program = self.programs.get(thread.workflow.id)
            left = program.left.get(thread) if program is not None else None
            if left is not None and left.verdict and index >= left.index:
                return Explanation(f"not pinned: {left.verdict}", left.terms)
        return Explanation("not pinned, least recently used there")

    def stats(self) -> Mapping[str, float]:
        return {
            "pins": float(len(self._pins)),
            "pinned_tokens": float(self._pinned_tokens),
            "programs": float(len(self.programs)),
            "tools_running": float(self.durations.running),
            "observations": float(self.durations.observations),
            "eta": self.memorability.eta(),
            "queueing_delay": self.delay.mean(),
            "prefill_seconds_per_token": self.miss.prefill_rate,
            "reload_seconds_per_token": self.miss.reload_rate,
            "found_on_host": self.miss.on_host,
            **{name: float(n) for name, n in self.counts.items()},
        }

    def active(self) -> tuple[float, int]:
        """Tokens that active calls hold, and how many calls they are: as the engine tells, else by their prompts."""
        if self.pool is not None and self.pool.running:
            return float(self.pool.held), self.pool.running
        return float(self.programs.active_tokens), self.programs.active
