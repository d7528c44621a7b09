"""SGLang's unified radix cache on our tree core: chosen with ``radix_cache_backend="agentflow"``."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from sglang.srt.mem_cache.registry import create_unified_radix_cache
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.tree_core_registry import register_tree_core_backend
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from agentflow.cache.decision import Decision
from agentflow.cache.ledger import CallRef
from agentflow.cache.policy import CallArrived, CallFinished, PolicySpec
from agentflow.cache.ttl.recognise import recognise_tool
from agentflow.engine.base import Coordinates
from agentflow.engine.sglang import wire
from agentflow.engine.sglang.anchors import Anchors, computed, is_internal
from agentflow.engine.sglang.ballast import Ballast
from agentflow.engine.sglang.clock import StreamClock
from agentflow.engine.sglang.eviction import AgentFullComponent
from agentflow.engine.sglang.loads import LoadTimes
from agentflow.engine.sglang.tree_core import AgentTreeCore
from agentflow.events import Event
from agentflow.runtime import Runtime

__all__ = ["AgentRadixCache", "BACKEND", "POLICIES_VARIABLE", "create"]

logger = logging.getLogger("agentflow.engine")

BACKEND = "agentflow"
#: Environment variable with the policies to start with: names separated by commas, or a JSON list.
POLICIES_VARIABLE = "AGENTFLOW_POLICIES"
#: Decisions that ride back with one request.
DECISIONS_PER_REQUEST = 64


class AgentRadixCache(UnifiedRadixCache):  # type: ignore[misc]
    """The cache of one scheduler, and the place where its runtime layer lives."""

    runtime: Runtime
    tree_core: AgentTreeCore
    #: Text of token ids, for callers that send no events and whose tools are read from their answers.
    decode: Callable[[Sequence[int]], str] | None = None
    #: The load that prefetches started last, -1 when none is under way.
    _prefetching = -1
    #: Adapters loaded ahead of which no call has come yet, oldest first.
    preloaded: dict[str, None]
    #: Requests held back in the present step; they are in the queue again after it.
    held: list[Any]
    #: Requests that were held back in the last step.
    resting: frozenset[Any]
    #: SGLang's own limits of a request's tokens, once ours took their place.
    request_limits: tuple[int, int] | None
    #: The anchors seen, so that they can be computed ahead.
    anchors: Anchors
    #: Set aside while comparing pool sizes; emptying the cache gives it back.
    ballast = Ballast()

    def __init__(self, params: Any, *, policies: Sequence[PolicySpec], shared_time: bool) -> None:
        self.clock: Callable[[], float] = StreamClock() if shared_time else time.time
        self.runtime = Runtime(policies, clock=self.clock)
        #: How long loads from the host take.
        self.load_times = LoadTimes()
        self.anchors = Anchors()
        self.held = []
        self.resting = frozenset()
        self.request_limits = None
        self.preloaded = {}
        register = partial(AgentTreeCore, runtime=self.runtime)
        backend = f"{BACKEND}-{id(self)}"
        register_tree_core_backend(backend, register)
        params.tree_core_backend = backend
        params.component_registry_override = {ComponentType.FULL: AgentFullComponent}
        super().__init__(params)

    def configure(self, policies: Sequence[PolicySpec], *, audit: bool = False) -> None:
        """Run with other policies from now on, with an empty ledger; the cache should be empty too."""
        self.runtime = Runtime(policies, clock=self.clock)
        self.tree_core.use(self.runtime)
        self.tree_core.audit = audit

    def reset(self) -> None:
        self.ballast = Ballast()
        self._prefetching = -1
        self.anchors.out.clear()
        super().reset()

    # -- what the scheduler tells ----------------------------------------------------------------------

    def observe(self, events: Sequence[Event], refused: int, *, began: int | None = None) -> None:
        """Take in events from the framework; ``refused`` entries could not be read.

        ``events_ns`` counts the scheduler thread's processor time for it, reading them included where ``began`` says
        when that began.
        """
        runtime = self.runtime
        started = time.thread_time_ns() if began is None else began
        if isinstance(self.clock, StreamClock):
            self.clock.advance(max((e.time for e in events), default=0.0))
        for event in events:
            runtime.observe(event)
        for workflow in {e.workflow for e in events}:
            self.tree_core.heard_of(workflow)
        if refused:
            runtime.counters["events_refused"] += refused
        runtime.counters["events_ns"] += time.thread_time_ns() - started

    def arrived(self, req: Any) -> None:
        """A request joins the waiting queue: read its hints. Reads each request once."""
        if getattr(req, "agentflow", None) is not None:
            return
        if is_internal(req):
            req.agentflow = AgentRequest(CallRef(None), self.runtime.log.last_seq, self.clock())
            req.agentflow.left = True  # policies hear of what they asked for by what it does
            return
        began = time.thread_time_ns()
        actions = [(a.action_type, a.payload) for a in req.kv_hints.actions] if req.kv_hints else []
        hint, events, refused = wire.read_hints(actions, prompt_tokens=len(req.origin_input_ids))
        if isinstance(self.clock, StreamClock) and hint is not None:
            self.clock.advance(hint.time)
        if events or refused:
            self.observe(events, refused, began=began)
        at = hint.at if hint is not None else Coordinates()
        call = self.runtime.call(
            at.workflow, at.agent, at.branch, req.rid, priority=req.priority or 0, tenant=at.tenant
        )
        req.agentflow = AgentRequest(call, self.runtime.log.last_seq, self.clock(), hint)
        if self.runtime.watches_nodes:
            tokens = hint.anchor if hint is not None else 0
            anchor = self.anchors.seen(req, tokens) if tokens else 0
            self.runtime.observe(CallArrived(req.rid, call, len(req.origin_input_ids), anchor, tokens, req.lora_id))
        if at.workflow is not None:
            self.tree_core.heard_of(at.workflow)

    def start_prefetches(self) -> None:
        """Start the loads that were queued for prefetching."""
        self._prefetching = self._start_loads()

    def ready_to_load_host_cache(self) -> int:
        """What the next prefill must wait for, layer by layer: its own loads, else a prefetch under way.

        Loads run in order, so whoever waits for a later one has waited for the prefetch too.
        """
        index = self._start_loads()
        if index >= 0 or self._prefetching < 0:
            return int(index)
        if self.is_load_back_event_done(self._prefetching):
            self._prefetching = -1
        return self._prefetching

    def _start_loads(self) -> int:
        """Start what is queued; -1 when nothing is."""
        began = time.perf_counter()
        index = int(super().ready_to_load_host_cache())
        if index >= 0 and self.cache_controller is not None and self.cache_controller.ack_load_queue:
            self.load_times.started(self.cache_controller.ack_load_queue[-1], time.perf_counter() - began)
        return index

    def loading_check(self, *args: Any, **kwargs: Any) -> None:
        """Take note of the loads that are done."""
        pending = list(self.cache_controller.ack_load_queue) if self.cache_controller is not None else []
        super().loading_check(*args, **kwargs)
        if pending:
            for ack in pending[: len(pending) - len(self.cache_controller.ack_load_queue)]:
                self.load_times.done(ack)

    def init_load_back(self, params: Any) -> Any:
        self.tree_core.cause = params.req.rid if params.req is not None else None
        try:
            return super().init_load_back(params)
        finally:
            self.tree_core.cause = None

    # -- what the cache does ---------------------------------------------------------------------------

    def checkpoint_into_tree(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        super().checkpoint_into_tree(req, up_to=up_to, **kwargs)
        state: AgentRequest | None = getattr(req, "agentflow", None)
        if state is None or self.disable:
            return
        try:
            if is_internal(req):
                computed(self, req)
                return
            if req.last_node is not None:
                self.tree_core.touch_path(req.last_node, state.call)
                self.anchors.mark(self.tree_core, req)
            if req.finished():
                self.left(req)
                self._reply(req, state)
        except Exception:  # bookkeeping must not fail a request
            self.runtime.counters["internal_errors"] += 1
            logger.exception("bookkeeping of request %s failed; the request is not affected", req.rid)

    def left(self, req: Any) -> None:
        """A request leaves the scheduler, done or aborted, from the queue or while it ran. Tells policies once."""
        state: AgentRequest | None = getattr(req, "agentflow", None)
        if state is None or state.left:
            return
        state.left = True
        if self.runtime.watches_nodes:
            self.runtime.observe(self._outcome(req, state))
        if state.call.thread is not None:
            self.tree_core.heard_of(state.call.thread.workflow.id)

    def _outcome(self, req: Any, state: AgentRequest) -> CallFinished:
        times = req.time_stats
        began, prefilled = times.forward_entry_time, times.prefill_finished_time
        timed = not isinstance(self.clock, StreamClock)  # ranks must agree, and their clocks do not
        host_tokens = req.cached_tokens_host
        thread = state.call.thread
        recognised = None
        if thread is None or not thread.workflow.sends_events:
            recognised = recognise_tool(self.decode(req.output_ids)) if self.decode is not None else None
        return CallFinished(
            req.rid,
            state.call,
            len(req.origin_input_ids),
            req.cached_tokens,
            len(req.output_ids),
            host_tokens=host_tokens,
            queue_seconds=_waited(req) if timed else 0.0,
            prefill_seconds=max(0.0, prefilled - began) if timed and began and prefilled else 0.0,
            reload_seconds=self.load_times.seconds(host_tokens) if timed else 0.0,
            tool=recognised.tool if recognised else None,
            variant=recognised.variant if recognised else None,
        )

    def _reply(self, req: Any, state: AgentRequest) -> None:
        mine = [d for d in self.runtime.log.since(state.first_seq) if d.request == req.rid]
        tokens = len(req.output_ids)
        if tokens:
            # One entry per output token is what SGLang carries; ours rides on the last.
            info: dict[str, list[Any]] = req.customized_info or {}
            others = [d for d in mine if d.kind != "correct"]
            times = {"queue_seconds": _waited(req), "first_seconds": _first_token(req)}
            said = wire.reply([*state.corrected, *others[-DECISIONS_PER_REQUEST:]], **times)
            info[wire.META_KEY] = [None] * (tokens - 1) + [said]
            req.customized_info = info


class AgentRequest:
    """What is kept on a request of SGLang: its call, the last decision before it came, and when it came."""

    __slots__ = ("arrived", "call", "corrected", "correction", "first_seq", "hint", "left")

    def __init__(self, call: CallRef, first_seq: int, arrived: float, hint: wire.CallHint | None = None) -> None:
        self.call = call
        self.hint = hint
        #: What of its prompt may be another agent's KV; None for an exact call.
        self.correction: Any = None
        #: The decisions that say so.
        self.corrected: list[Decision] = []
        self.first_seq = first_seq
        self.arrived = arrived
        self.left = False


def _first_token(req: Any) -> float:
    """Seconds from the request's arrival in the queue until its prompt was computed; 0.0 where not known."""
    times = req.time_stats
    if not times.prefill_finished_time or not times.wait_queue_entry_time:
        return 0.0
    return max(0.0, float(times.prefill_finished_time - times.wait_queue_entry_time))


def _waited(req: Any) -> float:
    """Seconds from the request's arrival in the queue until it first ran; 0.0 when it never did."""
    times = req.time_stats
    if not times.forward_entry_time or not times.wait_queue_entry_time:
        return 0.0
    return max(0.0, float(times.forward_entry_time - times.wait_queue_entry_time))


def create(ctx: Any, made: type[AgentRadixCache] = AgentRadixCache) -> Any:
    """What SGLang's registry calls, with our class. HiCache, if enabled, is attached by SGLang as usual."""
    raw = os.environ.get(POLICIES_VARIABLE, "lifecycle").strip()
    specs = json.loads(raw) if raw.startswith("[") else [n.strip() for n in raw.split(",") if n.strip()]
    cache_class: Any = partial(made, policies=specs, shared_time=ctx.tp_size > 1)
    return create_unified_radix_cache(ctx, cache_class=cache_class)
