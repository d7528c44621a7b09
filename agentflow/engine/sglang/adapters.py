"""LoRA adapters put into device memory ahead, by SGLang's own adapter pool."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agentflow.cache.policy import LoadAdapter

if TYPE_CHECKING:
    from agentflow.engine.sglang.radix_cache import AgentRadixCache

__all__ = ["arriving", "load", "resident"]


def load(scheduler: Any, cache: AgentRadixCache, effect: LoadAdapter) -> bool:
    """Load an adapter that SGLang knows into a slot of its pool, if one can be had without those in use.

    Those loaded ahead of which the call has not come yet give way to it only when there is no other slot, oldest first.
    """
    manager = getattr(scheduler.tp_worker.model_runner, "lora_manager", None)
    if manager is None or effect.adapter not in manager.loras or effect.adapter in resident(manager):
        return False
    running = _running(scheduler)
    ahead = cache.preloaded
    for gone in [a for a in ahead if a not in resident(manager)]:
        del ahead[gone]
    while ahead and not manager.validate_lora_batch(running | ahead.keys() | {effect.adapter}):
        del ahead[next(iter(ahead))]
        cache.runtime.counters["adapters_preloaded_given_up"] += 1
    if not manager.validate_lora_batch(running | {effect.adapter}):
        return False
    manager.fetch_new_loras({effect.adapter}, running | ahead.keys())
    ref = manager.lora_refs.get(effect.adapter)
    cache.runtime.log.add(
        "adapter",
        time=cache.clock(),
        policy=cache.runtime.name,
        reason=f"adapter {getattr(ref, 'lora_name', None) or effect.adapter} loaded ahead: {effect.reason}",
        terms={"value": effect.value},
    )
    cache.runtime.counters["adapters_preloaded"] += 1
    ahead[effect.adapter] = None
    return True


def resident(manager: Any) -> set[str | None]:
    """Ids of the adapters in the pool now; None stands for the model without one."""
    return set(manager.memory_pool.uid_to_buffer_id)


def arriving(manager: Any, cache: AgentRadixCache, adapter: str) -> None:
    """Count whether a call finds its adapter in the pool, and whether that is because it was loaded ahead."""
    counters = cache.runtime.counters
    if adapter in resident(manager):
        counters["adapter_hits"] += 1
        if adapter in cache.preloaded:
            counters["adapters_preloaded_used"] += 1
    else:
        counters["adapter_misses"] += 1
    cache.preloaded.pop(adapter, None)


def _running(scheduler: Any) -> set[str | None]:
    """Adapters of the requests that run or are about to."""
    found: set[str | None] = set()
    for batch in (scheduler.running_batch, scheduler.last_batch):
        if batch is not None:
            found.update(r.lora_id for r in batch.reqs if not r.finished())
    return found
