"""Runs on the simulator: the same calls for every policy, one seed a repetition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentflow.bench.comparisons.contenders import Contender
from agentflow.bench.comparisons.loads import Load
from agentflow.bench.comparisons.measure import Run, measured
from agentflow.bench.comparisons.model import Options
from agentflow.bench.comparisons.moments import moments
from agentflow.bench.simulator import Cost, EngineSpec, RooflineCost, simulate

__all__ = ["HARDWARE_NAME", "MODEL_NAME", "default_cost", "engine_spec", "record", "sweep"]

#: What is simulated unless a comparison says otherwise: the paper's small model on its GPU.
MODEL_NAME, HARDWARE_NAME = "qwen3-14b", "a100-80g"


def default_cost() -> RooflineCost:
    """Cost of passes of the default model on the default hardware."""
    return RooflineCost.of(MODEL_NAME, HARDWARE_NAME)


def engine_spec(load: Load, pool_tokens: int, host_tokens: int = 0) -> EngineSpec:
    """An engine with that memory, which runs as many calls at once as the load allows."""
    if load.max_running is None:
        return EngineSpec(pool_tokens=pool_tokens, host_tokens=host_tokens)
    return EngineSpec(pool_tokens=pool_tokens, host_tokens=host_tokens, max_running=load.max_running)


def sweep(
    options: Options,
    load: Load,
    contenders: Sequence[Contender],
    pool_tokens: int,
    pressure: float,
    *,
    repetitions: int,
    cost: Cost | None = None,
    host_tokens: int = 0,
    axes: Mapping[str, Any] | None = None,
) -> list[Run]:
    """Every contender on the same memory and calls, once a seed."""
    spec = engine_spec(load, pool_tokens, host_tokens)
    runs = []
    for seed in range(repetitions):
        trace = load.trace(seed)
        for contender in contenders:
            options.say(f"{load.name}, pressure {pressure:g}, {contender.label}, seed {seed}")
            result = simulate(
                trace,
                spec,
                cost or default_cost(),
                contender.specs(trace),
                arrivals=load.arrivals(),
                seed=seed,
            )
            runs.append(
                measured(
                    trace,
                    result,
                    load=load.name,
                    policy=contender.label,
                    pressure=pressure,
                    repetition=seed,
                    pool_tokens=pool_tokens,
                    host_tokens=host_tokens,
                    axes={**(axes or {}), **contender.axes},
                )
            )
    return runs


def record(
    load: Load,
    contender: Contender,
    pool_tokens: int,
    pressure: float,
    *,
    cost: Cost | None = None,
    host_tokens: int = 0,
) -> dict[str, Any]:
    """What happened in one run, for the report's timeline and memory plots."""
    trace = load.trace(0)
    spec = engine_spec(load, pool_tokens, host_tokens)

    def run(sample_seconds: float, timeline: bool) -> Any:
        return simulate(
            trace,
            spec,
            cost or default_cost(),
            contender.specs(trace),
            arrivals=load.arrivals(),
            timeline=timeline,
            sample_seconds=sample_seconds,
        )

    seconds = run(1.0, False).seconds
    result = run(max(seconds / 120, 1e-3), True)
    return {
        "load": load.name,
        "policy": contender.label,
        "pressure": pressure,
        "pool_tokens": pool_tokens,
        "host_tokens": host_tokens,
        "seconds": result.seconds,
        **moments(result.timeline),
    }
