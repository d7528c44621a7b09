"""Putting a workflow together: what each agent has read so far, and calls that only ever add to it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from agentflow.bench.traces.model import Content, Span, TraceCall, TraceTool

__all__ = ["Context", "WorkflowBuilder"]

_Segment = tuple[str, int, int, str | None, str | None]


class Context:
    """The prompt of one agent as it grows: private text, and shared texts in their slots."""

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._segments: list[_Segment] = []
        self._length = 0

    def private(self, *spans: Span) -> Context:
        """Append text of the agent's own."""
        return self._append(spans, "private", None, None)

    def shared(self, slot: str, *spans: Span, producer: str | None = None) -> Context:
        """Append text that other agents read too, written by ``producer`` (None: from outside)."""
        return self._append(spans, "shared", slot, producer)

    def keep(self, spans: int) -> Context:
        """Go back to the first ``spans`` spans: what comes after them is forgotten."""
        self._spans = self._spans[:spans]
        self._length = sum(s.tokens for s in self._spans)
        cut = [(k, at, min(n, self._length - at), slot, by) for k, at, n, slot, by in self._segments]
        self._segments = [s for s in cut if s[2] > 0]
        return self

    def copy(self) -> Context:
        """A context that begins with the same text and then goes its own way."""
        other = Context()
        other._spans, other._segments, other._length = list(self._spans), list(self._segments), self._length
        return other

    @property
    def spans(self) -> int:
        """How many spans it holds."""
        return len(self._spans)

    @property
    def tokens(self) -> int:
        """Its length in tokens."""
        return self._length

    @property
    def content(self) -> Content:
        """The prompt as it stands."""
        return tuple(self._spans)

    @property
    def segments(self) -> tuple[_Segment, ...]:
        """Its segments, without gap or overlap."""
        return tuple(self._segments)

    def _append(self, spans: Sequence[Span], kind: str, slot: str | None, producer: str | None) -> Context:
        tokens = sum(s.tokens for s in spans)
        self._spans += spans
        if self._segments and (self._segments[-1][0], *self._segments[-1][3:]) == (kind, slot, producer):
            _, start, length, _, _ = self._segments[-1]
            self._segments[-1] = (kind, start, length + tokens, slot, producer)
        else:
            self._segments.append((kind, self._length, tokens, slot, producer))
        self._length += tokens
        return self


class WorkflowBuilder:
    """The calls of one workflow. Texts get ids that begin with ``name``, so that no other workflow has them.

    ``max_calls`` and ``max_prompt`` (tokens) bound it: before a call, :meth:`over` says whether it may be made.
    """

    def __init__(self, name: str, *, max_calls: int | None = None, max_prompt: int | None = None) -> None:
        self.name = name
        self.calls: list[TraceCall] = []
        self._max_calls = max_calls
        self._max_prompt = max_prompt
        self._texts = 0

    def over(self, context: Context) -> bool:
        """Whether a call with this context would be one too many, or too long."""
        too_many = self._max_calls is not None and len(self.calls) >= self._max_calls
        return too_many or (self._max_prompt is not None and context.tokens > self._max_prompt)

    def text(self, tokens: int) -> Span:
        """A new text of this workflow."""
        self._texts += 1
        return Span(f"{self.name}.{self._texts}", tokens)

    def call(
        self,
        agent: str,
        context: Context,
        answer_tokens: int,
        *,
        after: Iterable[TraceCall],
        tools: tuple[TraceTool, ...] = (),
        pause: float = 0.0,
        branch: str | None = None,
        superseded: bool = False,
    ) -> TraceCall:
        """One call of ``agent`` with its context as it stands; it is not changed.

        ``pause`` is the delay in seconds beyond that of the tools.
        """
        made = TraceCall(
            id=f"{self.name}-{len(self.calls)}",
            agent=agent,
            prompt=context.content,
            output=(self.text(answer_tokens),),
            wait_for=tuple(c.id for c in after),
            delay=pause + max((t.start + t.duration for t in tools), default=0.0),
            tools=tools,
            branch=branch,
            segments=context.segments,
            superseded=superseded,
        )
        self.calls.append(made)
        return made

    def supersede(self, call: TraceCall) -> None:
        """Say of a call already made that nothing after it reads what only it used (its agent starts afresh)."""
        self.calls[self.calls.index(call)] = replace(call, superseded=True)

    def finish(self) -> tuple[TraceCall, ...]:
        """All calls. ``superseded`` stays on those of which no later call reads more than an earlier one did."""
        paths = [c.prompt + c.output for c in self.calls]
        for i, call in enumerate(self.calls):
            if call.superseded:
                earlier = max((_common(paths[i], p) for p in paths[:i]), default=0)
                if any(_common(paths[i], p) > earlier for p in paths[i + 1 :]):
                    self.calls[i] = replace(call, superseded=False)
        return tuple(self.calls)


def _common(a: Content, b: Content) -> int:
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n
