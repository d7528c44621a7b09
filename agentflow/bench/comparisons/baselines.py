"""All policies that need no training, on three kinds of workflows under three pressures."""

from __future__ import annotations

from agentflow.bench.comparisons.contenders import Contender, named
from agentflow.bench.comparisons.loads import Load, pool_for
from agentflow.bench.comparisons.measure import Run, rows_of, select
from agentflow.bench.comparisons.model import Claim, Comparison, Options, Results, Row
from agentflow.bench.comparisons.real import open_bench, sweep_real
from agentflow.bench.comparisons.simulated import HARDWARE_NAME, MODEL_NAME, record, sweep

__all__ = ["COMPARISON", "engine_loads", "simulated_loads"]

POLICIES = (
    "lru", "fifo", "lfu", "slru", "session", "kvflow", "kvflow-oracle", "autellix", "infercept",
    "continuum-preview", "continuum", "lifecycle", "ttl", "pbkv", "belady",
)  # fmt: skip
#: On the real engine, where a run takes seconds: one of each kind.
ON_ENGINE = ("lru", "lfu", "slru", "session", "kvflow", "continuum", "lifecycle", "ttl", "pbkv")
PRESSURES = (2.0, 4.0, 8.0)
TITLE = "All policies that need no training, on HoVer-, SWE-bench- and FinanceBench-like workflows"


def simulated_loads(options: Options) -> list[Load]:
    """The three kinds of workflows, at their true lengths."""
    few, many = options.pick(tiny=(4, 6), quick=(8, 8), standard=(10, 16))
    scale = options.pick(tiny=0.2, quick=1.0, standard=1.0)
    calls = options.pick(tiny=8, quick=24, standard=24)
    longest = round(12_000 * scale)
    return [
        Load(name="hover", kind="hover", workflows=2 * many, concurrency=many, scale=scale),
        Load(
            name="swebench", kind="swebench", workflows=2 * few, concurrency=few, scale=scale, max_calls=calls,
            max_prompt=longest,
        ),
        Load(name="financebench", kind="financebench", workflows=2 * many, concurrency=many, scale=scale),
    ]  # fmt: skip


def engine_loads(options: Options) -> list[Load]:
    """The same kinds, with short texts and tools that hardly wait, for a model on a CPU."""
    workflows, concurrency, calls = options.pick(tiny=(3, 2, 4), quick=(8, 8, 8), standard=(16, 8, 10))
    scale = options.pick(tiny=0.1, quick=0.2, standard=0.2)

    def load(kind: str, scale: float) -> Load:
        return Load(
            name=kind, kind=kind, workflows=workflows, concurrency=concurrency, scale=scale, tool_scale=0.02,
            max_calls=calls, max_prompt=2_000,
        )  # fmt: skip

    return [load("hover", scale), load("swebench", scale / 2), load("financebench", scale)]


def run(options: Options) -> Results:
    """Run it in the mode asked for."""
    runs: list[Run] = []
    timelines = []
    pressures = options.pick(tiny=(4.0,), quick=PRESSURES, standard=PRESSURES)
    repetitions = options.repetitions or options.pick(tiny=1, quick=1, standard=3)
    if options.mode == "simulated":
        loads = simulated_loads(options)
        contenders = named(POLICIES)
        for load in loads:
            for asked in pressures:
                pool, pressure = pool_for(load, asked, seeds=repetitions)
                runs += sweep(options, load, contenders, pool, pressure, repetitions=repetitions)
        timelines = [record(loads[0], c, *pool_for(loads[0], pressures[-1])) for c in _best_and_lru(runs, contenders)]
    else:
        loads = engine_loads(options)
        contenders = named(ON_ENGINE)
        pools = {load: [pool_for(load, p) for p in pressures] for load in loads}
        with open_bench(options, max(pool for found in pools.values() for pool, _ in found)) as bench:
            for load, found in pools.items():
                for pool, pressure in found:
                    runs += sweep_real(options, bench, load, contenders, pool, pressure, repetitions=repetitions)
    rows = rows_of(runs)
    return Results(
        comparison="baselines",
        mode=options.mode,
        size=options.size,
        title=TITLE,
        seconds=0.0,
        rows=rows,
        claims=_claims(rows),
        setting={
            "loads": {load.name: load.to_json() for load in loads},
            "model": f"{MODEL_NAME} on {HARDWARE_NAME}" if options.mode == "simulated" else "random Llama on the CPU",
        },
        timelines=timelines,
    )


def _best_and_lru(runs: list[Run], contenders: list[Contender]) -> list[Contender]:
    """lru, and the one with most hits on the first load under the last pressure; the oracle takes no part."""
    first = runs[0].load
    last = max(r.pressure for r in runs if r.load == first)
    hits = {r.policy: r.figures["hit_rate"] for r in runs if (r.load, r.pressure) == (first, last)}
    best = max((label for label in hits if "belady" not in label and "oracle" not in label), key=hits.__getitem__)
    return [c for c in contenders if c.label in ("lru", best)]


def _claims(rows: list[Row]) -> list[Claim]:
    share = max(r.spread["share_of_oracle"][1] for r in rows)
    worst = min(((r.against_lru["hit_rate"][0], r) for r in select(rows, policy="lifecycle")), key=lambda p: p[0])
    return [
        Claim(
            name="no policy has more hits than were possible",
            target="share_of_oracle at most 1.00 in every run",
            measured=share,
            met=share <= 1.0 + 1e-9,
        ),
        Claim(
            name="lifecycle has no fewer hits than lru",
            target="hit rate at least 0.98x that of lru in every run",
            measured=worst[0],
            met=worst[0] >= 0.98,
            note=f"least on {worst[1].load} at pressure {worst[1].pressure:g}",
        ),
    ]


COMPARISON = Comparison(name="baselines", title=TITLE, modes=("simulated", "engine"), run=run)
