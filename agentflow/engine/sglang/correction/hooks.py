"""Where correction enters SGLang's scheduler. A failure of ours is counted and logged; SGLang goes on all the same."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from agentflow.engine.sglang import cpu_attention
from agentflow.engine.sglang.correction import checks, rows
from agentflow.engine.sglang.correction.cache import CorrectingRadixCache

__all__ = ["hooks"]

logger = logging.getLogger("agentflow.engine")

#: Seconds without a call before work that was put off begins: an agent that reads the last answer asks soon.
_GRACE = 0.25
#: Seconds after which an engine that is never idle does a piece of it between two steps.
_PATIENCE = 5.0
#: Seconds of an engine that never sleeps which one idle round may take.
_SLICE = 0.005


def hooks() -> dict[str, Callable[..., Any]]:
    """AROUND hooks by the dotted path of what they wrap."""
    return {
        "sglang.srt.managers.scheduler.Scheduler.run_event_loop": run_event_loop,
        "sglang.srt.managers.schedule_batch.ScheduleBatch.prepare_for_extend": prepare_for_extend,
        "sglang.srt.managers.scheduler.Scheduler.get_next_batch_to_run": get_next_batch_to_run,
        "sglang.srt.managers.scheduler.Scheduler.on_idle": on_idle,
        **rows.hooks(),
        **checks.hooks(),
        **cpu_attention.hooks(),
    }


def run_event_loop(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """The scheduler is complete: look at what it has."""
    cache = scheduler.tree_cache
    if isinstance(cache, CorrectingRadixCache):
        _guarded(cache, lambda: cache.corrections.start(scheduler))
    return original(scheduler, *args, **kwargs)


def prepare_for_extend(original: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
    """The batch's slots are allocated: fill those that need no computing."""
    result = original(batch, *args, **kwargs)
    cache = batch.tree_cache
    if isinstance(cache, CorrectingRadixCache):
        _guarded(cache, lambda: cache.corrections.prepare(batch))
    return result


def get_next_batch_to_run(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Keep what was computed before anything can displace it."""
    cache = scheduler.tree_cache
    if isinstance(cache, CorrectingRadixCache):
        corrections = cache.corrections
        _guarded(cache, corrections.capture)
        if corrections.waits(_PATIENCE) and not scheduler.waiting_queue and scheduler.chunked_req is None:
            _guarded(cache, lambda: corrections.work(lambda: True))
    return original(scheduler, *args, **kwargs)


def on_idle(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Do what was put off, until a message comes."""
    cache = scheduler.tree_cache
    if isinstance(cache, CorrectingRadixCache) and cache.corrections.something_to_do and scheduler.is_fully_idle():
        poller = getattr(getattr(scheduler, "idle_sleeper", None), "poller", None)
        if _quiet(poller):
            news = _until_news(poller)
            _guarded(cache, lambda: cache.corrections.work(news))
            if not news():
                _guarded(cache, lambda: cache.corrections.checks.next(scheduler))
            if scheduler.waiting_queue:
                return None  # a check is to run: no sleep before it
    return original(scheduler, *args, **kwargs)


def _quiet(poller: Any) -> bool:
    """Whether no call has run for a while; waits for that, as far as nothing comes."""
    left = checks.last_run() + _GRACE - time.monotonic()
    if left <= 0:
        return True
    return poller is not None and not poller.poll(round(1000 * left) + 1)


def _until_news(poller: Any) -> Callable[[], bool]:
    if poller is not None:
        return lambda: bool(poller.poll(0))
    end = time.perf_counter() + _SLICE
    return lambda: time.perf_counter() > end


def _guarded(cache: CorrectingRadixCache, work: Callable[[], Any]) -> None:
    try:
        work()
    except Exception:
        cache.runtime.counters["internal_errors"] += 1
        if cache.runtime.counters["internal_errors"] <= 3:
            logger.exception("correction failed; requests are not affected")
