"""Safety: limits on what a workflow or a tenant may use, tools that are not allowed or need a person's word, loops.

Whatever a limit stops ends with the typed outcome ``limit``, the limit's name as its reason, and the state so far.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from agentflow.cache.ledger import Ledger
from agentflow.cache.policy import Observation
from agentflow.errors import UsageError
from agentflow.events import AgentStarted, WorkflowEnded, WorkflowPaused, WorkflowResumed, WorkflowStarted
from agentflow.runtime.guards import Ask, Deny, Done, Guard, Stop, Verdict, Work

__all__ = ["LIMITS", "Safety"]

#: What can be limited: tokens of prompts and answers together, seconds of wall time (pauses not counted), calls of
#: tools and of the model, and money in the currency of ``prices``.
LIMITS = ("tokens", "seconds", "tool_calls", "model_calls", "money")
#: Workflows, and tenants, that are followed; the longest silent are forgotten first.
_FOLLOWED = 10_000
#: Different calls of a workflow that are remembered to tell a loop.
_REMEMBERED = 256


@dataclass(slots=True)
class _Account:
    """What a workflow or tenant used so far."""

    since: float
    tokens: int = 0
    tool_calls: int = 0
    model_calls: int = 0
    money: float = 0.0
    #: When it paused, and how long it was paused before.
    paused: float | None = None
    rest: float = 0.0
    seen: OrderedDict[tuple[str, str | None, str], int] = field(default_factory=OrderedDict)
    path: list[str] = field(default_factory=list)

    def used(self, limit: str, now: float) -> float:
        if limit == "seconds":
            return (now if self.paused is None else self.paused) - self.since - self.rest
        value: float = getattr(self, limit)
        return value


class Safety(Guard):
    """Enforces limits and rules.

    ``workflow`` and ``tenant`` map names of :data:`LIMITS` to limits; a tenant's hold for each ``period`` seconds
    (None: for as long as the policy lives). ``prices`` are per million tokens: ``prompt``, ``cached``, ``output``.
    ``allow`` names the only tools that may be called (a list, or a mapping from agent to list), ``deny`` those that may
    not, ``approve`` those that a person must approve, by an interrupt of the graph. ``repeats`` identical calls in one
    workflow (the same agent asking the model the same, or a tool with the same arguments) are a loop, and so are
    ``cycles`` times the same round of two agents or more; None switches either off.

    A limit is checked before a call begins: calls that run at once may exceed it by what they use.
    """

    name: ClassVar[str] = "safety"
    precedence: ClassVar[int] = 10

    def __init__(
        self,
        ledger: Ledger,
        clock: Callable[[], float],
        *,
        workflow: Mapping[str, float] | None = None,
        tenant: Mapping[str, float] | None = None,
        period: float | None = None,
        prices: Mapping[str, float] | None = None,
        allow: Sequence[str] | Mapping[str, Sequence[str]] | None = None,
        deny: Sequence[str] = (),
        approve: Sequence[str] = (),
        repeats: int | None = 20,
        cycles: int | None = None,
    ) -> None:
        super().__init__(ledger, clock)
        for name, given in (("workflow", workflow), ("tenant", tenant), ("prices", prices)):
            _check_numbers(name, given or {})
        _check_numbers("safety", {"period": period} if period is not None else {})
        for name, tools in (("allow", allow), ("deny", deny), ("approve", approve)):
            for each in tools.values() if isinstance(tools, Mapping) and name == "allow" else (tools,):
                if each is not None and (isinstance(each, str | Mapping) or not all(isinstance(t, str) for t in each)):
                    raise UsageError(f"safety: {name} is a list of tools' names, not {each!r}")
        for given in (workflow or {}, tenant or {}):
            if wrong := sorted(set(given) - set(LIMITS)):
                raise UsageError(f"safety: unknown limits {wrong}; known are {', '.join(LIMITS)}")
        if wrong := sorted(set(prices or {}) - {"prompt", "cached", "output"}):
            raise UsageError(f"safety: unknown prices {wrong}; known are prompt, cached, output")
        if "money" in {**(workflow or {}), **(tenant or {})} and not prices:
            raise UsageError("safety: a limit on money needs prices={'prompt': ..., 'cached': ..., 'output': ...}")
        for name, least in (("repeats", repeats), ("cycles", cycles)):
            if least is not None and (isinstance(least, bool) or not isinstance(least, int) or least < 2):
                raise UsageError(f"safety: {name} must be an integer of at least 2, or None; got {least!r}")
        self.limits = {"workflow": dict(workflow or {}), "tenant": dict(tenant or {})}
        self.period = period
        self.prices = dict(prices or {})
        self.allowed = allow
        self.denied = frozenset(deny)
        self.approve = frozenset(approve)
        self.repeats = repeats
        self.cycles = cycles
        self._accounts: dict[str, OrderedDict[str, _Account]] = {"workflow": OrderedDict(), "tenant": OrderedDict()}
        self._counts: Counter[str] = Counter()

    def observe(self, observation: Observation) -> None:
        kind = type(observation)
        if kind is WorkflowStarted:
            self._accounts["workflow"].pop(observation.workflow, None)  # type: ignore[union-attr]
            self._account("workflow", observation.workflow)  # type: ignore[union-attr]
        elif kind is AgentStarted:
            event: Any = observation
            self._entered(self._account("workflow", event.workflow), event.agent)
        elif kind is WorkflowPaused:
            account = self._account("workflow", observation.workflow)  # type: ignore[union-attr]
            account.paused = self.clock()
            account.seen.clear()  # the step that paused asks everything again when it goes on
        elif kind is WorkflowResumed:
            account = self._account("workflow", observation.workflow)  # type: ignore[union-attr]
            if account.paused is not None:
                account.rest += self.clock() - account.paused
                account.paused = None
        elif kind is WorkflowEnded:
            self._accounts["workflow"].pop(observation.workflow, None)  # type: ignore[union-attr]

    def allow(self, work: Work) -> Verdict | None:
        if work.kind == "tool" and (verdict := self._tool(work)) is not None:
            return verdict
        for whose, name in (("workflow", work.workflow), ("tenant", work.tenant)):
            if name is None:
                continue
            account = self._account(whose, name)
            if (stop := self._over(whose, name, account, work)) is not None:
                return stop
        if work.workflow is not None:
            account = self._account("workflow", work.workflow)
            if (stop := self._loops(account, work)) is not None:
                return stop
        if work.kind == "tool" and work.name in self.approve:
            return Ask(f"may {work.agent or 'the agent'} call {work.name}?")
        self._count(work, 1)
        return None

    def approved(self, work: Work) -> None:
        self._count(work, 1)

    def withdrawn(self, work: Work) -> None:
        self._count(work, -1)
        account = self._accounts["workflow"].get(work.workflow or "")
        call = _call(work)
        if account is not None and account.seen.get(call, 0) > 0:
            account.seen[call] -= 1

    def finished(self, work: Work, done: Done) -> None:
        tokens = done.prompt_tokens + done.output_tokens
        price = self.prices
        fresh = done.prompt_tokens - done.cached_tokens
        money = (
            fresh * price.get("prompt", 0.0)
            + done.cached_tokens * price.get("cached", price.get("prompt", 0.0))
            + done.output_tokens * price.get("output", 0.0)
        ) / 1e6
        for account in self._of(work):
            account.tokens += tokens
            account.money += money

    def used(self, workflow: str) -> dict[str, float]:
        """What a workflow that is under way has used of everything that can be limited."""
        account = self._account("workflow", workflow)
        return {limit: account.used(limit, self.clock()) for limit in LIMITS}

    def stats(self) -> Mapping[str, float]:
        return {"workflows": len(self._accounts["workflow"]), "tenants": len(self._accounts["tenant"]), **self._counts}

    def rules_tools(self) -> str:
        rules = {
            "allow": self.allowed is not None,
            "deny": self.denied,
            "approve": self.approve,
            "a limit on tool_calls": any("tool_calls" in limits for limits in self.limits.values()),
        }
        return ", ".join(name for name, given in rules.items() if given)

    def _count(self, work: Work, by: int) -> None:
        for account in self._of(work):
            if work.kind == "tool":
                account.tool_calls += by
            else:
                account.model_calls += by

    def _tool(self, work: Work) -> Verdict | None:
        allowed: Any = self.allowed
        if isinstance(allowed, Mapping):
            allowed = allowed.get(work.agent or "", ())
        if work.name in self.denied or (allowed is not None and work.name not in allowed):
            self._counts["denied"] += 1
            return Deny(f"not run: {work.agent or 'this agent'} is not allowed to call {work.name}")
        return None

    def _over(self, whose: str, name: str, account: _Account, work: Work) -> Stop | None:
        now = self.clock()
        if whose == "tenant" and self.period is not None and now - account.since >= self.period:
            account = self._accounts[whose][name] = _Account(since=now)
        for limit, most in self.limits[whose].items():
            used = account.used(limit, now)
            about = {"tokens": float(work.tokens), "tool_calls": 1.0 if work.kind == "tool" else 0.0}
            about["model_calls"] = 1.0 if work.kind == "model" else 0.0
            more = about.get(limit, 0.0)
            if used + more > most or (limit in ("seconds", "money") and used >= most):
                self._counts[f"stopped_{limit}"] += 1
                return Stop(
                    limit,
                    f"the {whose} {name!r} has used {used:.6g} of its {most:.6g} {limit.replace('_', ' ')}, and the"
                    f" next call ({work.kind} {work.name!r}) would not fit",
                )
        return None

    def _loops(self, account: _Account, work: Work) -> Stop | None:
        if self.repeats is not None and work.key:
            call = _call(work)
            count = account.seen.pop(call, 0) + 1
            account.seen[call] = count
            if len(account.seen) > _REMEMBERED:
                account.seen.popitem(last=False)
            if count > self.repeats:
                self._counts["stopped_loop"] += 1
                what = (
                    "asked the model the same"
                    if work.kind == "model"
                    else f"called {work.name} with the same arguments"
                )
                return Stop("loop", f"{work.agent or 'an agent'} {what} {count} times in one workflow")
        if self.cycles is not None and (cycle := _cycle(account.path, self.cycles)):
            self._counts["stopped_loop"] += 1
            return Stop("loop", f"the agents {' -> '.join(cycle)} went round {self.cycles} times")
        return None

    def _entered(self, account: _Account, agent: str | None) -> None:
        if agent is not None and self.cycles is not None:
            account.path.append(agent)
            if len(account.path) > 8 * self.cycles:
                del account.path[0]

    def _of(self, work: Work) -> list[_Account]:
        """The accounts that the work is on. That of a workflow that is over is not opened again."""
        flow = self._accounts["workflow"].get(work.workflow) if work.workflow is not None else None
        tenant = self._account("tenant", work.tenant) if work.tenant is not None else None
        return [account for account in (flow, tenant) if account is not None]

    def _account(self, whose: str, name: str) -> _Account:
        accounts = self._accounts[whose]
        account = accounts.get(name)
        if account is None:
            account = accounts[name] = _Account(since=self.clock())
            if len(accounts) > _FOLLOWED:
                accounts.popitem(last=False)
        else:
            accounts.move_to_end(name)
        return account


def _check_numbers(where: str, given: Mapping[str, Any]) -> None:
    if not isinstance(given, Mapping):
        raise UsageError(f"safety: {where} maps names to numbers; got {given!r}")
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise UsageError(f"safety: {name} of {where} must be a finite number of at least 0, got {value!r}")


def _call(work: Work) -> tuple[str, str | None, str]:
    """Equal for calls that are the same: an agent's of the model, anybody's of a tool."""
    return work.kind, work.agent if work.kind == "model" else None, f"{work.name}\0{work.key}"


def _cycle(path: Sequence[str], times: int) -> Sequence[str]:
    """The round of 2 to 8 agents that the end of ``path`` repeats ``times`` times; empty when there is none."""
    for length in range(2, 9):
        tail = path[-length * times :]
        if (
            len(tail) == length * times
            and len(set(tail[:length])) > 1
            and all(tail[i] == tail[i % length] for i in range(len(tail)))
        ):
            return tail[:length]
    return ()
