"""Model calls under the framework's policies: the one place where guards meet the model.

:func:`guards_now` says whose guards hold here; :func:`guarded` and :func:`aguarded` run a call under them.
"""

from __future__ import annotations

import os
import threading
from array import array
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

from agentflow.engine._portal import Portal
from agentflow.engine.base import Call, Completion, Engine, new_id
from agentflow.engine.context import current_run, graph_guards
from agentflow.engine.in_flight import tracked
from agentflow.errors import WorkflowStopped
from agentflow.runtime.guards import Done, Guards, Stop, Work, run_inside

__all__ = [
    "Early",
    "aguarded",
    "done_of",
    "early",
    "guarded",
    "guards_now",
    "portal_now",
    "refuse",
    "work_of",
]


def guards_now(engine: Engine | None = None) -> tuple[Guards, ...]:
    """The guards of the surrounding graphs, the innermost first, and of the engine; outside of any, the engine's."""
    run = current_run.get()
    if run is not None:
        return tuple(dict.fromkeys((*graph_guards.get(), *run.guards)))
    return (engine.guards,) if engine is not None and engine.guards is not None else ()


def work_of(call: Call) -> Work:
    """What a guard is told of a call."""
    sampling, at = call.sampling, call.at
    digest = blake2b(array("q", call.token_ids).tobytes(), digest_size=16)
    digest.update(repr((sampling, call.adapter, call.reuse)).encode())
    return Work(
        kind="model",
        name=at.agent or "",
        key=digest.hexdigest(),
        pure=sampling.temperature == 0 or sampling.seed is not None,
        workflow=at.workflow,
        agent=at.agent,
        tenant=at.tenant,
        tokens=len(call.token_ids),
    )


def refuse(guards: Sequence[Guards], work: Work) -> None:
    """Raise :class:`~agentflow.errors.WorkflowStopped` when a guard does not let a model call go on."""
    for each in guards:
        verdict = each.allow(work)
        if verdict is not None:
            reason = verdict.reason if isinstance(verdict, Stop) else "denied"
            text = getattr(verdict, "text", None) or getattr(verdict, "question", "")
            raise WorkflowStopped(
                f"{text}; the state before this step is kept: raise the limit of the policy, or end with what there is",
                reason=reason,
            )


async def aguarded(engine: Engine, call: Call, guards: Sequence[Guards]) -> Completion:
    """Run a call under guards."""
    work = work_of(call)
    refuse(guards, work)
    tries = 0

    async def proceed() -> Done:
        nonlocal tries
        tries += 1
        mine = call if tries == 1 else replace(call, request_id=new_id("again"))
        with tracked(engine, mine):
            completion = await engine.agenerate(mine)
        return done_of(completion)

    done = await run_inside(guards, work, proceed)
    completion: Completion = done.value
    return completion


def guarded(engine: Engine, call: Call, guards: Sequence[Guards]) -> Completion:
    """Run a call under guards, blocking this thread."""
    work = work_of(call)
    if any(g.wraps(work) for g in guards):
        return portal_now().run(aguarded(engine, call, guards))
    refuse(guards, work)
    with tracked(engine, call):
        completion = engine.generate(call)
    for each in guards:
        each.finished(work, done_of(completion))
    return completion


def done_of(completion: Completion) -> Done:
    """A finished call as guards see it."""
    usage = completion.usage
    return Done(
        value=completion,
        ok=completion.finish != "abort",
        seconds=completion.timings.total,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached,
        output_tokens=usage.completion_tokens,
    )


@dataclass(frozen=True, slots=True)
class Early:
    """A call is made before its time, for somebody who may ask the same later: ``run`` takes it instead of
    :func:`guarded`."""

    run: Callable[[Engine, Call], Any]


#: Set where a call is made before its time.
early: ContextVar[Early | None] = ContextVar("agentflow_early", default=None)

_lock = threading.Lock()
_portal: Portal | None = None


def portal_now() -> Portal:
    """The loop on which sync callers' guards run, and calls that are made early."""
    global _portal
    with _lock:
        if _portal is None:
            _portal = Portal("agentflow-guards")
        return _portal


def _forget_portal() -> None:
    """A forked child has no copy of the thread."""
    global _portal, _lock
    _portal, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_portal)
