"""Recording a run: an engine that passes everything on and notes what is a trace.

::

    with recording(engine, "run.jsonl.gz") as recorded:
        graph.compile(engine=recorded).run(...)

A recording knows token ids, segments, times and tools. Times between calls become delays: a pause for a human
is a long delay, and the time that a call itself took is not in the trace, for a replay takes its own.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agentflow.bench.traces._recorded import NotedCall, NotedWorkflow, Tally, edges_of, workflow_of
from agentflow.bench.traces.jsonl import write_trace
from agentflow.bench.traces.model import Trace
from agentflow.bench.traces.spans import SpanTrie
from agentflow.cache.decision import Decision
from agentflow.engine.base import Call, Chunk, Completion, Engine, EngineStats, Tokenizer
from agentflow.errors import TraceError
from agentflow.events import Event

__all__ = ["TraceRecorder", "recording"]


class TraceRecorder(Engine):
    """Runs calls on ``engine`` and notes them; :meth:`trace` is what was noted so far.

    Memory grows with the tokens that are new, not with those that calls repeat. After ``max_calls`` calls, and
    ``max_calls`` times 16 events, no more is noted; ``meta`` of the trace counts what is missing: calls over the
    limit, calls that ended without an answer, tools that never ended or after which no call came. ``clock`` gives
    seconds in the time of the events.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        name: str = "recorded",
        max_calls: int = 100_000,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.engine = engine
        self.name = name
        self.model = engine.model
        self.context_length = engine.context_length
        self._clock = clock
        self._max_calls = max_calls
        self._trie = SpanTrie()
        self._workflows: dict[str, NotedWorkflow] = {}
        self._calls = self._events = 0
        self._missing = {"calls_over_limit": 0, "events_over_limit": 0, "calls_without_answer": 0}
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.engine, name)

    def trace(self) -> Trace:
        """The trace of all calls that have ended. Calls whose coordinates name no workflow are one each."""
        with self._lock:
            tally = Tally()
            contents = self._trie.contents()
            noted = {k: w for k, w in self._workflows.items() if w.calls}
            zero = min((w.began for w in noted.values()), default=0.0)
            made = [workflow_of(k, w, contents, zero, tally) for k, w in noted.items()]
            edges: dict[str, set[str]] = {}
            for workflow in noted.values():
                for agent, following in edges_of(workflow.events).items():
                    edges.setdefault(agent, set()).update(following)
            missing = self._missing | {
                "tools_left_over": tally.tools_left_over,
                "tools_unfinished": tally.tools_unfinished,
                "workflows_without_calls": len(self._workflows) - len(noted),
            }
            return Trace(
                name=self.name,
                workflows=tuple(sorted(made, key=lambda w: w.arrival)),
                edges={a: tuple(sorted(b)) for a, b in sorted(edges.items())},
                tokens=self._trie.tokens(),
                meta={"source": "recorded", "model": self.model, "missing": {k: n for k, n in missing.items() if n}},
            )

    @property
    def tokenizer(self) -> Tokenizer:
        return self.engine.tokenizer

    async def agenerate(self, call: Call) -> Completion:
        started = self._clock()
        completion: Completion | None = None
        try:
            completion = await self.engine.agenerate(call)
        finally:
            self._note(call, completion, started)
        return completion

    def generate(self, call: Call) -> Completion:
        started = self._clock()
        completion: Completion | None = None
        try:
            completion = self.engine.generate(call)
        finally:
            self._note(call, completion, started)
        return completion

    async def astream(self, call: Call) -> AsyncIterator[Chunk]:
        started = self._clock()
        completion: Completion | None = None
        chunks = self.engine.astream(call)
        try:
            async for chunk in chunks:
                completion = chunk.completion or completion
                yield chunk
        finally:
            close = getattr(chunks, "aclose", None)
            if close is not None:
                await close()
            self._note(call, completion, started)

    def stream(self, call: Call) -> Iterator[Chunk]:
        started = self._clock()
        completion: Completion | None = None
        chunks = self.engine.stream(call)
        try:
            for chunk in chunks:
                completion = chunk.completion or completion
                yield chunk
        finally:
            close = getattr(chunks, "close", None)
            if close is not None:
                close()
            self._note(call, completion, started)

    def emit(self, event: Event) -> None:
        self.engine.emit(event)
        with self._lock:
            self._events += 1
            if self._events > 16 * self._max_calls:
                self._missing["events_over_limit"] += 1
            else:
                self._workflow(event.workflow).events.append(event)

    async def aflush(self) -> None:
        await self.engine.aflush()

    def flush(self) -> None:
        self.engine.flush()

    async def astats(self) -> EngineStats:
        return await self.engine.astats()

    def stats(self) -> EngineStats:
        return self.engine.stats()

    def decisions(self, *, since: int = 0) -> list[Decision]:
        return self.engine.decisions(since=since)

    def abort(self, request_id: str) -> None:
        self.engine.abort(request_id)

    def close(self) -> None:
        self.engine.close()

    def _workflow(self, name: str) -> NotedWorkflow:
        return self._workflows.setdefault(name, NotedWorkflow())

    def _note(self, call: Call, completion: Completion | None, started: float) -> None:
        ended = self._clock()
        with self._lock:
            if completion is None:
                self._missing["calls_without_answer"] += 1
                return
            self._calls += 1
            if self._calls > self._max_calls:
                self._missing["calls_over_limit"] += 1
                return
            workflow = self._workflow(call.at.workflow or call.request_id)
            workflow.tenant = workflow.tenant or call.at.tenant
            workflow.calls.append(
                NotedCall(
                    id=call.request_id,
                    agent=call.at.agent,
                    branch=call.at.branch,
                    started=started,
                    ended=max(started, ended),
                    number=self._trie.add(call.token_ids, completion.token_ids),
                    segments=tuple((s.kind, s.start, s.length, s.slot, s.producer) for s in call.segments),
                )
            )


@contextmanager
def recording(engine: Engine, path: str | os.PathLike[str], *, name: str = "recorded") -> Iterator[TraceRecorder]:
    """Use the engine that this gives in place of ``engine``; the trace is written to ``path`` at the end.

    It is written, with what there is, when the block fails too. ``engine`` stays open. Raises
    :class:`~agentflow.errors.TraceError` at once where there is no such folder.
    """
    if not Path(path).parent.is_dir():
        raise TraceError(f"{path}: no folder to write the recording to; nothing was run")
    recorder = TraceRecorder(engine, name=name)
    try:
        yield recorder
    finally:
        write_trace(recorder.trace(), path)
