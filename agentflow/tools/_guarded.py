"""Tool calls under the framework's policies: what a guard is told of a call, and how its word is kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from langchain_core.messages import ToolMessage

from agentflow.engine.context import current, current_run
from agentflow.engine.guarded import guards_now
from agentflow.errors import UsageError, WorkflowStopped
from agentflow.runtime.guards import Ask, Deny, Done, Guards, Stop, Verdict, Work, run_inside
from agentflow.tools._call import CallRun, Outcome
from agentflow.tools._identity import call_key

__all__ = ["Approver", "approved", "call_key", "permitted", "run_guarded", "work_of"]

#: Asks a person; what comes back is read by :func:`approved`. LangGraph's ``interrupt``, mostly.
Approver = Callable[[Any], Any]
_YES = frozenset({"yes", "y", "approve", "approved", "ok", "true", "allow"})


def work_of(job: CallRun) -> Work:
    """What a guard is told of a tool call."""
    run, at = current_run.get(), current.get()
    return Work(
        kind="tool",
        name=job.tool.name,
        key=job.key,
        pure=job.options.pure,
        workflow=run.workflow if run is not None else at.workflow,
        agent=at.agent,
        tenant=run.tenant if run is not None else at.tenant,
        arguments=job.call["args"],
    )


def permitted(jobs: Sequence[CallRun | ToolMessage], approve: Approver | None) -> list[Outcome | None]:
    """For each call of a message None when all guards let it go on, else what it comes to. Asks a person where one
    must be asked.

    Raises :class:`~agentflow.errors.WorkflowStopped` for a call that ends its workflow, and what ``approve`` raises;
    none of the calls is made then, and the guards are told so.
    """
    guards = guards_now()
    going: list[tuple[Guards, Work]] = []
    try:
        return [_permitted(job, guards, approve, going) if isinstance(job, CallRun) else None for job in jobs]
    except BaseException:
        _withdraw(going)
        raise


def _permitted(
    job: CallRun, guards: tuple[Guards, ...], approve: Approver | None, going: list[tuple[Guards, Work]]
) -> Outcome | None:
    if not guards:
        return None
    work, before = work_of(job), len(going)
    for each in guards:
        verdict: Verdict | None = each.allow(work)
        if isinstance(verdict, Stop):
            raise WorkflowStopped(
                f"{verdict.text}; the state before this step is kept: raise the limit of the policy, or end with what"
                " there is",
                reason=verdict.reason,
            )
        refused = verdict.text if isinstance(verdict, Deny) else None
        if isinstance(verdict, Ask):
            if approve is None:
                raise UsageError(
                    f"a policy wants a person's approval of {work.name}, and nobody can be asked here: run the tool in"
                    " a graph with a checkpointer (agentflow.graph.tool_node or an agent's tools)"
                )
            question = {"question": verdict.question, "tool": work.name, "arguments": dict(work.arguments)}
            if approved(approve(question)):
                each.approved(work)
            else:
                refused = f"not run: {work.name} was not approved"
        if refused is not None:
            _withdraw(going[before:])
            del going[before:]
            return Outcome(kind="refused", text=refused)
        going.append((each, work))
    return None


def _withdraw(going: Sequence[tuple[Guards, Work]]) -> None:
    for each, work in going:
        each.withdrawn(work)


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
        return _done(await mine.work(), mine)

    outcome, seconds = Outcome(ended="cancelled"), None
    try:
        done = await run_inside(guards, work_of(job), proceed)
        outcome, seconds = done.value, done.seconds
    except Exception as error:  # a policy's own: the call's errors are in its outcome
        text = f"{job.tool.name} was broken off by a policy: {error!r}"
        outcome = Outcome(kind="error", text=text, ended="error")
    finally:
        job.end(outcome.ended, job.worked if seconds is None else seconds)
    return outcome


def _done(outcome: Outcome, job: CallRun) -> Done:
    answer = outcome.value
    ok = outcome.kind is None and outcome.error is None and getattr(answer, "status", None) != "error"
    plain = isinstance(answer, ToolMessage) and isinstance(answer.content, str) and answer.artifact is None
    size = len(answer.content.encode(errors="replace")) if plain else 0
    return Done(value=outcome, ok=ok, keep=ok and plain, seconds=job.worked, size=size)
