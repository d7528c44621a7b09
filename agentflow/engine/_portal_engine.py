"""What engines that reach SGLang over a connection have in common: one async implementation for all callers."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentflow.cache.decision import Decision
from agentflow.cache.policy import PolicySpec, check_policies, split_policies
from agentflow.engine._events_buffer import EventBuffer
from agentflow.engine._portal import Portal
from agentflow.engine.base import Call, Chunk, Completion, Engine, EngineStats, Tokenizer
from agentflow.engine.sglang import control
from agentflow.errors import BadRequest, EngineFailure
from agentflow.runtime.guards import Guards

__all__ = ["PortalEngine"]


class PortalEngine(Engine):
    """Sync and async twins of calls and control requests, on the portal's loop.

    A subclass sets ``_portal``, ``_events`` and ``_tokenizer``, and says how a call and a control request are done.
    """

    _portal: Portal
    _events: EventBuffer
    _tokenizer: Tokenizer

    # -- what a subclass does, on the portal's loop ----------------------------------------------------------

    @abstractmethod
    def _outcome(self, call: Call, *, stream: bool) -> AsyncGenerator[Chunk, None]:
        """Chunks of a call as they come; without ``stream`` a single one. Leaving it early stops the work."""

    @abstractmethod
    async def _control(self, method: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Replies of the schedulers to a control request."""

    @abstractmethod
    async def _configure(self, policies: Sequence[PolicySpec] | None, reset: bool) -> None:
        """Change policies, or empty the cache, or both."""

    @abstractmethod
    def _check_call(self, call: Call) -> None:
        """Raise for a call that cannot be sent."""

    @abstractmethod
    def _check_usable(self) -> None:
        """Raise when the engine was closed, or may not be used here."""

    def _with_own(self, stats: EngineStats) -> EngineStats:
        return stats

    # -- calls -----------------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    async def agenerate(self, call: Call) -> Completion:
        self._check_call(call)
        return await self._portal.arun(self._generate(call))

    def generate(self, call: Call) -> Completion:
        self._check_call(call)
        return self._portal.run(self._generate(call))

    async def astream(self, call: Call) -> AsyncGenerator[Chunk, None]:
        self._check_call(call)
        async with contextlib.aclosing(self._portal.astream(self._outcome(call, stream=True))) as chunks:
            async for chunk in chunks:
                yield chunk

    def stream(self, call: Call) -> Iterator[Chunk]:
        self._check_call(call)
        yield from self._portal.stream(self._outcome(call, stream=True))

    async def _generate(self, call: Call) -> Completion:
        last: Chunk | None = None
        async with contextlib.aclosing(self._outcome(call, stream=False)) as chunks:
            async for chunk in chunks:
                last = chunk
        if last is None or last.completion is None:
            raise EngineFailure("the engine gave no answer")
        return last.completion

    # -- events, statistics, policies ------------------------------------------------------------------------

    async def aflush(self) -> None:
        self._check_usable()
        await self._portal.arun(self._events.aflush())

    def flush(self) -> None:
        self._check_usable()
        self._portal.run(self._events.aflush())

    async def astats(self) -> EngineStats:
        return self._with_guards(self._with_own(control.stats(await self.acontrol("stats"))))

    def stats(self) -> EngineStats:
        return self._with_guards(self._with_own(control.stats(self.control("stats"))))

    def decisions(self, *, since: int = 0) -> list[Decision]:
        return control.decisions(self.control("decisions", {"since": since}))

    async def aconfigure(self, *, policies: Sequence[PolicySpec] | None = None, reset: bool = False) -> None:
        """Change the cache policies; ``reset`` also empties the cache, the ledger and the counters.

        An empty list means plain LRU. Calls that run are not disturbed; a reset waits a moment for the engine to be
        idle. A policy that nobody knows raises :class:`~agentflow.errors.UsageError`; a ``module:Class`` that the
        engine cannot import, a reset of an engine that stays busy, or a server without our plugin,
        :class:`~agentflow.errors.EngineFailure`. Either changes nothing.
        """
        mine = self._take(policies)
        await self._portal.arun(self._configure(mine, reset))
        self._use(policies)

    def configure(self, *, policies: Sequence[PolicySpec] | None = None, reset: bool = False) -> None:
        """Like :meth:`aconfigure`, blocking this thread."""
        mine = self._take(policies)
        self._portal.run(self._configure(mine, reset))
        self._use(policies)

    async def acontrol(self, method: str, body: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        """A control request to every scheduler (see :mod:`agentflow.engine.sglang.control`), one reply each; no
        reply from a server without our plugin."""
        self._check_usable()
        return await self._portal.arun(self._control(method, body or {}))

    def control(self, method: str, body: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        """Like :meth:`acontrol`, blocking this thread."""
        self._check_usable()
        return self._portal.run(self._control(method, body or {}))

    def _take(self, policies: Sequence[PolicySpec] | None) -> list[PolicySpec] | None:
        """Of the policies wanted those that the engine drives; None leaves them as they are."""
        if policies is not None:
            check_policies(policies)
        self._check_usable()
        if policies is None:
            return None
        mine, framework = split_policies(policies)
        return mine if mine or not framework else None

    def _use(self, policies: Sequence[PolicySpec] | None) -> None:
        """Drive those of the policies that are the framework's."""
        if policies is not None:
            framework = split_policies(policies)[1]
            self.guards = Guards(framework) if framework else None

    def _with_guards(self, stats: EngineStats) -> EngineStats:
        if self.guards is None:
            return stats
        return replace(stats, details={**stats.details, "framework": self.guards.stats()})

    @staticmethod
    def _check_id(request_id: str, running: Iterable[str]) -> None:
        # SGLang aborts by prefix of the id: ids that begin alike would stop each other's calls.
        for other in running:
            if other == request_id:
                raise BadRequest(f"call {request_id!r} is running already: make a new Call for every request")
            if other.startswith(request_id) or request_id.startswith(other):
                raise BadRequest(
                    f"request_id {request_id!r} begins like {other!r}, which is running: ids must not be prefixes of"
                    " one another (leave request_id out to get a fresh one)"
                )
