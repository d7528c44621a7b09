"""Shaping, fairness and admission: the same calls with and without them, simulated or on the real engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from agentflow.bench.comparisons.loads import Load, longest_call
from agentflow.bench.comparisons.simulated import default_cost
from agentflow.bench.policies.model import Experiment, Finding, Mode, median_of
from agentflow.bench.simulator import Arrivals, EngineSpec, simulate
from agentflow.bench.simulator.result import CallResult, SimResult
from agentflow.bench.traces.model import Trace
from agentflow.cache.policy import PolicySpec

__all__ = ["EXPERIMENTS", "on_engine"]

#: Serves a trace with policies in a pool of so many tokens.
Serve = Callable[[Trace, Sequence[PolicySpec], int, Arrivals, int], SimResult]


def simulated(trace: Trace, policies: Sequence[PolicySpec], pool: int, arrivals: Arrivals, seed: int) -> SimResult:
    """On the simulated engine."""
    return simulate(trace, EngineSpec(pool_tokens=pool), default_cost(), policies, arrivals=arrivals, seed=seed)


def _percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def _waits(calls: Sequence[CallResult]) -> list[float]:
    return [c.first_token - c.arrived for c in calls if c.first_token >= 0]


# -- shaping ----------------------------------------------------------------------------------------------


def shaping(
    repetitions: int,
    quick: bool,
    *,
    serve: Serve = simulated,
    mode: Mode = "simulated",
    scale: float = 1.0,
    loads: Sequence[str] = ("mmlu", "mtbench"),
    room: float = 3.0,
) -> Finding:
    """Calls of many agents arrive mixed; the anchors of all do not fit together. ``room`` is in longest calls."""

    def once(policies: Sequence[PolicySpec], seed: int) -> dict[str, float]:
        out = {}
        for name in loads:
            load = Load(name=name, kind=f"team-{name}", workflows=30 if quick else 60, concurrency=24, scale=scale)
            trace = load.trace(seed)
            result = serve(trace, policies, round(room * longest_call(trace)), load.arrivals(), seed)
            out[f"{name}: hit rate"] = result.hit_rate
            out[f"{name}: workflows per second"] = len(result.workflows) / result.seconds
            out[f"{name}: ttft p99 s"] = _percentile(_waits(result.calls), 0.99)
        return out

    runs = [(once(["lru", {"name": "shaping", "max_delay": 15.0}], s), once(["lru"], s)) for s in range(repetitions)]
    shaped, spread = median_of([with_it for with_it, _ in runs])
    base, _ = median_of([without for _, without in runs])
    better = [n for n in shaped if "ttft" not in n and shaped[n] >= base[n]]
    return Finding(
        policy="shaping",
        mode=mode,
        aim="more of the prompts found in the cache and more work done, on both loads",
        met=len(better) == 4,
        figures={n: (shaped[n], base[n]) for n in shaped},
        spread=spread,
        note=f"24 workflows at once, room for {room:g} of the longest calls; no call is passed for more than 15 s",
    )


# -- fairness ---------------------------------------------------------------------------------------------


def fairness(
    repetitions: int, quick: bool, *, serve: Serve = simulated, mode: Mode = "simulated", scale: float = 1.0
) -> Finding:
    """A tenant with one workflow at a time beside one that sends forty at once."""
    modest_flows, hostile_flows = (4, 30) if quick else (8, 60)

    def traces(seed: int) -> tuple[Trace, Trace]:
        load = Load(name="gsm8k", kind="team-gsm8k", workflows=modest_flows + hostile_flows, scale=scale)
        made = load.trace(seed)
        modest = [replace(w, tenant="modest", arrival=2.0 * i) for i, w in enumerate(made.workflows[:modest_flows])]
        hostile = [replace(w, tenant="hostile", arrival=0.0) for w in made.workflows[modest_flows:]]
        alone = replace(made, workflows=tuple(modest))
        both = replace(made, workflows=tuple(sorted([*modest, *hostile], key=lambda w: w.arrival)))
        return alone, both

    def p95(result: SimResult) -> float:
        names = {w.workflow for w in result.workflows}
        tenants = {w.id for w in traces_of[0].workflows}
        return _percentile([c.finished - c.arrived for c in result.calls if c.workflow in names & tenants], 0.95)

    rows: dict[str, list[float]] = {"alone": [], "lru": [], "fairness": []}
    for seed in range(repetitions):
        traces_of = traces(seed)
        pool = round(3 * longest_call(traces_of[1]))
        arrivals = Arrivals(kind="trace")
        rows["alone"].append(p95(serve(traces_of[0], ["lru"], pool, arrivals, seed)))
        rows["lru"].append(p95(serve(traces_of[1], ["lru"], pool, arrivals, seed)))
        rows["fairness"].append(p95(serve(traces_of[1], ["fairness", "lru"], pool, arrivals, seed)))
    factors = [{"p95 s": f, "p95 over alone": f / a} for f, a in zip(rows["fairness"], rows["alone"], strict=True)]
    mine, spread = median_of(factors)
    base, _ = median_of(
        [{"p95 s": f, "p95 over alone": f / a} for f, a in zip(rows["lru"], rows["alone"], strict=True)]
    )
    return Finding(
        policy="fairness",
        mode=mode,
        aim="a hostile tenant makes another's p95 at most 3 times what it is alone",
        met=mine["p95 over alone"] <= 3.0,
        figures={n: (mine[n], base[n]) for n in mine},
        spread=spread,
        note=f"{hostile_flows} workflows of one tenant at once, {modest_flows} of the other one after another",
    )


# -- admission --------------------------------------------------------------------------------------------


def admission(
    repetitions: int,
    quick: bool,
    *,
    serve: Serve = simulated,
    mode: Mode = "simulated",
    scale: float = 1.0,
    limits: Mapping[str, float] | None = None,
) -> Finding:
    """More and more programs at once, each of which holds a growing context over its tool calls. ``limits`` are the
    policy's, in pools."""
    flows = 24 if quick else 36
    levels = (2, 8, 24)

    def once(policies: Sequence[PolicySpec], seed: int) -> dict[str, float]:
        load = Load(
            name="swebench", kind="swebench", workflows=flows, scale=scale,
            max_calls=14 if mode == "simulated" else 8,
            max_prompt=round(10_000 * scale), tool_scale=0.1,
        )  # fmt: skip
        trace = load.trace(seed)
        pool = round(4 * longest_call(trace))
        out = {}
        for level in levels:
            result = serve(trace, policies, pool, Arrivals(kind="closed", concurrency=level), seed)
            out[f"workflows per second, {level} at once"] = len(result.workflows) / result.seconds
            out[f"hit rate, {level} at once"] = result.hit_rate
        rates = [out[f"workflows per second, {level} at once"] for level in levels]
        out["last over best"] = rates[-1] / max(rates)
        return out

    policy: PolicySpec = {"name": "admission", **(limits or {})}
    runs = [(once([policy, "lru"], s), once(["lru"], s)) for s in range(repetitions)]
    mine, spread = median_of([with_it for with_it, _ in runs])
    base, _ = median_of([without for _, without in runs])
    return Finding(
        policy="admission",
        mode=mode,
        aim="beyond saturation at least 0.9 of the most work per second",
        met=mine["last over best"] >= 0.9,
        figures={n: (mine[n], base[n]) for n in mine},
        spread=spread,
        note=f"{flows} workflows, a pool of four of the longest calls",
    )


def on_engine(serve: Serve) -> tuple[Experiment, ...]:
    """The same on a real engine, with shorter texts. Shaping has less room there: the anchors are short, and with room
    for three calls they stay by themselves. Admission has lower limits: the few calls that run are never too few."""
    made: Mapping[str, tuple[str, Any]] = {
        "shaping": ("calls of one agent together", partial(shaping, loads=("mmlu", "humaneval"), room=1.5)),
        "fairness": ("a hostile tenant", fairness),
        "admission": ("more programs than fit", partial(admission, limits={"high": 1.25, "low": 1.0})),
    }
    return tuple(
        Experiment(policy=name, mode="engine", title=title, run=partial(run, serve=serve, mode="engine", scale=0.1))
        for name, (title, run) in made.items()
    )


EXPERIMENTS = (
    Experiment(policy="shaping", mode="simulated", title="calls of one agent together", run=shaping),
    Experiment(policy="fairness", mode="simulated", title="a hostile tenant", run=fairness),
    Experiment(policy="admission", mode="simulated", title="more programs than fit", run=admission),
)
