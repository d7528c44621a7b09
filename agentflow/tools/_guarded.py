"""Tool calls under the framework's policies: what a guard is told of a call, and how its word is kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from langchain_core.messages import ToolMessage

from agentflow.engine.context import current, current_run
from agentflow.engine.guarded import guards_now, run_inside
from agentflow.errors import UsageError, WorkflowStopped
from agentflow.runtime.guards import Ask, Deny, Done, Guards, Stop, Verdict, Work
from agentflow.tools._call import CallRun, Outcome

__all__ = ["Approver", "approved", "call_key", "permitted", "run_guarded", "work_of"]

#: Asks a person; what comes back is read by :func:`approved`. LangGraph's ``interrupt``, mostly.
Approver = Callable[[Any], Any]
_YES = frozenset({"yes", "y", "approve", "approved", "ok", "true", "allow"})


def call_key(name: str, arguments: Mapping[str, Any]) -> str:
    """Equal for equal calls of a tool."""
    return json.dumps([name, arguments], sort_keys=True, default=repr)


def work_of(job: CallRun) -> Work:
    """What a guard is told of a tool call. A tool that gets injected arguments counts as pure for nobody."""
    run, at = current_run.get(), current.get()
    return Work(
        kind="tool",
        name=job.tool.name,
        key=call_key(job.tool.name, job.call["args"]),
        pure=job.options.pure and not job.injects,
        workflow=run.workflow if run is not None else at.workflow,
        agent=at.agent,
        tenant=run.tenant if run is not None else at.tenant,
        arguments=job.call["args"],
    )


def permitted(job: CallRun, approve: Approver | None) -> Outcome | None:
    """None when all guards let the call go on, else what it comes to. Asks a person where one must be asked.

    Raises :class:`~agentflow.errors.WorkflowStopped` for a call that ends its workflow, and what ``approve`` raises.
    """
    guards = guards_now()
    if not guards:
        return None
    work = work_of(job)
    for each in guards:
        verdict: Verdict | None = each.allow(work)
        if isinstance(verdict, Stop):
            raise WorkflowStopped(
                f"{verdict.text}; the state before this step is kept: raise the limit of the policy, or end with what"
                " there is",
                reason=verdict.reason,
            )
        if isinstance(verdict, Deny):
            return Outcome(kind="refused", text=verdict.text)
        if isinstance(verdict, Ask):
            if approve is None:
                raise UsageError(
                    f"a policy wants a person's approval of {work.name}, and nobody can be asked here: run the tool in"
                    " a graph with a checkpointer (agentflow.graph.tool_node or an agent's tools)"
                )
            question = {"question": verdict.question, "tool": work.name, "arguments": dict(work.arguments)}
            if not approved(approve(question)):
                return Outcome(kind="refused", text=f"not run: {work.name} was not approved")
    return None


def approved(answer: Any) -> bool:
    """Whether a person's answer is a yes: True, a word for it, or a mapping with one under ``approved``."""
    if isinstance(answer, Mapping):
        answer = answer.get("approved")
    return answer is True or (isinstance(answer, str) and answer.strip().lower() in _YES)


async def run_guarded(job: CallRun, again: Callable[[], CallRun], guards: tuple[Guards, ...]) -> Outcome:
    """Run a call inside the guards. ``again`` makes another of the same call, for a second try."""
    tries = 0

    async def proceed() -> Done:
        nonlocal tries
        tries += 1
        mine = job if tries == 1 else again()
        return _done(await mine.run(), mine)

    done = await run_inside(guards, work_of(job), proceed)
    outcome: Outcome = done.value
    return outcome


def _done(outcome: Outcome, job: CallRun) -> Done:
    answer = outcome.value
    ok = outcome.kind is None and outcome.error is None and getattr(answer, "status", None) != "error"
    plain = isinstance(answer, ToolMessage) and isinstance(answer.content, str) and answer.artifact is None
    size = len(answer.content.encode(errors="replace")) if plain else 0
    return Done(value=outcome, ok=ok, keep=ok and plain, seconds=job.worked, size=size)
