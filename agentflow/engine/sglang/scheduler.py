"""What the plugin adds to SGLang's scheduler: hints read on arrival, control requests, causes, effects, order.

Each function here wraps one method of SGLang; :func:`hooks` lists which. A failure in ours is counted and
logged, and SGLang's own method runs all the same.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from agentflow.cache.policy import HOLD, Effect, LoadAdapter, PoolState, WaitingCall, WarmUp
from agentflow.engine.sglang import adapters, anchors, control, hidden_states
from agentflow.engine.sglang.ballast import Ballast, set_aside
from agentflow.engine.sglang.correction import control as correction
from agentflow.engine.sglang.correction.namespace import broken_paths
from agentflow.engine.sglang.effects import carry_out
from agentflow.engine.sglang.radix_cache import AgentRadixCache
from agentflow.errors import UsageError
from agentflow.events import decode_batch

__all__ = ["hooks"]

logger = logging.getLogger("agentflow.engine")

#: Decisions sent in one reply.
REPLY_LIMIT = 2_000


def hooks() -> dict[str, Callable[..., Any]]:
    """AROUND hooks by the dotted path of what they wrap."""
    return {
        "sglang.srt.managers.scheduler.Scheduler._add_request_to_queue": add_request_to_queue,
        "sglang.srt.managers.scheduler.Scheduler._release_aborted_request": release_aborted_request,
        "sglang.srt.managers.schedule_batch.ScheduleBatch.retract_decode": retract_decode,
        "sglang.srt.managers.scheduler.Scheduler.handle_dumper_control": handle_control,
        "sglang.srt.managers.scheduler.Scheduler.get_next_batch_to_run": get_next_batch_to_run,
        "sglang.srt.managers.schedule_policy.SchedulePolicy.calc_priority": calc_priority,
        "sglang.srt.mem_cache.allocation.alloc_for_extend": alloc_for,
        "sglang.srt.mem_cache.allocation.alloc_for_decode": alloc_for,
        **hidden_states.hooks(),
        **anchors.hooks(),
    }


def add_request_to_queue(original: Callable[..., Any], scheduler: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    """Read the hints of a request when it arrives."""
    cache = scheduler.tree_cache
    if isinstance(cache, AgentRadixCache):
        if cache.decode is None and scheduler.tokenizer is not None:
            cache.decode = scheduler.tokenizer.decode
        _guarded(cache, "reading hints", lambda: cache.arrived(req))
        if req.lora_id is not None:
            manager = scheduler.tp_worker.model_runner.lora_manager
            _guarded(cache, "an adapter", lambda: adapters.arriving(manager, cache, req.lora_id))
    return original(scheduler, req, *args, **kwargs)


def release_aborted_request(original: Callable[..., Any], scheduler: Any, req: Any) -> Any:
    """A request that never ran is gone."""
    cache = scheduler.tree_cache
    if isinstance(cache, AgentRadixCache):
        _guarded(cache, "an abort", lambda: cache.left(req))
    return original(scheduler, req)


def retract_decode(original: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls that are given up for want of memory are gone; those that are preempted are not."""
    result = original(batch, *args, **kwargs)
    cache = batch.tree_cache
    if isinstance(cache, AgentRadixCache):
        for req in result[2]:
            _guarded(cache, "an abort", partial(cache.left, req))
    return result


def get_next_batch_to_run(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Between two steps: tell policies how the pool is, and carry out the effects that they want.

    Effects move KV, so they wait while a prefill is due: the transfer path is then its own. Calls that policies hold
    back are not due.
    """
    cache = scheduler.tree_cache
    if isinstance(cache, AgentRadixCache):
        _guarded(cache, "scoring again", partial(_score_again, cache))
        if cache.runtime.watches_pool:
            _guarded(cache, "telling the pool's state", lambda: cache.runtime.observe(_pool_state(scheduler, cache)))
        if cache.runtime.acts and scheduler.chunked_req is None and cache.resting.issuperset(scheduler.waiting_queue):
            _guarded(cache, "effects", lambda: carry_out(cache, cache.runtime.act(), _others(scheduler, cache)))
        held = cache.held = []
        try:
            return original(scheduler, *args, **kwargs)
        finally:
            cache.held = []
            cache.resting = frozenset(held)
            scheduler.waiting_queue[:0] = held  # they came before what waits now
    return original(scheduler, *args, **kwargs)


def _others(scheduler: Any, cache: AgentRadixCache) -> dict[type[Effect], Callable[[Any], bool]]:
    """How effects are carried out that need more than the cache."""
    return {
        WarmUp: lambda effect: anchors.warm_up(scheduler, cache, effect),
        LoadAdapter: lambda effect: adapters.load(scheduler, cache, effect),
    }


def calc_priority(original: Callable[..., Any], policy: Any, waiting_queue: list[Any], *args: Any, **kw: Any) -> Any:
    """Order the waiting queue by the policies' scores, SGLang's own order breaking ties."""
    result = original(policy, waiting_queue, *args, **kw)
    cache = policy.tree_cache
    if isinstance(cache, AgentRadixCache) and cache.runtime.ranks_calls and waiting_queue:
        running = args[0] if args else kw.get("running_batch")
        busy = running is not None and not running.is_empty()
        _guarded(cache, "ordering the queue", lambda: _order(cache, waiting_queue, busy))
    return result


def alloc_for(original: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Name the request for which room is made: the first of the batch."""
    core = getattr(batch.tree_cache, "tree_core", None)
    if core is None or not isinstance(batch.tree_cache, AgentRadixCache):
        return original(batch, *args, **kwargs)
    core.cause = batch.reqs[0].rid if batch.reqs else None
    try:
        return original(batch, *args, **kwargs)
    finally:
        core.cause = None


def handle_control(original: Callable[..., Any], scheduler: Any, recv_req: Any) -> Any:
    """Answer our control requests; leave SGLang's own to it."""
    if not recv_req.method.startswith(control.PREFIX):
        return original(scheduler, recv_req)
    from sglang.srt.managers.io_struct import DumperControlReqOutput

    try:
        reply = answer(scheduler, recv_req.method.removeprefix(control.PREFIX), recv_req.body)
        output = DumperControlReqOutput(success=True, response=[reply])
    except Exception as error:
        if not isinstance(error, UsageError):
            logger.exception("control request %s failed", recv_req.method)
        output = DumperControlReqOutput(success=False, response=[], error=str(error) or type(error).__name__)
    scheduler.ipc_channels.send_to_tokenizer.send_output(output, recv_req)
    return None


def answer(scheduler: Any, method: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """The reply of this scheduler to one control request."""
    cache = scheduler.tree_cache
    if not isinstance(cache, AgentRadixCache):
        raise UsageError("this engine runs SGLang's own cache; start it with radix_cache_backend=agentflow")
    if method == "events":
        began = time.thread_time_ns()
        cache.observe(*decode_batch(body.get("batch")), began=began)
        return {}
    if method == "stats":
        return _stats(scheduler, cache)
    if method == "decisions":
        found = cache.runtime.log.since(int(body.get("since", 0)))
        return {"decisions": [d.to_json() for d in found[:REPLY_LIMIT]]}
    if method == "configure":
        return _configure(scheduler, cache, body)
    if method == "hidden":
        return hidden_states.answer(body)
    if method == "check":
        return _check(scheduler, cache)
    if method == "flush":
        return _flush(scheduler)
    raise UsageError(f"unknown control method {method!r}; known: {', '.join(sorted(control.METHODS))}")


def _configure(scheduler: Any, cache: AgentRadixCache, body: Mapping[str, Any]) -> dict[str, Any]:
    corrected = correction.wanted(cache, body)
    policies = body.get("policies")
    if policies is not None and not (isinstance(policies, list) and all(isinstance(p, str | dict) for p in policies)):
        raise UsageError("policies must be a list of names, or of objects with a name and options")
    names = cache.runtime.specs if policies is None else policies
    if body.get("reset", True):
        # Anything that could fail comes first, so that a refused change leaves all as it was.
        from agentflow.runtime import Runtime

        Runtime(names)
        ballast = Ballast(*(_ballast(body, key, total) for key, total in _totals(scheduler, cache).items()))
        if not scheduler.flush_cache():
            raise UsageError("the engine is busy: policies can be changed with reset only while no call runs")
        cache.configure(names, audit=bool(body.get("audit", False)))
        set_aside(cache, ballast)
        cache.ballast = ballast
        _limit_requests(scheduler, cache)
    else:
        cache.runtime.set_policies(names)
        cache.tree_core.reorder()
        cache.tree_core.audit = bool(body.get("audit", cache.tree_core.audit))
    correction.use(cache, corrected, body)
    return {"policy": cache.runtime.name}


def _limit_requests(scheduler: Any, cache: AgentRadixCache) -> None:
    """Have SGLang cut or refuse requests that the pool has no room for: one would wait for ever, and all behind it."""
    if cache.request_limits is None:
        cache.request_limits = (scheduler.max_req_len, scheduler.max_req_input_len)
    longest, longest_input = cache.request_limits
    scheduler.max_req_len = min(longest, scheduler.max_total_num_tokens - cache.ballast.device - 1)
    scheduler.max_req_input_len = max(1, longest_input - (longest - scheduler.max_req_len))


def _flush(scheduler: Any) -> dict[str, Any]:
    if not scheduler.flush_cache():
        raise UsageError("the engine is busy: its cache can be emptied only while no call runs")
    return {}


def _totals(scheduler: Any, cache: AgentRadixCache) -> dict[str, int]:
    host = getattr(cache.cache_controller, "mem_pool_host", None)
    return {"device_tokens": scheduler.max_total_num_tokens, "host_tokens": host.size if host is not None else 0}


def _ballast(body: Mapping[str, Any], key: str, total: int) -> int:
    """What to set aside so that a pool of ``total`` tokens has as many as the request wants."""
    wanted = body.get(key)
    if wanted is None:
        return 0
    if not isinstance(wanted, int) or isinstance(wanted, bool) or not 0 < wanted <= total:
        raise UsageError(f"{key} must be an integer from 1 to {total}, got {wanted!r}")
    return total - wanted


def _score_again(cache: AgentRadixCache) -> None:
    for workflow in cache.runtime.rescored():
        cache.tree_core.heard_of(workflow)


def _pool_state(scheduler: Any, cache: AgentRadixCache) -> PoolState:
    host = getattr(cache.cache_controller, "mem_pool_host", None)
    free = scheduler.token_to_kv_pool_allocator.available_size()
    total = scheduler.max_total_num_tokens - cache.ballast.device
    return PoolState(
        total=total,
        free=free,
        held=total - free - cache.evictable_size(),
        running=len(scheduler.running_batch.reqs) if scheduler.running_batch else 0,
        waiting=len(scheduler.waiting_queue),
        host_total=host.size - cache.ballast.host if host is not None else 0,
        host_free=host.available_size() if host is not None else 0,
    )


def _stats(scheduler: Any, cache: AgentRadixCache) -> dict[str, Any]:
    running, paused = cache.runtime.ledger.counts()
    host = getattr(cache.cache_controller, "mem_pool_host", None)
    aside = cache.ballast
    return {
        "policy": cache.runtime.name,
        "running": len(scheduler.running_batch.reqs) if scheduler.running_batch else 0,
        "waiting": len(scheduler.waiting_queue),
        "device_total": scheduler.max_total_num_tokens - aside.device,
        "device_free": scheduler.token_to_kv_pool_allocator.available_size(),
        "device_cached": cache.evictable_size(),
        "device_held": cache.protected_size() - aside.device,
        "host_total": host.size - aside.host if host is not None else 0,
        "host_free": host.available_size() if host is not None else 0,
        "workflows_live": running,
        "workflows_paused": paused,
        "counters": dict(cache.runtime.counters),
        "details": {
            "nodes": len(cache.tree_core._node_arena),
            "ghosts": len(cache.tree_core.ghosts),
            "workflows_known": len(cache.runtime.ledger.workflows),
            "decisions_logged": cache.runtime.log.last_seq,
            "policies": {p.name: dict(p.stats()) for p in cache.runtime.policies},
            "correction": correction.stats(cache),
        },
    }


def _check(scheduler: Any, cache: AgentRadixCache) -> dict[str, Any]:
    """Integrity while idle: every slot is free or cached, nothing is locked, the tree is sound."""
    problems: list[str] = []
    if not scheduler.is_fully_idle():
        return {"idle": False, "problems": problems}
    free = scheduler.token_to_kv_pool_allocator.available_size()
    cached, held = cache.evictable_size(), cache.protected_size() - cache.ballast.device
    total = scheduler.max_total_num_tokens - cache.ballast.device
    if free + cached + held != total:
        problems.append(f"free {free} + cached {cached} + held {held} is not {total}")
    if held and not cache.ongoing_load_back and not cache.ongoing_write_through:
        problems.append(f"{held} tokens are locked although nothing runs")
    try:
        cache.sanity_check()
    except Exception as error:
        problems.append(f"tree: {error}")
    for node in cache.tree_core._node_arena.values():
        if node is cache.tree_core.root_node:
            continue
        if cache.tree_core.record(node).tokens != len(node.key):
            problems.append(
                f"node {node.id}: record says {cache.tree_core.record(node).tokens} of {len(node.key)} tokens"
            )
    problems += broken_paths(cache.tree_core._node_arena.values(), cache.tree_core.root_node)
    return {"idle": True, "problems": problems[:20]}


def _order(cache: AgentRadixCache, waiting_queue: list[Any], busy: bool) -> None:
    """Order the queue, and take out for this step what is not to run now, unless nothing else would run."""
    ranked = []
    for place, req in enumerate(waiting_queue):
        state = getattr(req, "agentflow", None)
        if state is None:
            return  # a request that we know nothing of: leave SGLang's order alone
        call = WaitingCall(
            request=req.rid,
            call=state.call,
            tokens=len(req.origin_input_ids),
            cached_tokens=req.num_matched_prefix_tokens,
            arrived=state.arrived,
            preempted=req.is_retracted,
            anchor=(getattr(req, "agentflow_anchor", None) or (0,))[0],
        )
        ranked.append(((*cache.runtime.score_call(call), float(place)), req))
    ranked.sort(key=lambda pair: pair[0])
    held = [req for score, req in ranked if HOLD in score]
    if held and len(held) == len(ranked) and not busy:
        del held[0]
    cache.held += held
    cache.runtime.counters["calls_held"] += len(held)
    kept = set(map(id, held))
    waiting_queue[:] = [req for _, req in ranked if id(req) not in kept]


def _guarded(cache: AgentRadixCache, what: str, work: Callable[[], None]) -> None:
    try:
        work()
    except Exception:
        cache.runtime.counters["internal_errors"] += 1
        if cache.runtime.counters["internal_errors"] <= 3:
            logger.exception("%s failed; requests are not affected", what)
