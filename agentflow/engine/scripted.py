"""An engine that answers from a script: the double to test a graph with, without a model."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from pydantic import BaseModel

from agentflow.cache.decision import Decision
from agentflow.cache.policy import PolicySpec
from agentflow.engine._scripted_tokenizer import ScriptedTokenizer, render_tool_call
from agentflow.engine.base import (
    Call,
    Chunk,
    Completion,
    Engine,
    EngineStats,
    FinishReason,
    Timings,
    Usage,
    check_call,
)
from agentflow.errors import EngineClosed, EngineTimeout, ScriptError
from agentflow.events import Event
from agentflow.runtime.guards import Guards

__all__ = ["Answer", "Script", "ScriptedEngine", "ScriptedToolCall", "tool_call"]

#: Calls, events and aborted ids that an engine keeps for the test to look at; older ones are dropped.
LOG_LIMIT = 4096
#: Key of a per-agent script that serves agents without one of their own, and calls outside any agent.
ANY_AGENT = "*"
_PIECES_PER_CHUNK = 4


@dataclass(frozen=True, slots=True)
class ScriptedToolCall:
    """A tool call to answer with; see :func:`tool_call`."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return render_tool_call(self.name, self.arguments)


def tool_call(name: str, /, **arguments: Any) -> ScriptedToolCall:
    """The answer of a model that calls tool ``name``. Put several in a list to call them in one message."""
    return ScriptedToolCall(name, arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer with its circumstances: how it ended, and how many seconds it took (None: the engine's delay)."""

    text: Any = ""
    finish: FinishReason = "stop"
    delay: float | None = None


#: What a call can be answered with: text, JSON (a dict or pydantic object), tool calls, an exception to raise.
Reply: TypeAlias = (
    str | Answer | ScriptedToolCall | Mapping[str, Any] | BaseModel | BaseException | type[BaseException] | list[Any]
)
#: Answers in order, or a function from call to answer.
AgentScript: TypeAlias = Sequence[Reply] | Callable[[Call], Reply]
#: One script for all calls, or one per agent (``"*"`` for the rest).
Script: TypeAlias = AgentScript | Mapping[str, AgentScript]


class ScriptedEngine(Engine):
    """Answers each call with the next entry of its script.

    ``delay`` is the seconds an answer takes; when streamed, its pieces come spread over them. Answers are
    given as scripted, whatever ``max_tokens`` or a schema asks for; stop strings, time limits, aborts and
    unusable calls work as in a real engine. Usage counts tokens of the double's own tokenizer, none cached.

    ``calls``, ``events`` and ``aborted`` (request ids) record what the engine was told, the last 4096 of each.
    A call beyond the script raises :class:`~agentflow.errors.ScriptError`; so does :meth:`close` when script
    is left, unless the engine is used as a context manager and another exception is on its way.
    """

    model = "scripted"

    def __init__(
        self,
        script: Script,
        *,
        delay: float = 0.0,
        context_length: int = 1 << 20,
        policies: Sequence[PolicySpec] = (),
    ) -> None:
        self.guards = Guards(policies) if policies else None
        self.context_length = context_length
        self.delay = delay
        self.calls: deque[Call] = deque(maxlen=LOG_LIMIT)
        self.events: deque[Event] = deque(maxlen=LOG_LIMIT)
        self.aborted: deque[str] = deque(maxlen=LOG_LIMIT)
        self._tokenizer = ScriptedTokenizer()
        self._per_agent = isinstance(script, Mapping)
        scripts = script if isinstance(script, Mapping) else {ANY_AGENT: script}
        self._scripts: dict[str, _Source] = {agent: _Source(s) for agent, s in scripts.items()}
        self._counters = {"calls": 0, "events": 0, "aborted": 0}
        self._running: dict[str, concurrent.futures.Future[str]] = {}
        self._closed = False
        self._lock = threading.Lock()

    @property
    def tokenizer(self) -> ScriptedTokenizer:
        """The double's own tokenizer."""
        return self._tokenizer

    def prompt(self, call: Call) -> str:
        """The prompt of ``call`` as text, special tokens included."""
        return self._tokenizer.decode(call.token_ids, skip_special_tokens=False)

    def calls_of(self, agent: str | None) -> list[Call]:
        """The recorded calls of one agent."""
        return [c for c in self.calls if c.at.agent == agent]

    def assert_consumed(self) -> None:
        """Raise :class:`~agentflow.errors.ScriptError` when answers are left over."""
        left = {agent: n for agent, s in self._scripts.items() if (n := s.left())}
        if left:
            listed = ", ".join(f"{n} of {agent!r}" if self._per_agent else str(n) for agent, n in left.items())
            raise ScriptError(
                f"the script was not consumed: answers left over: {listed}; fewer calls came than expected"
            )

    async def agenerate(self, call: Call) -> Completion:
        done: Completion | None = None
        async for chunk in self.astream(call):
            done = chunk.completion
        assert done is not None
        return done

    def generate(self, call: Call) -> Completion:
        done: Completion | None = None
        for chunk in self.stream(call):
            done = chunk.completion
        assert done is not None
        return done

    async def astream(self, call: Call) -> AsyncGenerator[Chunk, None]:
        play = _Play(self, call)
        try:
            for pause, chunk in play.steps():
                await asyncio.sleep(0)
                if pause and not play.stop.done():
                    await asyncio.wait([asyncio.wrap_future(play.stop)], timeout=pause)
                play.check()
                if play.stop.done():
                    yield play.final("abort")
                    return
                yield chunk
        finally:
            play.end()

    def stream(self, call: Call) -> Generator[Chunk, None, None]:
        play = _Play(self, call)
        try:
            for pause, chunk in play.steps():
                if pause:
                    concurrent.futures.wait([play.stop], timeout=pause)
                play.check()
                if play.stop.done():
                    yield play.final("abort")
                    return
                yield chunk
        finally:
            play.end()

    def emit(self, event: Event) -> None:
        with self._lock:
            self._counters["events"] += 1
            self.events.append(event)

    async def aflush(self) -> None:
        return None

    def flush(self) -> None:
        return None

    async def astats(self) -> EngineStats:
        return self.stats()

    def stats(self) -> EngineStats:
        with self._lock:
            details = {"framework": self.guards.stats()} if self.guards is not None else {}
            return EngineStats(
                policy="none", running=len(self._running), counters=dict(self._counters), details=details
            )

    def decisions(self, *, since: int = 0) -> list[Decision]:
        return []

    def abort(self, request_id: str) -> None:
        self._stop(request_id, "abort")

    def close(self) -> None:
        if self._release():
            self.assert_consumed()

    def __exit__(self, *exc: object) -> None:
        self._leave(exc)

    async def __aexit__(self, *exc: object) -> None:
        self._leave(exc)

    def _leave(self, exc: tuple[object, ...]) -> None:
        if exc and exc[0] is not None:
            self._release()
        else:
            self.close()

    def _release(self) -> bool:
        with self._lock:
            first = not self._closed
            self._closed = True
        for request_id in list(self._running):
            self._stop(request_id, "closed")
        return first

    def _stop(self, request_id: str, why: str) -> None:
        with self._lock:
            stop = self._running.get(request_id)
            if stop is not None and not stop.done():
                stop.set_result(why)

    def _begin(self, call: Call, stop: concurrent.futures.Future[str]) -> Answer:
        check_call(call, context_length=self.context_length)
        with self._lock:
            if self._closed:
                raise EngineClosed("the scripted engine was closed; make a new one to go on")
            agent = call.at.agent or ANY_AGENT
            source = self._scripts.get(agent) or self._scripts.get(ANY_AGENT)
            self.calls.append(call)
            self._counters["calls"] += 1
            number = self._counters["calls"]
            if source is None:
                raise ScriptError(
                    f"no script for agent {agent!r}: it has {sorted(self._scripts)}; {ANY_AGENT!r} serves all"
                )
            reply = source.next(agent, number)
            self._running[call.request_id] = stop
        try:
            return _answer(reply(call) if callable(reply) and not isinstance(reply, type) else reply)
        except BaseException:
            self._running.pop(call.request_id, None)
            raise

    def _finish(self, request_id: str, *, complete: bool) -> None:
        with self._lock:
            if self._running.pop(request_id, None) is not None and not complete:
                self._counters["aborted"] += 1
                self.aborted.append(request_id)


class _Source:
    """The script of one agent."""

    def __init__(self, script: AgentScript) -> None:
        if isinstance(script, str | bytes) or not (callable(script) or isinstance(script, Sequence)):
            raise ScriptError(f"a script is a list of answers or a function, not {type(script).__name__}")
        self._function = script if callable(script) else None
        self._answers: deque[Reply] = deque() if callable(script) else deque(script)
        self._given = 0

    def left(self) -> int:
        return len(self._answers)

    def next(self, agent: str, number: int) -> Any:
        if self._function is not None:
            return self._function
        if not self._answers:
            whose = "" if agent == ANY_AGENT else f" (agent {agent!r})"
            raise ScriptError(
                f"the script ran out: call {number}{whose} came after its {self._given} answers were used; add answers,"
                " or find out why the graph calls the model more often than expected"
            )
        self._given += 1
        return self._answers.popleft()


class _Play:
    """One call being answered."""

    def __init__(self, engine: ScriptedEngine, call: Call) -> None:
        self._engine = engine
        self._call = call
        self._started = time.monotonic()
        self._first: float | None = None
        self._ids: list[int] = []
        self._text = ""
        self._complete = False
        self.stop: concurrent.futures.Future[str] = concurrent.futures.Future()

    def steps(self) -> Generator[tuple[float, Chunk], None, None]:
        """Pause in seconds and chunk, one after another; the last chunk carries the completion."""
        answer = self._engine._begin(self._call, self.stop)
        tokenizer = self._engine.tokenizer
        text, finish = _cut(answer.text, self._call.sampling.stop), answer.finish
        pieces = tokenizer.pieces(text)
        groups = ["".join(pieces[i : i + _PIECES_PER_CHUNK]) for i in range(0, len(pieces), _PIECES_PER_CHUNK)]
        delay = self._engine.delay if answer.delay is None else answer.delay
        pause = delay / (len(groups) + 1)
        for group in groups:
            ids = tokenizer.encode(group)
            yield self._within_limit(pause), Chunk(text=group, token_ids=tuple(ids))
            self._first = self._first or time.monotonic()
            self._ids += ids
            self._text += group
        ended = tuple(tokenizer.eos_token_ids) if finish == "stop" and text == answer.text else ()
        self._ids += ended
        yield self._within_limit(pause), self.final(finish, ended)

    def check(self) -> None:
        """Raise when the time limit passed or the engine was closed."""
        if self.stop.done() and self.stop.result() == "closed":
            raise EngineClosed("the scripted engine was closed while this call ran")
        limit = self._call.time_limit
        if limit is not None and time.monotonic() - self._started >= limit and not self._complete:
            raise EngineTimeout(f"no complete answer within {limit} s; the request was aborted")

    def final(self, finish: FinishReason, ids: tuple[int, ...] = ()) -> Chunk:
        """The chunk that ends the answer."""
        now = time.monotonic()
        self._complete = finish != "abort"
        completion = Completion(
            request_id=self._call.request_id,
            text=self._text,
            token_ids=tuple(self._ids),
            finish=finish,
            usage=Usage(prompt_tokens=len(self._call.token_ids), completion_tokens=len(self._ids)),
            timings=Timings(first_token=(self._first or now) - self._started, total=now - self._started),
            model=self._engine.model,
        )
        return Chunk(token_ids=ids, completion=completion)

    def end(self) -> None:
        """Forget the call; it counts as aborted unless its last chunk was made."""
        self._engine._finish(self._call.request_id, complete=self._complete)

    def _within_limit(self, pause: float) -> float:
        if self._call.time_limit is None:
            return pause
        return min(pause, max(0.0, self._started + self._call.time_limit - time.monotonic()))


def _answer(reply: Any) -> Answer:
    if isinstance(reply, BaseException) or (isinstance(reply, type) and issubclass(reply, BaseException)):
        raise reply
    if isinstance(reply, Answer):
        return Answer(text=_text(reply.text), finish=reply.finish, delay=reply.delay)
    return Answer(text=_text(reply))


def _text(reply: Any) -> str:
    if isinstance(reply, str | ScriptedToolCall):
        return str(reply)
    if isinstance(reply, BaseModel):
        return reply.model_dump_json()
    if isinstance(reply, list) and any(isinstance(r, ScriptedToolCall) for r in reply):
        return "\n".join(_text(r) for r in reply)
    if isinstance(reply, Mapping | list):
        return json.dumps(reply, ensure_ascii=False)
    raise ScriptError(f"cannot answer with {type(reply).__name__}: give text, a dict, a pydantic object, tool calls")


def _cut(text: str, stops: Sequence[str]) -> str:
    ends = [i for s in stops if (i := text.find(s)) >= 0]
    return text[: min(ends)] if ends else text
