"""What a simulation measured."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["CallResult", "SimResult", "WorkflowResult", "percentile"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallResult:
    """One call. Times are seconds since the simulation began; ``outcome`` is ``done``, ``rejected`` (empty, or
    longer than the pool) or ``aborted`` (out of memory in decode)."""

    workflow: str
    call: str
    agent: str
    engine: int
    outcome: str
    arrived: float
    admitted: float
    first_token: float
    finished: float
    prompt_tokens: int
    cached_device: int
    cached_host: int
    output_tokens: int
    retracted: int = 0

    @property
    def ttft(self) -> float:
        """Seconds from arrival to the first token."""
        return self.first_token - self.arrived

    @property
    def e2e(self) -> float:
        """Seconds from arrival to the last token."""
        return self.finished - self.arrived

    @property
    def queued(self) -> float:
        """Seconds from arrival to the first pass that works on it."""
        return self.admitted - self.arrived


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowResult:
    """One workflow, from its arrival to the end of its last call, tools included."""

    workflow: str
    engine: int
    started: float
    finished: float
    calls: int

    @property
    def seconds(self) -> float:
        """Completion time."""
        return self.finished - self.started


@dataclass(frozen=True, slots=True, kw_only=True)
class SimResult:
    """A finished simulation. ``counters`` are the runtime layers' (evictions, regret, prefetches, by kind and in
    tokens) summed over engines; ``timeline`` is empty unless it was asked for."""

    policy: str
    seconds: float
    calls: Sequence[CallResult]
    workflows: Sequence[WorkflowResult]
    counters: Mapping[str, int]
    passes: int = 0
    decode_steps: int = 0
    prefill_tokens: int = 0
    retractions: int = 0
    busy_seconds: float = 0.0
    engines: int = 1
    timeline: Sequence[Mapping[str, Any]] = field(default=(), repr=False)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts that were served."""
        return sum(c.prompt_tokens for c in self.calls if c.outcome == "done")

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in the cache, on either tier."""
        return sum(c.cached_device + c.cached_host for c in self.calls if c.outcome == "done")

    @property
    def hit_rate(self) -> float:
        """Cached share of all prompt tokens."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def summary(self) -> dict[str, Any]:
        """JSON-ready figures. Times in seconds, rates per second of simulated time."""
        done = [c for c in self.calls if c.outcome == "done"]
        ttft = [c.ttft for c in done]
        e2e = [c.e2e for c in done]
        queued = [c.queued for c in done]
        jobs = [w.seconds for w in self.workflows]
        prompts = self.prompt_tokens or 1
        outcomes = Counter(c.outcome for c in self.calls)
        count = self.counters.get
        return {
            "policy": self.policy,
            "engines": self.engines,
            "seconds": self.seconds,
            "calls": len(done),
            "calls_rejected": outcomes["rejected"],
            "calls_aborted": outcomes["aborted"],
            "workflows": len(self.workflows),
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": sum(c.output_tokens for c in done),
            "hit_rate": self.hit_rate,
            "hit_rate_device": sum(c.cached_device for c in done) / prompts,
            "hit_rate_host": sum(c.cached_host for c in done) / prompts,
            "ttft_mean": _mean(ttft),
            "ttft_p50": percentile(ttft, 50),
            "ttft_p90": percentile(ttft, 90),
            "ttft_p99": percentile(ttft, 99),
            "e2e_mean": _mean(e2e),
            "e2e_p50": percentile(e2e, 50),
            "e2e_p90": percentile(e2e, 90),
            "e2e_p99": percentile(e2e, 99),
            "queued_mean": _mean(queued),
            "queued_p99": percentile(queued, 99),
            "job_mean": _mean(jobs),
            "job_p50": percentile(jobs, 50),
            "job_p99": percentile(jobs, 99),
            "calls_per_second": len(done) / self.seconds if self.seconds else 0.0,
            "workflows_per_second": len(self.workflows) / self.seconds if self.seconds else 0.0,
            "output_tokens_per_second": sum(c.output_tokens for c in done) / self.seconds if self.seconds else 0.0,
            "prefill_tokens": self.prefill_tokens,
            "decode_steps": self.decode_steps,
            "retractions": self.retractions,
            "busy_share": self.busy_seconds / (self.seconds * self.engines) if self.seconds else 0.0,
            "evicted_tokens": count("evict_tokens", 0),
            "evicted_regretted_tokens": count("evict_regretted_tokens", 0),
            "demoted_tokens": count("demote_tokens", 0),
            "demoted_regretted_tokens": count("demote_regretted_tokens", 0),
            "evicted_host_tokens": count("evict_host_tokens", 0),
            "evicted_host_regretted_tokens": count("evict_host_regretted_tokens", 0),
            "prefetches": count("prefetches", 0),
            "prefetches_refused": count("prefetches_refused", 0),
            "prefetch_used_tokens": count("prefetch_used_tokens", 0),
            "prefetch_wasted_tokens": count("prefetch_wasted_tokens", 0),
            "policy_errors": count("policy_errors", 0),
        }


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which ``percent`` of the values lie, linear between neighbours; 0.0 of nothing."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
