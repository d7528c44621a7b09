"""Programs (workflows) as retention sees them: when they came, what they have out, what they left behind."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from agentflow.cache.ledger import Thread
from agentflow.cache.ttl.tools import ToolKey

__all__ = ["Left", "Pin", "Program", "Programs"]


@dataclass(slots=True)
class Left:
    """What the last finished call of a thread left behind: ``tokens`` of KV, at time ``at``, as call ``index``.

    ``tools`` are the tool calls that it waits for now, by id. ``had_tools`` says whether there were any since.
    ``verdict`` and ``terms`` are the last decision about keeping it.
    """

    index: int
    tokens: int
    at: float
    tools: dict[str, ToolKey] = field(default_factory=dict)
    had_tools: bool = False
    verdict: str = ""
    terms: Mapping[str, float] = field(default_factory=dict)


class Pin:
    """Soft retention of what thread ``thread`` touched up to its call ``index``, for ``ttl`` seconds from ``since``."""

    __slots__ = ("deadline", "index", "program", "reason", "since", "terms", "thread", "tokens", "ttl")

    def __init__(
        self, program: Program, thread: Thread, left: Left, *, since: float, ttl: float, reason: str, tokens: int
    ) -> None:
        self.program = program
        self.thread = thread
        self.index = left.index
        self.tokens = tokens
        self.since = since
        self.ttl = ttl
        self.deadline = since + ttl
        self.reason = reason
        self.terms = left.terms

    def live(self, now: float) -> bool:
        """Before the deadline, or the thread's next request is there already. A clock that went back before the
        pin was made starts it anew, so that it never lasts longer than ``ttl`` after what the clock shows."""
        if now < self.since:
            self.since, self.deadline = now, now + self.ttl
        return now <= self.deadline or self.thread in self.program.busy


class Program:
    """A workflow with at least one call. ``busy`` counts the calls of each thread that wait or run."""

    __slots__ = ("arrival", "busy", "calls", "id", "left", "pins", "steps", "tools")

    def __init__(self, program_id: str, arrival: float) -> None:
        self.id = program_id
        self.arrival = arrival
        self.steps = 0
        self.calls: dict[str, tuple[Thread, int]] = {}
        self.busy: dict[Thread, int] = {}
        self.left: dict[Thread, Left] = {}
        self.pins: dict[Thread, Pin] = {}
        #: Tool calls that are out, and the thread that each belongs to.
        self.tools: dict[str, Thread] = {}

    def arrived(self, request: str, thread: Thread, tokens: int) -> None:
        """A call of the thread waits from now on."""
        if request not in self.calls:
            self.calls[request] = (thread, tokens)
            self.busy[thread] = self.busy.get(thread, 0) + 1

    def finished(self, request: str) -> int:
        """The call is over. Returns the length of its prompt, 0 when it is not known."""
        thread, tokens = self.calls.pop(request, (None, 0))
        if thread is not None:
            count = self.busy[thread] - 1
            if count:
                self.busy[thread] = count
            else:
                del self.busy[thread]
        return tokens

    def leave(self, thread: Thread, left: Left, limit: int) -> None:
        """The thread's last call left that behind."""
        self.left.pop(thread, None)  # so that the newest comes last
        self.left[thread] = left
        if len(self.left) > limit:
            del self.left[next(iter(self.left))]

    def waiting_for(self, agent: str | None) -> Thread | None:
        """The idle thread that a tool call of ``agent`` most likely belongs to: the newest that waits for none yet,
        else the newest."""
        second: Thread | None = None
        for thread in reversed(self.left):
            if thread in self.busy or (agent is not None and thread.agent != agent):
                continue
            if not self.left[thread].tools:
                return thread
            second = second or thread
        return second


class Programs:
    """The programs that are not over, at most ``limit``; those silent for longest are dropped first."""

    def __init__(self, limit: int, dropped: Callable[[Program], None]) -> None:
        self._limit = limit
        self._dropped = dropped
        self._programs: OrderedDict[str, Program] = OrderedDict()
        #: Prompt tokens and number of calls that wait or run.
        self.active_tokens = 0
        self.active = 0

    def __len__(self) -> int:
        return len(self._programs)

    def get(self, program_id: str) -> Program | None:
        """The program of that id, if it is known."""
        return self._programs.get(program_id)

    def arrived(self, thread: Thread, request: str, tokens: int, now: float) -> Program:
        """A call came; its program is made when it is new."""
        program = self._programs.get(thread.workflow.id)
        if program is None:
            program = self._programs[thread.workflow.id] = Program(thread.workflow.id, now)
            if len(self._programs) > self._limit:
                self.drop(next(iter(self._programs)))
        else:
            self._programs.move_to_end(program.id)
        if request not in program.calls:
            program.arrived(request, thread, tokens)
            self.active += 1
            self.active_tokens += tokens
        return program

    def finished(self, thread: Thread, request: str) -> Program | None:
        """A call is over."""
        program = self._programs.get(thread.workflow.id)
        if program is not None and request in program.calls:
            self.active -= 1
            self.active_tokens -= program.finished(request)
        return program

    def drop(self, program_id: str) -> Program | None:
        """Forget a program."""
        program = self._programs.pop(program_id, None)
        if program is not None:
            self.active -= len(program.calls)
            self.active_tokens -= sum(tokens for _, tokens in program.calls.values())
            self._dropped(program)
        return program
