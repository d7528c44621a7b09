"""The framework's end of the runtime layer: one hook on the way of every model and tool call.

A :class:`Guard` is a policy that observes the same events as those in the engine and, besides, stands on the way of
calls: it may refuse one (``allow``), wrap it (``around``) and hear how it went (``finished``). :class:`Guards` drives
any number of them, in their order of precedence. A guard that fails is left out; the call goes on without it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal, TypeAlias

from agentflow.cache.ledger import Ledger
from agentflow.cache.policy import Policy, PolicySpec, check_policies
from agentflow.errors import UsageError
from agentflow.events import Event
from agentflow.runtime.layer import Runtime

__all__ = [
    "Ask",
    "Deny",
    "Done",
    "Guard",
    "Guards",
    "Proceed",
    "StartAgent",
    "Stop",
    "Verdict",
    "Work",
    "run_inside",
]

logger = logging.getLogger("agentflow.runtime")


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A model or tool call that is about to be made.

    ``name`` is the tool, or the agent whose call of the model it is. Equal ``key`` means that the same is asked for.
    ``pure`` work has no effect and may be answered from memory, made twice, or made early. ``tokens`` is the length
    of a prompt.
    """

    kind: Literal["model", "tool"]
    name: str
    key: str = ""
    pure: bool = False
    workflow: str | None = None
    agent: str | None = None
    tenant: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    tokens: int = 0


@dataclass(slots=True, kw_only=True)
class Done:
    """What came of work. ``value`` is the caller's own; ``ok`` says that it is a result and no failure, ``keep`` that
    it may be given again to whoever asks for the same. ``seconds`` it took, ``size`` in bytes. Tokens are a model
    call's. ``source`` says where it is from if not from the work itself.
    """

    value: Any
    ok: bool = True
    keep: bool = False
    seconds: float = 0.0
    size: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    source: str = ""


@dataclass(frozen=True, slots=True)
class Deny:
    """Do not make this call: its caller is told ``text``, and goes on. For tools, that is the model."""

    text: str


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask a person first, by an interrupt of the graph; anything but an approval denies the call."""

    question: str


@dataclass(frozen=True, slots=True)
class Stop:
    """End the workflow. ``reason`` is one word, as :class:`~agentflow.errors.WorkflowStopped` has it."""

    reason: str
    text: str


Verdict: TypeAlias = Deny | Ask | Stop
Proceed: TypeAlias = Callable[[], Awaitable[Done]]


@dataclass(frozen=True, slots=True)
class StartAgent:
    """Start the model call with which ``agent`` will probably begin, on the state that it will probably see."""

    workflow: str
    agent: str
    reason: str
    value: float = 0.0


class Guard(Policy):
    """Base of the policies that the framework drives. Its methods are called from many threads, one at a time, except
    ``around``, which runs on the caller's event loop and must not block it."""

    side: ClassVar[Literal["engine", "framework"]] = "framework"

    def __init__(self, ledger: Ledger, clock: Callable[[], float]) -> None:
        super().__init__(ledger, clock)
        #: For what ``around`` shares with the rest.
        self.lock = threading.RLock()

    def allow(self, work: Work) -> Verdict | None:
        """None lets the work go on. Asked once per call, before anything of it begins."""
        return None

    async def around(self, work: Work, proceed: Proceed) -> Done:
        """Do the work by ``await proceed()``, or in another way. Each further ``proceed()`` is a try of its own."""
        return await proceed()

    def approved(self, work: Work) -> None:
        """A person approved of work for which ``allow`` said :class:`Ask`."""

    def withdrawn(self, work: Work) -> None:
        """Work that was let go on, or approved, is not made after all: another call of its message stopped them all,
        or waits for a person, after whom all are asked about again."""

    def finished(self, work: Work, done: Done) -> None:
        """The work is done, well or not. Called for streams too, which ``around`` does not see."""

    def rules_tools(self) -> str:
        """What of this guard's options must hold for every tool call, for people; empty when nothing does."""
        return ""

    def start(self) -> Sequence[StartAgent]:
        """Agents worth starting early. Asked when an agent begins a step."""
        return ()


class Guards:
    """Drives guards on one stream of events. Thread-safe. ``clock`` gives seconds."""

    def __init__(self, policies: Sequence[PolicySpec], *, clock: Callable[[], float] = time.time) -> None:
        check_policies(policies)
        self.runtime = Runtime(policies, clock=clock)
        for policy in self.runtime.policies:
            if not isinstance(policy, Guard):
                raise UsageError(
                    f"policy {policy.name!r} works inside the engine: give it to the engine,"
                    f" EmbeddedEngine(policies=[{policy.name!r}, ...])"
                )
        self.clock = clock
        self._lock = threading.RLock()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the guards that have a say, first to last."""
        return self.runtime.live_names

    def observe(self, event: Event) -> None:
        """Take in an event of the framework. Never raises."""
        with self._lock:
            self.runtime.observe(event)
            if self.runtime.acts:
                self.runtime.act()  # their notes; a guard has no other effect of this kind

    def allow(self, work: Work) -> Verdict | None:
        """The first guard's verdict that there is. Never raises."""
        with self._lock:
            for guard in self._having("allow"):
                try:
                    verdict = guard.allow(work)
                    if verdict is not None and not isinstance(verdict, Verdict):
                        raise TypeError(f"allow() gave {verdict!r}: None, Deny, Ask or Stop are known")
                except Exception:
                    self.runtime.failed(guard, "allow")
                    continue
                if verdict is not None:
                    self.runtime.counters[type(verdict).__name__.lower()] += 1
                    return verdict
        return None

    def wraps(self, work: Work) -> bool:
        """Whether any guard wants to be around such work."""
        return bool(self._having("around"))

    def layers(self) -> list[tuple[Guard, Callable[[Work, Proceed], Proceed]]]:
        """The guards that want to be around work, first to last, each with what puts work inside it."""
        with self._lock:
            return [(guard, partial(self._inside, guard)) for guard in self._having("around")]

    async def run(self, work: Work, proceed: Proceed) -> Done:
        """:func:`run_inside` these alone."""
        return await run_inside([self], work, proceed)

    def approved(self, work: Work) -> None:
        """Tell the guards that a person approved. Never raises."""
        self._tell("approved", work)

    def withdrawn(self, work: Work) -> None:
        """Tell the guards that work which they let go on is not made. Never raises."""
        self._tell("withdrawn", work)

    def finished(self, work: Work, done: Done) -> None:
        """Tell the guards how it went. Never raises."""
        self._tell("finished", work, done)

    def rules_tools(self) -> str:
        """What must hold for every tool call, by guard, for people; empty when nothing does."""
        said = ((p.name, p.rules_tools()) for p in self.runtime.policies if isinstance(p, Guard))
        return ", ".join(f"{name} ({what})" for name, what in said if what)

    def start(self) -> list[StartAgent]:
        """What guards want to be started early. Never raises."""
        out: list[StartAgent] = []
        with self._lock:
            for guard in self._having("start"):
                try:
                    out += guard.start()
                except Exception:
                    self.runtime.failed(guard, "start")
        return out

    def stats(self) -> dict[str, Any]:
        """Counters, and what each guard has learned and counted, by name."""
        with self._lock:
            policies: dict[str, Any] = {}
            for policy in self.runtime.policies:
                try:
                    policies[policy.name] = dict(policy.stats())
                except Exception:
                    self.runtime.failed(policy, "stats")
            return {"counters": dict(self.runtime.counters), "policies": policies}

    def guard(self, name: str) -> Guard | None:
        """The guard of that name, None when there is none or it was left out."""
        found = next((p for p in self.runtime.policies if p.name == name), None)
        return found if isinstance(found, Guard) else None

    def _having(self, method: str) -> list[Guard]:
        return [
            p
            for p in self.runtime.policies
            if isinstance(p, Guard) and getattr(type(p), method) is not getattr(Guard, method)
        ]

    def _tell(self, method: str, *said: Any) -> None:
        with self._lock:
            for guard in self._having(method):
                try:
                    getattr(guard, method)(*said)
                except Exception:
                    self.runtime.failed(guard, method)

    def _inside(self, guard: Guard, work: Work, proceed: Proceed) -> Proceed:
        async def inside() -> Done:
            tries = _Tries(proceed)
            try:
                done = await guard.around(work, tries)
                if not isinstance(done, Done):
                    raise TypeError(f"around() gave {done!r}, not a Done")
            except Exception as error:
                if error in tries.errors:
                    raise
                with self._lock:
                    self.runtime.failed(guard, "around")
                if tries.result is not None:
                    return tries.result
                if tries.errors and isinstance(tries.errors[-1], Exception):
                    raise tries.errors[-1] from None
                if tries.begun and not work.pure:
                    raise  # it broke off work that may have had its effect: that is not done twice
                return await proceed()
            return done

        return inside


async def run_inside(guards: Sequence[Guards], work: Work, proceed: Proceed) -> Done:
    """Do the work inside all of ``guards``, by precedence, whether a graph's or the engine's. Raises what
    ``proceed`` raises."""
    layers = sorted((layer for each in guards for layer in each.layers()), key=lambda layer: layer[0].precedence)
    for _, inside in reversed(layers):
        proceed = inside(work, proceed)
    done = await proceed()
    for each in guards:
        each.finished(work, done)
    return done


class _Tries:
    """Counts on what a guard did with its ``proceed``, so that its own failure can be told from the work's."""

    def __init__(self, proceed: Proceed) -> None:
        self._proceed = proceed
        self.begun = 0
        self.errors: list[BaseException] = []
        self.result: Done | None = None

    async def __call__(self) -> Done:
        self.begun += 1
        try:
            done = await self._proceed()
        except BaseException as error:
            self.errors.append(error)
            raise
        self.result = done
        return done
