"""What a simulated engine is made of, and how its load arrives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from agentflow.errors import UsageError

__all__ = ["Arrivals", "EngineSpec"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """One engine. Token counts are of KV slots; the rest are SGLang 0.5.23's settings and their defaults.

    ``host_tokens`` is 0 without a host tier. ``max_running`` bounds the requests that run at once.
    ``chunked_prefill`` is the largest prefill of one pass (SGLang takes 4,096 to 16,384 by the device's memory, 4,096
    on a CPU; None does not cut). ``write_through_threshold`` is the hit count at which a node is copied to the host:
    1 under ``write_through``, 2 under ``write_through_selective``. ``ignore_eos`` says that requests are known to run
    to their limit, as forced replay does: admission then reserves their whole answer. ``max_new_tokens`` is the
    limit that requests ask for; None is the recorded length of the answer.

    ``act_steps`` is how many decode steps may pass between two turns of a policy that asks for effects (1 is
    SGLang's pace), ``poll_seconds`` how often such a policy is asked while the engine is idle.
    """

    pool_tokens: int
    host_tokens: int = 0
    max_running: int = 2_048
    chunked_prefill: int | None = 8_192
    max_prefill_tokens: int = 16_384
    write_through_threshold: int = 1
    load_back_threshold: int = 10
    new_token_ratio: float = 0.7
    min_new_token_ratio: float = 0.098
    ratio_decay_steps: int = 600
    retract_steps: int = 20
    clip_new_tokens: int = 4_096
    refresh_waiting_every: int = 32
    refresh_waiting_most: int = 128
    ignore_eos: bool = True
    max_new_tokens: int | None = None
    act_steps: int = 16
    poll_seconds: float = 0.05

    def __post_init__(self) -> None:
        if self.pool_tokens < 16:
            raise UsageError(f"a pool of {self.pool_tokens} tokens holds no request; give at least 16")
        if self.host_tokens < 0 or self.max_running < 1 or self.act_steps < 1:
            raise UsageError("host_tokens must not be negative, max_running and act_steps must be at least 1")
        if self.chunked_prefill is not None and self.chunked_prefill < 1:
            raise UsageError("chunked_prefill must be at least 1, or None")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """When workflows begin.

    ``trace``: at the recorded times, divided by ``speed``. ``poisson``: ``rate`` workflows a second, in the trace's
    order, drawn from the simulation's seed. ``closed``: ``concurrency`` workflows at once; the next begins as soon as
    one ends. Delays and tools inside a workflow are divided by ``tool_speed``.
    """

    kind: Literal["trace", "poisson", "closed"] = "trace"
    speed: float = 1.0
    rate: float = 1.0
    concurrency: int = 1
    tool_speed: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in ("trace", "poisson", "closed"):
            raise UsageError(f"arrivals are trace, poisson or closed, not {self.kind!r}")
        if min(self.speed, self.rate, self.tool_speed) <= 0 or self.concurrency < 1:
            raise UsageError("speed, rate and tool_speed must be positive, concurrency at least 1")
