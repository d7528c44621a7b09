"""The embedded engine: SGLang on this machine, owned by this Python process.

SGLang runs in a host process of its own (:mod:`agentflow.engine.sglang.host`), so that an engine can be made
in a script without a ``__main__`` guard, a notebook, a thread or a server, beside other engines, and so that
nothing SGLang does to its process reaches the user's. One background thread talks to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, Self, TypeVar

from agentflow.cache.policy import PolicySpec, check_policies, split_policies
from agentflow.engine._embedded_checks import Health, check_ids, check_platform, time_limit
from agentflow.engine._events_buffer import EventBuffer
from agentflow.engine._host_process import HostProcess
from agentflow.engine._portal import Portal
from agentflow.engine._portal_engine import PortalEngine
from agentflow.engine.base import Call, Chunk, Completion, Timings, check_call
from agentflow.engine.guard import check_real_engine_allowed
from agentflow.engine.hf_tokenizer import load_tokenizer
from agentflow.engine.models import resolve_model
from agentflow.engine.sglang import wire
from agentflow.engine.sglang.arguments import POLICIES_ENV, ServerOptions
from agentflow.engine.sglang.requests import finish_of, request_error, sampling_params, usage_of
from agentflow.errors import (
    EngineClosed,
    EngineDied,
    EngineFailure,
)
from agentflow.events import Event, encode_batch
from agentflow.runtime.guards import Guards

__all__ = ["EmbeddedEngine", "Health"]

T = TypeVar("T")

#: Seconds that a reset waits for an idle engine.
BUSY_LIMIT = 2.0
#: Live engines, to be made unusable in forked children.
_engines: weakref.WeakSet[EmbeddedEngine] = weakref.WeakSet()


class EmbeddedEngine(PortalEngine):
    """SGLang on this machine, with the cache policies ``policies`` (strongest first): names, or mappings of ``name``
    and options. Those of the framework (``memo``, ``safety``, ...) are driven in this process, the others in SGLang's
    scheduler.

    ``model`` is a folder, a Hugging Face id, or None for the small default model. ``max_total_tokens`` is the
    KV pool in tokens, ``host_ratio`` the size of the host tier in device pools (0: no host tier),
    ``context_length`` the longest prompt and answer together; None leaves each to the machine and model.
    ``on_progress`` hears the phases of the start, on another thread. ``stock_cache`` keeps SGLang's own radix
    cache, for comparisons: policies and events then do nothing. Further keywords go to SGLang as they are.

    The constructor returns when the engine is ready, which takes tens of seconds; from async code use
    :meth:`create`. Raises a :class:`~agentflow.errors.SetupError` that says what is missing, or
    :class:`~agentflow.errors.EngineTimeout` after ``start_timeout`` seconds. Several engines may live in one
    process, as far as memory goes.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        policies: Sequence[PolicySpec] = ("lifecycle",),
        max_total_tokens: int | None = None,
        host_ratio: float = 2.0,
        context_length: int | None = None,
        on_progress: Callable[[str], None] | None = None,
        start_timeout: float = 600.0,
        stock_cache: bool = False,
        **sglang_args: Any,
    ) -> None:
        check_real_engine_allowed()
        check_platform()
        check_policies(policies)
        self._say = on_progress or (lambda _phase: None)
        folder = resolve_model(model, on_progress=self._say)
        self._tokenizer = load_tokenizer(folder.path)
        self.model = folder.name
        engine_policies, framework = split_policies(policies)
        self.policies = tuple(engine_policies or (() if not framework else ("lifecycle",)))
        self.guards = Guards(framework) if framework else None
        self._options = ServerOptions(
            model_path=str(folder.path),
            max_total_tokens=max_total_tokens,
            context_length=context_length,
            host_ratio=host_ratio,
            stock_cache=stock_cache,
            extra=sglang_args,
        )
        self._start_timeout = start_timeout
        self._facts: dict[str, Any] = {}
        self._outputs: dict[str, asyncio.Queue[tuple[Any, ...] | Exception]] = {}
        self._replies: dict[int, asyncio.Future[list[dict[str, Any]]]] = {}
        self._numbers = itertools.count()
        self._death: EngineFailure | None = None
        self._pid = os.getpid()
        self._closed = False
        self._portal = Portal("agentflow-engine")
        self._events = EventBuffer(self._portal, self._send_events)
        self._host = HostProcess(self._on_message, self._on_end)
        self._finalizer = weakref.finalize(self, _end, self._portal, [self._host], self._pid)
        try:
            self._portal.run(self._start(self._host))
        except BaseException:
            self.close()
            raise
        _engines.add(self)

    @classmethod
    async def create(cls, model: str | os.PathLike[str] | None = None, **options: Any) -> Self:
        """Like the constructor, without blocking the event loop."""
        return await asyncio.to_thread(cls, model, **options)

    # -- calls -------------------------------------------------------------------------------------------

    @property
    def pool_tokens(self) -> int:
        """Slots of the device pool, in tokens."""
        return int(self._facts["pool_tokens"])

    def abort(self, request_id: str) -> None:
        self._portal.call_soon(lambda: self._host.send(("abort", request_id)))

    # -- events, statistics, policies ----------------------------------------------------------------------

    def emit(self, event: Event) -> None:
        if not self._options.stock_cache:
            self._events.put(event)

    # -- life ------------------------------------------------------------------------------------------------

    async def ahealth(self, *, time_limit: float = 5.0) -> Health:
        """Ask the scheduler for a sign of life. Never raises."""
        if self._closed:
            return Health(alive=False, detail="closed")
        begun = time.perf_counter()
        try:
            async with asyncio.timeout(time_limit):
                await self.acontrol("stats")
        except TimeoutError:
            return self._health(f"no answer from the scheduler in {time_limit:g} seconds", None)
        except Exception as error:
            return self._health(str(error), None)
        return self._health("ready", time.perf_counter() - begun)

    def health(self, *, time_limit: float = 5.0) -> Health:
        """Like :meth:`ahealth`, blocking this thread."""
        if self._closed:
            return Health(alive=False, detail="closed")
        return self._portal.run(self.ahealth(time_limit=time_limit))

    def restart(self) -> None:
        """Start the engine anew with the options it had; the cache begins empty. Running calls fail."""
        check_real_engine_allowed()
        if self._closed:
            raise EngineClosed("the engine was closed; make a new one to go on")
        self._portal.run(self._restart())

    async def arestart(self) -> None:
        """Like :meth:`restart`, from async code."""
        await asyncio.to_thread(self.restart)

    def close(self) -> None:
        self._closed = True
        self._finalizer()

    # -- on the portal's loop ----------------------------------------------------------------------------------

    async def _start(self, host: HostProcess) -> None:
        self._say("starting a process for the engine")
        environment = {
            POLICIES_ENV: json.dumps(list(self.policies)),
            "SGLANG_PLUGINS": os.environ.get("SGLANG_PLUGINS", "agentflow,agentflow_cpu"),
            "HF_HUB_OFFLINE": "1",  # the model is a folder by now
            "TOKENIZERS_PARALLELISM": "false",
        }
        self._facts = await host.start(self._options, environment, self._start_timeout, self._say)
        self.context_length = self._facts["context_length"]
        self._death = None
        self._say("ready")

    async def _restart(self) -> None:
        self._on_end(EngineDied("the engine is being restarted; the call got no answer"))
        old, self._host = self._host, HostProcess(self._on_message, self._on_end)
        await old.stop()
        self._finalizer.detach()
        self._finalizer = weakref.finalize(self, _end, self._portal, [self._host], self._pid)
        await self._start(self._host)

    async def _outcome(self, call: Call, *, stream: bool) -> AsyncGenerator[Chunk, None]:
        """Chunks of a call as they come; without ``stream`` a single one. Leaving it early stops the work."""
        if self._death is not None:
            raise self._death
        self._check_id(call.request_id, self._outputs)
        outputs: asyncio.Queue[tuple[Any, ...] | Exception] = asyncio.Queue()
        self._outputs[call.request_id] = outputs
        host, begun = self._host, time.perf_counter()
        host.send(("generate", call.request_id, self._arguments(call, stream), call.sampling.forced_tokens is not None))
        done = False
        text: list[str] = []
        ids: list[int] = []
        try:
            async with time_limit(call):
                while not done:
                    output = await outputs.get()
                    if isinstance(output, Exception):
                        done = True
                        raise output
                    _, _, new_text, new_ids, meta, first = output
                    text.append(new_text)
                    ids += new_ids
                    if meta is None:
                        yield Chunk(text=new_text, token_ids=tuple(new_ids))
                        continue
                    done = True
                    reply = wire.reply_of(meta)
                    if not stream:  # all of it came at once: only the engine knows when the first token was there
                        first = reply.first_seconds or first
                    completion = Completion(
                        request_id=call.request_id,
                        text="".join(text),
                        token_ids=tuple(ids),
                        finish=finish_of(meta),
                        usage=usage_of(meta),
                        timings=Timings(
                            queue=reply.queue_seconds, first_token=first, total=time.perf_counter() - begun
                        ),
                        decisions=reply.decisions,
                        model=self.model,
                    )
                    yield Chunk(text=new_text, token_ids=tuple(new_ids), completion=completion)
        finally:
            if self._outputs.get(call.request_id) is outputs:
                del self._outputs[call.request_id]
            if not done:
                host.send(("cancel", call.request_id))

    def _arguments(self, call: Call, stream: bool) -> dict[str, Any]:
        return {
            "input_ids": list(call.token_ids),
            "sampling_params": sampling_params(call.sampling),
            "stream": stream,
            **({"lora_path": call.adapter} if call.adapter is not None else {}),
            "kv_hints": wire.hints(call, self._events.drain()),
        }

    async def _control(self, method: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        if self._death is not None:
            raise self._death
        number = next(self._numbers)
        reply: asyncio.Future[list[dict[str, Any]]] = asyncio.get_running_loop().create_future()
        self._replies[number] = reply
        try:
            self._host.send(("control", number, method, dict(body)))
            return await reply
        finally:
            self._replies.pop(number, None)

    async def _configure(self, policies: Sequence[PolicySpec] | None, reset: bool) -> None:
        wanted = self.policies if policies is None else tuple(policies)
        deadline = time.monotonic() + BUSY_LIMIT
        while True:
            try:
                await self._control("configure", {"policies": list(wanted), "reset": reset})
                break
            except EngineFailure as error:
                if not reset or "is busy" not in str(error) or time.monotonic() > deadline:
                    raise
            await asyncio.sleep(0.02)
        self.policies = wanted

    async def _send_events(self, events: Sequence[Event]) -> None:
        await self._control("events", {"batch": encode_batch(events)})

    def _on_message(self, message: tuple[Any, ...]) -> None:
        kind, key = message[0], message[1]
        if kind in ("out", "error"):
            outputs = self._outputs.get(key)
            if outputs is not None:
                outputs.put_nowait(message if kind == "out" else request_error(message[2], message[3]))
            return
        reply = self._replies.get(key)
        if reply is not None and not reply.done():
            if kind == "reply":
                reply.set_result(message[2])
            else:
                reply.set_exception(EngineFailure(message[2]))

    def _on_end(self, death: EngineFailure) -> None:
        self._death = death
        for outputs in self._outputs.values():
            outputs.put_nowait(death)
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(death)

    # -- checks ------------------------------------------------------------------------------------------------

    def _check_call(self, call: Call) -> None:
        self._check_usable()
        check_call(call, context_length=self.context_length, pool_tokens=self.pool_tokens)
        check_ids(call.token_ids, self._facts["vocab_size"], "the prompt")
        check_ids(call.sampling.forced_tokens or (), self._facts["vocab_size"], "forced_tokens")

    def _check_usable(self) -> None:
        check_real_engine_allowed()
        if self._pid != os.getpid():
            raise EngineClosed("the engine belongs to the process that made it; this is a forked child: make one here")
        if self._closed:
            raise EngineClosed("the engine was closed; make a new one to go on")

    def _health(self, detail: str, round_trip: float | None) -> Health:
        return Health(
            alive=round_trip is not None,
            detail=detail,
            round_trip=round_trip,
            host_pid=self._host.pid,
            children=dict(self._facts.get("children", {})),
            calls_running=len(self._outputs),
        )


def _end(portal: Portal, hosts: list[HostProcess], pid: int) -> None:
    """Stop the host, then the thread. In a forked child both are the parent's, and stay."""
    if pid != os.getpid():
        return
    with contextlib.suppress(Exception):
        if not portal.closed and not portal.owns_current_thread():
            portal.run(hosts[0].stop())
    hosts[0].kill()
    portal.close()


def _in_child() -> None:
    for engine in list(_engines):
        engine._host.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
