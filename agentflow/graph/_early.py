"""Starting the probable next agent of a graph early: its first model call, on the state that it will probably see.

What the running agent will write is guessed: that it writes what it wrote most often lately (a verdict, a route), or
nothing that its successor reads. The guess needs no proof; the call is used only if the real one is the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from agentflow.cache.ledger import EARLY
from agentflow.engine.base import Call, Completion, Coordinates, Engine
from agentflow.engine.context import current
from agentflow.engine.guarded import Early, done_of, early, portal_now, work_of
from agentflow.engine.in_flight import tracked
from agentflow.engine.workflow import WorkflowRun
from agentflow.events import StateSuperseded
from agentflow.runtime.guards import Guards, StartAgent
from agentflow.runtime.policies.speculation import Bet, Speculation

if TYPE_CHECKING:
    from agentflow.graph._node import AgentNode
    from agentflow.graph._scopes import NodeScope

__all__ = ["start_early", "wrote"]

#: Answers of an agent that are counted, and the longest that is, in characters.
_ANSWERS, _LONGEST = 64, 2_000


class _Habits:
    """What each agent of a graph wrote lately."""

    def __init__(self) -> None:
        self._written: dict[str | None, OrderedDict[str, tuple[Any, int]]] = {}
        self._lock = threading.Lock()

    def note(self, agent: str | None, value: Any) -> None:
        text = value if isinstance(value, str) else repr(value)
        if len(text) > _LONGEST:
            return
        with self._lock:
            seen = self._written.setdefault(agent, OrderedDict())
            _, count = seen.pop(text, (None, 0))
            seen[text] = (value, count + 1)
            if len(seen) > _ANSWERS:
                seen.popitem(last=False)

    def usual(self, agent: str | None) -> Any:
        """What the agent wrote most often, if that was at least half of the time and twice; else None."""
        with self._lock:
            seen = self._written.get(agent)
            if not seen:
                return None
            value, count = max(seen.values(), key=lambda pair: pair[1])
            return value if count >= 2 and 2 * count >= sum(n for _, n in seen.values()) else None


_habits: WeakKeyDictionary[Any, _Habits] = WeakKeyDictionary()
_habits_lock = threading.Lock()


def wrote(scope: NodeScope, node: AgentNode, value: Any) -> None:
    """Remember what an agent wrote, if somebody bets on it."""
    if isinstance(node.spec.writes, str) and scope.root.binding.agent_nodes:
        _habits_of(scope.root.binding).note(node.name, value)


def start_early(scope: NodeScope, run: WorkflowRun, node: AgentNode, state: Any) -> None:
    """The agent ``node`` begins on ``state``: start what its run's policies want started. Never raises."""
    for guards in run.guards:
        speculation = guards.guard(Speculation.name)
        if not isinstance(speculation, Speculation):
            continue
        for effect in guards.start():
            try:
                _start(scope, run, node, state, guards, speculation, effect)
            except Exception:
                guards.runtime.failed(speculation, "start")


def _start(
    scope: NodeScope,
    run: WorkflowRun,
    node: AgentNode,
    state: Any,
    guards: Guards,
    speculation: Speculation,
    effect: StartAgent,
) -> None:
    following: AgentNode | None = scope.root.binding.agent_nodes.get(effect.agent)
    if following is None or effect.workflow != run.workflow or scope.nested:
        return
    guess = _guess(scope, node, state)
    try:
        messages = following.opening(guess)
    except Exception:  # the state lacks what the agent before it writes: nothing can be said yet
        return
    if messages is None:
        return
    bet = speculation.begin(effect)
    if bet is None:
        return
    at = run.coordinates(effect.agent, branch=EARLY)
    portal = portal_now()
    task = asyncio.run_coroutine_threadsafe(_ask(following, messages, at, bet), portal.loop)

    def give_up() -> None:
        task.cancel()
        if bet.key:  # it was asked: what it left in the cache is of no use
            with contextlib.suppress(Exception):
                run.emit(StateSuperseded, agent=at.agent, branch=EARLY)

    # Asked for while the run or the policy is locked, so it happens elsewhere.
    bet.cancel = lambda: portal.call_soon(give_up)


async def _ask(node: AgentNode, messages: Any, at: Coordinates, bet: Bet) -> None:
    """Make the call, apart from everything that follows what happens in the graph."""

    async def make(engine: Engine, call: Call) -> Completion:
        bet.key = work_of(call).key
        with tracked(engine, call):
            completion = await engine.agenerate(call)
        if not bet.future.done():
            bet.future.set_result(done_of(completion))
        return completion

    def within() -> asyncio.Task[Any]:
        early.set(Early(make))
        current.set(at)
        return asyncio.ensure_future(node.first_model().ainvoke(messages))

    try:
        await contextvars.Context().run(within)
    except asyncio.CancelledError:
        raise
    except Exception as error:
        if not bet.future.done():
            bet.future.set_exception(error)
    finally:
        if not bet.future.done():
            bet.future.cancel()


def _guess(scope: NodeScope, node: AgentNode, state: Any) -> Any:
    """The state after ``node``, as it probably will be."""
    writes = node.spec.writes
    if not isinstance(writes, str) or not isinstance(state, Mapping):
        return state
    usual = _habits_of(scope.root.binding).usual(node.name)
    return state if usual is None else {**state, writes: usual}


def _habits_of(binding: Any) -> _Habits:
    with _habits_lock:
        found = _habits.get(binding)
        if found is None:
            found = _habits[binding] = _Habits()
        return found
