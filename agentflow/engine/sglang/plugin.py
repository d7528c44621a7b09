"""What SGLang calls in each of its processes, through the entry point ``sglang.srt.plugins``."""

from __future__ import annotations

import multiprocessing
import sys

__all__ = ["register"]


def register() -> None:
    """Install what this process needs of the plugin.

    The radix cache registers in every process, since each validates the server arguments. The scheduler's
    hooks go where the scheduler's module is loaded, the HTTP routes only into a server's main process.
    """
    from sglang.srt.mem_cache.registry import register_radix_cache_backend, registered_radix_cache_backends
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from agentflow.engine.sglang import hicache_cpu, seeds

    hicache_cpu.install()
    seeds.install()
    if "agentflow" not in registered_radix_cache_backends():
        register_radix_cache_backend("agentflow", _create_cache)
    if multiprocessing.parent_process() is not None and "sglang.srt.managers.scheduler" in sys.modules:
        from agentflow.engine.sglang import lora_cpu, scheduler
        from agentflow.engine.sglang.correction import hooks as correction

        lora_cpu.install()
        for found in (scheduler.hooks(), correction.hooks()):
            for target, hook in found.items():
                HookRegistry.register(target, hook, HookType.AROUND)
    if multiprocessing.parent_process() is None and "agentflow.engine.sglang.launch" not in sys.modules:
        from agentflow.engine.sglang import http

        for target, hook in http.hooks().items():
            HookRegistry.register(target, hook, HookType.AROUND)


def _create_cache(ctx: object) -> object:
    from agentflow.engine.sglang.correction.cache import CorrectingRadixCache
    from agentflow.engine.sglang.radix_cache import create

    return create(ctx, CorrectingRadixCache)
