"""An SGLang server somewhere else, over HTTP.

Any ``python -m sglang.launch_server`` will do. One started with agentflow installed and
``--radix-cache-backend agentflow`` takes events, and reports statistics and decisions, as the embedded engine
does; with another, calls work, and what only the plugin could use is counted and left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import weakref
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from agentflow.cache.policy import PolicySpec
from agentflow.engine._events_buffer import EventBuffer
from agentflow.engine._portal import Portal
from agentflow.engine._portal_engine import PortalEngine
from agentflow.engine._reading import Reading, following
from agentflow.engine._server import Server, TransientError
from agentflow.engine.base import Call, Chunk, EngineStats, Tokenizer, check_call
from agentflow.engine.guard import check_real_engine_allowed
from agentflow.engine.hf_tokenizer import load_tokenizer
from agentflow.engine.sglang import wire
from agentflow.engine.sglang.requests import sampling_params
from agentflow.errors import (
    BadRequest,
    EngineClosed,
    EngineFailure,
    EngineTimeout,
    ModelNotFound,
    RemoteError,
    UsageError,
)
from agentflow.events import Event, encode_batch

__all__ = ["RemoteEngine"]

log = logging.getLogger("agentflow.engine")
#: Pauses before an abort is said again, in seconds: one that overtakes its call finds nothing to stop.
_ABORT_PAUSES = (0.0, 0.1, 0.4, 1.5)


@dataclass(slots=True)
class _Running:
    """A call in flight. ``rid`` is its id on the server, another one after each retry."""

    rid: str
    aborted: bool = False


class RemoteEngine(PortalEngine):
    """The SGLang server at ``url`` (``http://host:30000``).

    ``tokenizer`` is a tokenizer, or a folder or Hugging Face id to load it from; None takes the one that the
    server names. ``time_limit`` holds for calls that bring none, ``first_token_limit`` for the first token of
    streamed calls, ``connect_limit`` for reaching the server; all in seconds. Failures to connect and answers
    of 429, 502, 503 and 504 are tried ``retries`` times again, never once tokens have come.

    The constructor asks the server for its model and blocks for it; from async code use :meth:`create`.
    Raises :class:`~agentflow.errors.RemoteError` when there is no such server.
    """

    def __init__(
        self,
        url: str,
        tokenizer: Tokenizer | str | None = None,
        *,
        time_limit: float | None = 600.0,
        first_token_limit: float | None = None,
        connect_limit: float = 5.0,
        retries: int = 3,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        check_real_engine_allowed()
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"the url of a server begins with http:// or https://, got {url!r}")
        self.time_limit = time_limit
        self.first_token_limit = first_token_limit
        self.pool_tokens: int | None = None
        #: Whether the server runs agentflow's plugin.
        self.has_plugin = True
        self._counters: Counter[str] = Counter()
        self._running: dict[str, _Running] = {}
        self._aborts: set[asyncio.Task[None]] = set()
        self._leaving = asyncio.Event()
        self._closed = False
        self._incremental = False
        self._server = Server(url, api_key=api_key, headers=headers, connect_limit=connect_limit, retries=retries)
        self._portal = Portal("agentflow-remote", cleanup=self._server.aclose)
        self._events = EventBuffer(self._portal, self._send_events)
        self._finalizer = weakref.finalize(self, self._portal.close)
        try:
            named = self._portal.run(self._connect())
            self._tokenizer = _tokenizer(tokenizer, named, self._server.url)
        except BaseException:
            self.close()
            raise

    @classmethod
    async def create(cls, url: str, tokenizer: Tokenizer | str | None = None, **options: Any) -> Self:
        """Like the constructor, without blocking the event loop."""
        return await asyncio.to_thread(cls, url, tokenizer, **options)

    # -- calls -------------------------------------------------------------------------------------------

    def abort(self, request_id: str) -> None:
        self._portal.call_soon(self._abort, request_id)

    # -- events, statistics, policies ----------------------------------------------------------------------

    def emit(self, event: Event) -> None:
        self._events.put(event)

    # -- life ----------------------------------------------------------------------------------------------

    async def ahealthy(self, *, time_limit: float = 30.0) -> bool:
        """Whether the server can generate; it tries one token, which takes it a second. Never raises."""
        try:
            async with asyncio.timeout(time_limit):
                await self._portal.arun(self._server.get("/health"))
        except (EngineFailure, EngineClosed, BadRequest, TimeoutError):
            return False
        return True

    def healthy(self, *, time_limit: float = 30.0) -> bool:
        """Like :meth:`ahealthy`, blocking this thread."""
        return not self._closed and self._portal.run(self.ahealthy(time_limit=time_limit))

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            with contextlib.suppress(Exception):
                self._portal.run(self._farewell())
        self._finalizer()

    # -- on the portal's loop ------------------------------------------------------------------------------

    async def _connect(self) -> str:
        """Learn about the server; returns what it names as its tokenizer."""
        info = await self._server.with_retries(lambda: self._server.get("/model_info"))
        listed = await self._server.get("/v1/models")
        details = await self._server.get("/server_info")
        try:
            self.model = str(info.get("served_model_name") or info["model_path"])
            self.context_length = int(listed["data"][0]["max_model_len"])
            self.pool_tokens = details.get("max_total_num_tokens")
            self._incremental = bool(details.get("incremental_streaming_output"))
            named = str(info.get("tokenizer_path") or info["model_path"])
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise RemoteError(f"{self._server.url} does not answer like an SGLang server: {error!r}") from error
        try:
            await self._control("stats", {})
        except RemoteError:
            raise
        except EngineFailure:  # the plugin is there, but not at work: the server has another radix cache
            self._without_plugin()
        return named

    async def _outcome(self, call: Call, *, stream: bool) -> AsyncGenerator[Chunk, None]:
        """Chunks of a call as they come; without ``stream`` a single one. Leaving it early stops the work."""
        self._check_id(call.request_id, self._running)
        running = self._running[call.request_id] = _Running(call.request_id)
        reading = Reading(call, self.model, incremental=self._incremental and stream)
        limit = call.time_limit if call.time_limit is not None else self.time_limit
        try:
            async with _limited(limit, f"call {call.request_id} had no complete answer within"):
                async with _limited(self.first_token_limit if stream else None, "no first token came within"):
                    message, rest = await self._server.with_retries(lambda: self._open(call, running, stream))
                async with contextlib.aclosing(rest):
                    while True:
                        chunk = reading.take(message)
                        yield chunk
                        if chunk.completion is not None:
                            return
                        message = await following(rest, reading)
        finally:
            del self._running[call.request_id]
            if not reading.done:
                self._abort_in_background(running)

    async def _open(
        self, call: Call, running: _Running, stream: bool
    ) -> tuple[dict[str, Any], AsyncGenerator[dict[str, Any], None]]:
        """Send the call and wait for the first message of its answer."""
        if running.aborted:
            return {"text": "", "output_ids": [], "meta_info": {"finish_reason": {"type": "abort"}}}, _nothing()
        events = self._events.drain() if self.has_plugin else []
        body: dict[str, Any] = {
            "rid": running.rid,
            "input_ids": list(call.token_ids),
            "sampling_params": sampling_params(call.sampling),
            "stream": stream,
            **({"lora_path": call.adapter} if call.adapter is not None else {}),
            "kv_hints": wire.hints(call, events),
        }
        if call.sampling.forced_tokens is not None:
            body["custom_logit_processor"] = _forced_tokens()
        answer = self._server.events("/generate", body) if stream else self._whole(body)
        try:
            return await following(answer, None), answer
        except TransientError:
            self._events.restore(events)
            self._abort_in_background(_Running(running.rid))
            running.rid = f"retry{self._server.retried + 1}-{call.request_id}"
            raise
        except BaseException:
            await answer.aclose()
            raise

    async def _whole(self, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        yield await self._server.post("/generate", body)

    async def _control(self, method: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        if not self.has_plugin:
            self._counters["plugin_missing"] += 1
            return []
        try:
            answer = await self._server.post(f"/agentflow/{method}", body)
        except RemoteError as error:
            if error.status == 409:
                raise EngineFailure(str(error)) from error
            if error.status not in (404, 405):
                raise
            self._without_plugin()
            return []
        replies: list[dict[str, Any]] = answer["replies"]
        return replies

    async def _configure(self, policies: Sequence[PolicySpec] | None, reset: bool) -> None:
        body = {"policies": None if policies is None else list(policies), "reset": reset}
        if not await self._control("configure", body):
            raise EngineFailure(
                f"the SGLang server at {self._server.url} runs without agentflow's plugin and has no policies to change"
            )

    def _without_plugin(self) -> None:
        self.has_plugin = False
        self._counters["plugin_missing"] += 1
        log.warning(
            "the SGLang server at %s runs without agentflow's cache: events, statistics and policies are left out."
            " Install agentflow there and start it with --radix-cache-backend agentflow",
            self._server.url,
        )

    async def _send_events(self, events: Sequence[Event]) -> None:
        if self.has_plugin:
            await self._control("events", {"batch": encode_batch(events)})
        if not self.has_plugin:
            self._counters["events_left_out"] += len(events)

    def _abort(self, request_id: str) -> None:
        running = self._running.get(request_id)
        if running is not None:
            running.aborted = True
            self._abort_in_background(running, while_running=request_id)

    def _abort_in_background(self, running: _Running, *, while_running: str | None = None) -> None:
        task = asyncio.get_running_loop().create_task(self._say_abort(running, while_running))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _say_abort(self, running: _Running, while_running: str | None) -> None:
        """Ask the server to stop a call; again while the call goes on, since an abort may overtake its call."""
        for pause in _ABORT_PAUSES if while_running is not None else _ABORT_PAUSES[:2]:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._leaving.wait(), pause)
            if while_running is not None and self._running.get(while_running) is not running:
                return
            with contextlib.suppress(EngineFailure, BadRequest):
                await self._server.post("/abort_request", {"rid": running.rid})
            if self._leaving.is_set():
                return

    async def _farewell(self) -> None:
        """Abort what runs, and see that it is heard."""
        self._leaving.set()
        for running in self._running.values():
            self._abort_in_background(running)
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=2.0)

    # -- checks --------------------------------------------------------------------------------------------

    def _check_call(self, call: Call) -> None:
        self._check_usable()
        check_call(call, context_length=self.context_length, pool_tokens=self.pool_tokens)

    def _check_usable(self) -> None:
        check_real_engine_allowed()
        if self._closed:
            raise EngineClosed("the engine was closed; make a new one to go on")

    def _with_own(self, stats: EngineStats) -> EngineStats:
        """The server's snapshot; ``counters`` also hold what happened on this side (``remote_*``)."""
        own = {f"remote_{name}": n for name, n in self._counters.items()}
        own |= {"remote_retries": self._server.retried, "remote_events_dropped": self._events.dropped}
        return replace(stats, counters={**stats.counters, **own})


async def _nothing() -> AsyncGenerator[dict[str, Any], None]:
    return
    yield {}


@contextlib.asynccontextmanager
async def _limited(limit: float | None, what: str) -> AsyncGenerator[None, None]:
    try:
        async with asyncio.timeout(limit):
            yield
    except TimeoutError:
        raise EngineTimeout(
            f"{what} its time limit of {limit:g} seconds; it was aborted, and what it had computed stays cached"
        ) from None


def _forced_tokens() -> str:
    from agentflow.engine.sglang.forced import forced_tokens_processor

    try:
        return forced_tokens_processor()
    except ImportError as error:
        raise UsageError("forced_tokens on a remote server need sglang installed on this side as well") from error


def _tokenizer(given: Tokenizer | str | None, named: str, url: str) -> Tokenizer:
    if given is not None and not isinstance(given, str):
        return given
    try:
        return load_tokenizer(given if given is not None else named)
    except ModelNotFound as error:
        if given is not None:
            raise
        raise ModelNotFound(
            f"the server at {url} names its tokenizer {named!r}, which cannot be read here ({error}): give tokenizer="
            " a folder or Hugging Face id of the same model"
        ) from error
