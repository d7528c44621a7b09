"""What workflows used and what the cache decided, summed up for people (tables) and programs (JSON)."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from agentflow.cache.decision import Decision
from agentflow.engine.workflow import AgentReport

__all__ = ["AgentRow", "agent_rows", "agent_table", "decision_rows", "decision_table", "plain_console"]


@dataclass(slots=True)
class AgentRow:
    """One agent's sums over one or more runs; tokens, and seconds of model and tools."""

    agent: str
    calls: int = 0
    prompt_tokens: int = 0
    cached_device: int = 0
    cached_host: int = 0
    corrected: int = 0
    completion_tokens: int = 0
    model_seconds: float = 0.0
    tool_calls: int = 0
    tool_seconds: float = 0.0

    @property
    def cached_share(self) -> float:
        """Share of the prompt tokens that were not computed, 0 to 1."""
        if not self.prompt_tokens:
            return 0.0
        return (self.cached_device + self.cached_host + self.corrected) / self.prompt_tokens

    def to_json(self) -> dict[str, Any]:
        """The row as a JSON-ready dict, seconds rounded to milliseconds."""
        return {k: round(v, 3) if isinstance(v, float) else v for k, v in asdict(self).items()}

    def add(self, other: AgentRow) -> None:
        """Add another row's sums to this one."""
        for name, value in asdict(other).items():
            if name != "agent":
                setattr(self, name, getattr(self, name) + value)


def agent_rows(runs: Iterable[Mapping[str, AgentReport]]) -> list[AgentRow]:
    """Sum up the agent reports of several runs, agents in the order in which they first appear.

    ``runs`` holds what :attr:`agentflow.engine.workflow.WorkflowRun.agents` is: reports by agent name.
    """
    rows: dict[str, AgentRow] = {}
    for reports in runs:
        for name, report in reports.items():
            rows.setdefault(name, AgentRow(name)).add(
                AgentRow(
                    name,
                    calls=report.calls,
                    prompt_tokens=report.usage.prompt_tokens,
                    cached_device=report.usage.cached_device,
                    cached_host=report.usage.cached_host,
                    corrected=report.usage.corrected,
                    completion_tokens=report.usage.completion_tokens,
                    model_seconds=report.model_seconds,
                    tool_calls=report.tool_calls,
                    tool_seconds=report.tool_seconds,
                )
            )
    return list(rows.values())


def agent_table(rows: Iterable[AgentRow], *, title: str = "Agents") -> Table:
    """A table with a row per agent: calls, prompt tokens, cached tokens by tier, answers, model and tool time."""
    table = Table(title=title, title_justify="left", pad_edge=False, box=SIMPLE_HEAD)
    table.add_column("agent")
    for name in ("calls", "prompt", "cached device", "cached host", "cached %", "answer", "model s", "tools", "tool s"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.agent,
            str(row.calls),
            str(row.prompt_tokens),
            str(row.cached_device),
            str(row.cached_host),
            f"{100 * row.cached_share:.0f}",
            str(row.completion_tokens),
            f"{row.model_seconds:.1f}",
            str(row.tool_calls),
            f"{row.tool_seconds:.1f}",
        )
    return table


def decision_rows(decisions: Iterable[Decision]) -> list[dict[str, Any]]:
    """Decisions grouped by policy, kind and reason, with how many there were and the tokens they concerned.

    The names of workflows are left out of the reasons. The largest groups come first.
    """
    groups: dict[tuple[str, str, str], dict[str, Any]] = {}
    for d in decisions:
        reason = _general(d)
        group = groups.setdefault(
            (d.policy, d.kind, reason),
            {"policy": d.policy, "kind": d.kind, "reason": reason, "count": 0, "tokens": 0},
        )
        group["count"] += 1
        group["tokens"] += d.tokens
    return sorted(groups.values(), key=lambda g: (-g["tokens"], -g["count"], g["reason"]))


def _general(decision: Decision) -> str:
    """The reason without the names of the workflows that it concerns."""
    words = decision.reason.split(" ")
    return " ".join(word for word in words if word.rstrip(",.;:") not in decision.workflows)


def decision_table(rows: Iterable[Mapping[str, Any]], *, title: str = "What the cache decided") -> Table:
    """A table of :func:`decision_rows`."""
    table = Table(title=title, title_justify="left", pad_edge=False, box=SIMPLE_HEAD)
    table.add_column("decision")
    table.add_column("why")
    table.add_column("times", justify="right")
    table.add_column("tokens", justify="right")
    table.add_column("policy")
    for row in rows:
        table.add_row(row["kind"], row["reason"], str(row["count"]), str(row["tokens"]), row["policy"])
    return table


def plain_console(stream: TextIO | None = None) -> Console:
    """A console on ``stream`` (standard output): colours on a terminal, plain wide text when piped."""
    target = stream or sys.stdout
    console = Console(file=target, highlight=False)
    if console.is_terminal:
        return console
    return Console(file=target, highlight=False, width=160, no_color=True, markup=False, emoji=False)
