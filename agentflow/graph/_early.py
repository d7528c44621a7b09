"""Starting the probable next agent of a graph early: its first model call, on the state that it will probably see.

What the running agent will write is guessed: that it writes what it wrote most often lately (a verdict, a route), or
nothing that its successor reads. The guess needs no proof; the call is used only if the real one is the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from langchain_core.messages import BaseMessage
from langchain_core.runnables.config import var_child_runnable_config

from agentflow.cache.ledger import EARLY
from agentflow.engine.base import Call, Completion, Coordinates, Engine, Reuse
from agentflow.engine.context import current, default_reuse
from agentflow.engine.guarded import Early, done_of, early, portal_now, work_of
from agentflow.engine.in_flight import tracked
from agentflow.engine.workflow import WorkflowRun
from agentflow.events import StateSuperseded
from agentflow.runtime.guards import Guards, StartAgent, Work
from agentflow.runtime.policies.speculation import Bet, Speculation

if TYPE_CHECKING:
    from agentflow.graph._node import AgentNode
    from agentflow.graph._scopes import NodeScope

__all__ = ["start_early", "wrote"]


def wrote(scope: NodeScope, run: WorkflowRun, node: AgentNode, value: Any) -> None:
    """Tell the policies that bet on it what an agent wrote. Never raises."""
    if isinstance(node.spec.writes, str):
        for guards in run.guards:
            speculation = guards.guard(Speculation.name)
            if isinstance(speculation, Speculation):
                try:
                    speculation.wrote(scope.root.graph, node.name or "", value)
                except Exception:
                    guards.runtime.failed(speculation, "wrote")


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
    messages = _opening(following, _guess(scope, speculation, node, state))
    if messages is None:
        return
    bet = speculation.begin(effect)
    if bet is None:
        return
    at = run.coordinates(effect.agent, branch=EARLY)
    portal = portal_now()
    task = asyncio.run_coroutine_threadsafe(_ask(following, messages, at, run.reuse, bet), portal.loop)

    def give_up() -> None:
        task.cancel()
        if bet.key:  # it was asked: what it left in the cache is of no use, and what it used was used
            work = Work(kind="model", name=effect.agent, workflow=run.workflow, agent=effect.agent, tenant=run.tenant)
            for each in run.guards:
                each.finished(work, bet.spent())
            with contextlib.suppress(Exception):
                run.emit(StateSuperseded, agent=at.agent, branch=EARLY)

    # Asked for while the run or the policy is locked, so it happens elsewhere.
    bet.cancel = lambda: portal.call_soon(give_up)


def _opening(node: AgentNode, state: Any) -> list[BaseMessage] | None:
    """The messages with which ``node`` would begin on ``state``, None when nothing can be said.

    Its prompt function runs outside the node that is under way: an ``interrupt()`` in it would take an answer that
    was given to that node.
    """
    context = contextvars.copy_context()
    context.run(var_child_runnable_config.set, None)
    try:
        return context.run(node.opening, state)
    except Exception:  # mostly, the state lacks what the agent before it writes
        return None


async def _ask(node: AgentNode, messages: list[BaseMessage], at: Coordinates, reuse: Reuse, bet: Bet) -> None:
    """Make the call, apart from everything that follows what happens in the graph."""

    async def make(engine: Engine, call: Call) -> Completion:
        bet.key, bet.tokens = work_of(call).key, len(call.token_ids)
        with tracked(engine, call):
            completion = await engine.agenerate(call)
        if not bet.future.done():
            bet.future.set_result(done_of(completion))
        return completion

    def within() -> asyncio.Task[Any]:
        early.set(Early(make))
        current.set(at)
        default_reuse.set(reuse)
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


def _guess(scope: NodeScope, speculation: Speculation, node: AgentNode, state: Any) -> Any:
    """The state after ``node``, as it probably will be."""
    writes = node.spec.writes
    if not isinstance(writes, str) or not isinstance(state, Mapping):
        return state
    usual = speculation.usual(scope.root.graph, node.name or "")
    return state if usual is None else {**state, writes: usual}
