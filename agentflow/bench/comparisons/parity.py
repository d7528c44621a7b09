"""Does the simulator tell what the real engine does: the same trace, memory and policies on both.

Under pressure a hit rate hangs on which of two calls comes a moment earlier, so one run of either says little: the
engine runs everything several times, the simulator at several paces around the one that was measured, and medians are
compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from agentflow.bench.comparisons.calibrating import measure_passes
from agentflow.bench.comparisons.contenders import named
from agentflow.bench.comparisons.loads import Load, pool_for
from agentflow.bench.comparisons.measure import Run, measured, rows_of, select
from agentflow.bench.comparisons.model import Claim, Comparison, Options, Results, Row
from agentflow.bench.comparisons.paper import ENGINE_RUNNING
from agentflow.bench.comparisons.real import open_bench, sweep_real
from agentflow.bench.simulator import Cost, EngineSpec, Prefill, simulate

__all__ = ["COMPARISON"]

POLICIES = ("lru", "lifecycle", "lfu")
#: Hit rates that are closer than this are one rank.
TIE = 0.005
#: How fast the simulated engine is, as a share of what was measured.
PACES = (1.0, 0.9, 0.95, 1.05, 1.1)
TITLE = "The simulator beside the real engine: the same trace, memory and policies"


@dataclass(frozen=True, slots=True)
class Paced:
    """A cost model at another pace."""

    cost: Cost
    pace: float

    @property
    def load_overlaps(self) -> bool:
        return self.cost.load_overlaps

    def prefill(self, work: Sequence[Prefill]) -> float:
        return self.pace * self.cost.prefill(work)

    def decode(self, batch: int, kv_tokens: int, steps: int = 1) -> float:
        return self.pace * self.cost.decode(batch, kv_tokens, steps)

    def transfer(self, tokens: int) -> float:
        return self.pace * self.cost.transfer(tokens)


def run(options: Options) -> Results:
    """Measure on the engine, calibrate, simulate the same, and compare."""
    workflows, concurrency, calls = options.pick(tiny=(3, 2, 4), quick=(16, 12, 5), standard=(24, 12, 6))
    pressures = options.pick(tiny=(2.0,), quick=(1.5, 2.5, 4.0), standard=(1.5, 2.5, 4.0))
    scale = options.pick(tiny=0.1, quick=0.1, standard=0.15)
    repetitions = options.repetitions or options.pick(tiny=1, quick=3, standard=5)
    load = Load(
        name="hover", kind="hover", workflows=workflows, concurrency=concurrency, scale=scale, tool_scale=0.05,
        stagger=0.4, max_calls=calls, max_prompt=2_000, max_running=ENGINE_RUNNING,
    )  # fmt: skip
    contenders = named(POLICIES)
    pools = [pool_for(load, p, spare=1.2) for p in pressures]
    runs: list[Run] = []
    most = max(2_048, *(pool for pool, _ in pools))
    with open_bench(options, most, max_running=ENGINE_RUNNING) as bench:
        options.say("measuring passes")
        bench.configure(["lru"], most)
        batches = options.pick(tiny=(1, 2), quick=(1, 2, ENGINE_RUNNING), standard=(1, 2, ENGINE_RUNNING))
        before = measure_passes(bench.engine, batches=batches)
        for pool, pressure in pools:
            runs += sweep_real(options, bench, load, contenders, pool, pressure, repetitions=repetitions)
        bench.configure(["lru"], most)
        cost = before.and_later(measure_passes(bench.engine, batches=batches, seed=1)).fit()
    trace = load.trace(0)
    for pool, pressure in pools:
        for contender in contenders:
            options.say(f"simulating {contender.label}, pressure {pressure:g}")
            for repetition, pace in enumerate(PACES):
                result = simulate(
                    trace,
                    EngineSpec(pool_tokens=pool, chunked_prefill=4_096, max_running=ENGINE_RUNNING),
                    Paced(cost, pace),
                    contender.specs(trace),
                    arrivals=load.arrivals(),
                )
                runs.append(
                    measured(
                        trace, result, load=load.name, policy=contender.label, pressure=pressure,
                        repetition=repetition, pool_tokens=pool,
                    )
                )  # fmt: skip
    rows = rows_of(runs)
    return Results(
        comparison="parity",
        mode="engine",
        size=options.size,
        title=TITLE,
        seconds=0.0,
        rows=rows,
        claims=claims(rows),
        setting={"loads": {load.name: load.to_json()}, "calibration": cost.to_json(), "model": "random Llama, CPU"},
    )


def claims(rows: list[Row]) -> list[Claim]:
    """What the issue asks of parity, from rows of both modes."""
    out = []
    pairs = _pairs(rows)
    for policy in dict.fromkeys(r.policy for r in rows):
        differences = [abs(real.hit_rate - sim.hit_rate) for (_, name), (real, sim) in pairs.items() if name == policy]
        worst = 100 * max(differences)
        out.append(
            Claim(
                name=f"hit rate of {policy} in the simulator",
                target="within 2 points of the engine's at every pressure",
                measured=worst,
                met=worst <= 2.0,
                note=f"largest difference, in points, at {len(differences)} pressures",
            )
        )
    couples = [
        (pressure, a, b)
        for pressure in dict.fromkeys(p for p, _ in pairs)
        for a, b in combinations(dict.fromkeys(n for _, n in pairs), 2)
    ]
    orders = [(_order(pairs, *couple, 0), _order(pairs, *couple, 1)) for couple in couples]
    blurred = sum(_overlap(pairs[pressure, a][0], pairs[pressure, b][0]) for pressure, a, b in couples)
    wrong = [
        f"{a} and {b} at pressure {pressure:g}"
        for (pressure, a, b), (real, simulated) in zip(couples, orders, strict=True)
        if real * simulated < 0
    ]
    out.append(
        Claim(
            name="ranking of policies",
            target=f"the same in both (hit rates within {100 * TIE:g} points are one rank)",
            measured=float(len(wrong)),
            met=not wrong,
            note=(f"swapped: {', '.join(wrong)}; " if wrong else "pairs that are swapped; ")
            + f"the engine's own runs of {blurred} of {len(couples)} pairs overlap",
        )
    )
    times = [abs(sim.job_mean / real.job_mean - 1.0) for real, sim in pairs.values()]
    out.append(
        Claim(
            name="completion time in the simulator, calibrated",
            target="mean completion of workflows within 25 % of the engine's",
            measured=100 * max(times),
            met=max(times) <= 0.25,
            note="largest difference in per cent",
        )
    )
    return out


def _pairs(rows: list[Row]) -> Mapping[tuple[float, str], tuple[Row, Row]]:
    """By pressure and policy: the engine's row and the simulator's."""
    simulated = {(r.pressure, r.policy): r for r in select(rows, mode="simulated")}
    return {
        (r.pressure, r.policy): (r, simulated[r.pressure, r.policy])
        for r in select(rows, mode="engine")
        if (r.pressure, r.policy) in simulated
    }


def _order(pairs: Mapping[tuple[float, str], tuple[Row, Row]], pressure: float, a: str, b: str, side: int) -> int:
    """Which of two policies has the better hit rate: 1 the first, -1 the second, 0 where they are one rank."""
    difference = pairs[pressure, a][side].hit_rate - pairs[pressure, b][side].hit_rate
    return 0 if abs(difference) <= TIE else 1 if difference > 0 else -1


def _overlap(first: Row, second: Row) -> bool:
    """Whether the runs of two policies cannot be told apart by their hit rates."""
    (low, high), (least, most) = first.spread["hit_rate"], second.spread["hit_rate"]
    return low <= most and least <= high


COMPARISON = Comparison(name="parity", title=TITLE, modes=("engine",), run=run)
