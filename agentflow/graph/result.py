"""What came of running a graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from agentflow.cache.decision import Decision
from agentflow.engine.base import Usage
from agentflow.engine.workflow import AgentReport, WorkflowRun
from agentflow.errors import WorkflowStopped

__all__ = ["RunOutcome", "RunResult"]

#: ``done``: to its end. ``limit``: stopped by ``max_steps`` or a policy's limit. ``paused``: waits for input.
#: ``error``: a node raised.
RunOutcome = Literal["done", "limit", "paused", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What came of one :meth:`AgentApp.run`.

    ``state`` is the state of the graph as it was last whole, whatever the outcome. ``interrupts`` are what a
    paused run waits for. ``runs`` holds the workflow's run on each engine it used; reports cover the workflow
    from its start, pauses included.
    """

    state: Mapping[str, Any]
    outcome: RunOutcome
    interrupts: Sequence[Any] = ()
    error: Exception | None = None
    runs: Sequence[WorkflowRun] = field(default=(), repr=False)
    max_steps: int = 0
    #: Which limit stopped a run of outcome ``limit``: ``max_steps``, or what a policy calls it (``tokens``, ``loop``).
    reason: str = ""
    stopped: WorkflowStopped | None = field(default=None, repr=False)

    @property
    def workflow(self) -> str | None:
        """The workflow's id, None when no engine was used."""
        return self.runs[0].workflow if self.runs else None

    @property
    def agents(self) -> dict[str, AgentReport]:
        """Per agent: calls, tokens by tier, model and tool seconds."""
        reports: dict[str, AgentReport] = {}
        for run in self.runs:
            for name, report in run.agents.items():
                known = reports.get(name)
                reports[name] = report if known is None else _sum(known, report)
        return reports

    @property
    def usage(self) -> Usage:
        """Tokens of all agents together."""
        total = Usage()
        for run in self.runs:
            total += run.usage()
        return total

    @property
    def decisions(self) -> list[Decision]:
        """What the engine decided for this workflow's calls."""
        return [d for run in self.runs for d in run.decisions]

    def raise_for_outcome(self) -> RunResult:
        """Raise what stopped the run, or return the result of a run that is done or paused.

        Raises the node's own error for ``error``, :class:`~agentflow.errors.WorkflowStopped` for ``limit``.
        """
        if self.error is not None:
            raise self.error
        if self.stopped is not None:
            raise WorkflowStopped(str(self.stopped), reason=self.reason, state=self.state) from self.stopped
        if self.outcome == "limit":
            raise WorkflowStopped(
                f"the graph was stopped after max_steps={self.max_steps} steps; the state so far is kept in"
                " .state: raise max_steps, or find out why it does not come to an end",
                reason="max_steps",
                state=self.state,
            )
        return self


def _sum(a: AgentReport, b: AgentReport) -> AgentReport:
    return AgentReport(
        a.agent,
        calls=a.calls + b.calls,
        usage=a.usage + b.usage,
        model_seconds=a.model_seconds + b.model_seconds,
        first_token_seconds=a.first_token_seconds + b.first_token_seconds,
        tools={**a.tools, **b.tools},
    )
