"""Reading and writing KV in SGLang's pool, and why a scheduler's KV cannot be corrected."""

from __future__ import annotations

from typing import Any

from agentflow.cache.kvcmas import SegmentKV
from agentflow.engine.sglang.correction.rows import BACKENDS

__all__ = ["KVPool", "obstacle"]


class KVPool:
    """The keys and values of a scheduler, by slot. Shapes are those of :class:`~agentflow.cache.kvcmas.SegmentKV`."""

    def __init__(self, scheduler: Any) -> None:
        self._pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
        self._wait_for = getattr(scheduler, "forward_stream", None)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values, all layers."""
        keys, values = self._pool.k_buffer, self._pool.v_buffer
        return sum(b[0].numel() * b.element_size() for b in (*keys, *values))

    def read(self, slots: Any, start: int) -> SegmentKV:
        """A copy on the host of the KV in ``slots`` (tokens,), which stands at positions from ``start``."""
        import torch

        self._settle()
        both = []
        for buffers in (self._pool.k_buffer, self._pool.v_buffer):
            out = torch.empty((len(buffers), slots.shape[0], *buffers[0].shape[1:]), dtype=buffers[0].dtype)
            for layer, buffer in enumerate(buffers):
                if buffer.device.type == "cpu":
                    torch.index_select(buffer, 0, slots, out=out[layer])
                else:
                    out[layer] = buffer[slots]
            both.append(out)
        return SegmentKV(both[0], both[1], start)

    def write(self, slots: Any, kv: SegmentKV) -> None:
        """Put ``kv`` into ``slots``, one per token."""
        for buffers, tensors in ((self._pool.k_buffer, kv.keys), (self._pool.v_buffer, kv.values)):
            for layer, buffer in enumerate(buffers):
                buffer.index_copy_(0, slots, tensors[layer].to(buffer.device, buffer.dtype, non_blocking=True))

    def near(self, kv: SegmentKV) -> SegmentKV:
        """The KV on the pool's device, where estimating is fastest."""
        device = self._pool.k_buffer[0].device
        return SegmentKV(kv.keys.to(device), kv.values.to(device), kv.start)

    def _settle(self) -> None:
        """What runs on the accelerator may still be writing: wait for it."""
        if self._pool.k_buffer[0].is_cuda and self._wait_for is not None:
            import torch

            torch.cuda.current_stream().wait_stream(self._wait_for)


def obstacle(scheduler: Any) -> str | None:
    """Why this scheduler cannot use corrected KV, in a few words; None when it can."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    from agentflow.cache.kvcmas.rope import unsupported

    args = scheduler.server_args
    for wrong, reason in (
        (args.tp_size > 1, "tensor parallelism"),
        (getattr(args, "pp_size", 1) > 1, "pipeline parallelism"),
        (getattr(args, "enable_dp_attention", False), "data-parallel attention"),
        (scheduler.page_size > 1, "pages of more than one token"),
        (getattr(args, "hicache_storage_backend", None) is not None, "a storage tier below the host"),
        (getattr(args, "speculative_algorithm", None) is not None, "speculative decoding"),
        (getattr(args, "disaggregation_mode", "null") != "null", "separate prefill and decode engines"),
        (getattr(args, "enable_mixed_chunk", False), "prefill mixed with decoding"),
    ):
        if wrong:
            return reason
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    if type(pool) is not MHATokenToKVPool or pool.store_dtype != pool.dtype:
        return f"the KV pool {type(pool).__name__} in {getattr(pool, 'store_dtype', 'an unknown type')}"
    backend = scheduler.tp_worker.model_runner.prefill_attention_backend_str
    if backend not in BACKENDS:
        return f"the attention backend {backend}"
    return unsupported(scheduler.model_config.hf_config, kv_dtype=str(pool.dtype))
