"""The trace of a load: workflows, their calls with what each read and wrote, tools and gaps.

Text is described as *spans*: a span is a run of tokens with an id, and two calls share a prefix exactly as
far as their spans are the same ones. A recorded run knows its token ids; a public trace may know only block
hashes or lengths. Both become spans (blocks are spans of their block size), so that the simulator needs
nothing else, and spans get token ids of their own making where a real engine is to replay them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

__all__ = ["Content", "Span", "Trace", "TraceCall", "TraceTool", "TraceWorkflow"]


class Span(NamedTuple):
    """``tokens`` tokens that are the same wherever ``id`` appears, and differ from every other span.

    Spans that begin alike and then differ are cut where they do: two different spans at the same place of two
    prompts differ from their first token on.
    """

    id: str
    tokens: int


#: What a prompt or an answer consists of, in order.
Content = tuple[Span, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceTool:
    """A tool call that ran between two model calls, ``start`` seconds after the calls waited for were done."""

    name: str
    start: float = 0.0
    duration: float = 0.0
    outcome: str = "ok"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceCall:
    """One model call.

    It is sent ``delay`` seconds after all calls in ``wait_for`` (ids of this workflow) are done, or after the
    workflow's arrival where it waits for none; ``tools`` ran in that time. ``segments`` are (kind, start,
    tokens, slot, producer) as in :class:`agentflow.engine.base.Segment`, empty where unknown. ``superseded`` says
    that what only this call used is not used by any later call of the workflow.
    """

    id: str
    agent: str
    prompt: Content
    output: Content
    wait_for: tuple[str, ...] = ()
    delay: float = 0.0
    tools: tuple[TraceTool, ...] = ()
    branch: str | None = None
    segments: tuple[tuple[str, int, int, str | None, str | None], ...] = ()
    superseded: bool = False

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt in tokens."""
        return sum(s.tokens for s in self.prompt)

    @property
    def output_tokens(self) -> int:
        """Length of the answer in tokens."""
        return sum(s.tokens for s in self.output)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceWorkflow:
    """One run of a workflow, ``arrival`` seconds after the trace begins. Calls come in an order in which
    every call follows those that it waits for."""

    id: str
    calls: tuple[TraceCall, ...]
    arrival: float = 0.0
    graph: str | None = None
    tenant: str | None = None
    outcome: str = "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A load. ``edges`` is the static call graph (agent -> agents that may follow) where one is known.

    ``tokens`` maps span ids to token ids where they were recorded; spans without an entry get made-up ids at
    replay. ``meta`` says where the trace comes from and under which settings it was made.
    """

    name: str
    workflows: tuple[TraceWorkflow, ...]
    edges: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    tokens: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)

    @property
    def calls(self) -> int:
        """Calls of all workflows."""
        return sum(len(w.calls) for w in self.workflows)
