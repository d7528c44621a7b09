"""Predicted reuse against recency, lifecycle and KVFlow: how much it gives, and how wrong predictions may be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

from agentflow.bench.comparisons.contenders import Contender, named, pbkv_oracle, with_options
from agentflow.bench.comparisons.loads import Load, pool_for
from agentflow.bench.comparisons.measure import Run, rows_of, select
from agentflow.bench.comparisons.model import Claim, Comparison, Options, Results, Row
from agentflow.bench.comparisons.paper import ENGINE_RUNNING, few_at_once, pbkv_engine_loads, pbkv_places
from agentflow.bench.comparisons.real import COMPUTING, open_bench, sweep_real
from agentflow.bench.comparisons.simulated import HARDWARE_NAME, MODEL_NAME, record, sweep

__all__ = ["COMPARISON", "claims"]

#: lifecycle is the paper's LAE, pbkv-he its look-ahead eviction, which without a host tier is all of pbkv. With
#: by-workflow: what the order of calls does without prediction.
POLICIES = (
    "lru", "lifecycle", "lifecycle+by-workflow", "pbkv-he", "pbkv-queue", "kvflow", "belady", "belady+by-workflow",
)  # fmt: skip
ON_ENGINE = ("lru", "lifecycle", "pbkv-he", "pbkv-queue", "kvflow")
#: Ours: the paper's rule, without and with prefetch, and the one that sees the queue too.
OURS = ("pbkv-he", "pbkv", "pbkv-queue")
DYNAMIC = ("hover", "swebench")
STATIC = "financebench"
#: The host tier, where there is one, in pools of the device.
HOST_RATIO = 2.0
#: Where forecasts are disturbed, and where a host tier stands behind the pool.
MIDDLE = 4.0
#: Ratios of hit rates are told only where the other's is at least this: of nearly nothing anything is a multiple.
LEAST_HITS = 0.05
TITLE = "PBKV: eviction and prefetch by predicted reuse, over memory and over the quality of predictions"


def run(options: Options) -> Results:
    """Run it in the mode asked for."""
    runs: list[Run] = []
    timelines = []
    repetitions = options.repetitions or options.pick(tiny=1, quick=1, standard=3)
    if options.mode == "simulated":
        places = pbkv_places(options)
        loads = [place.load for place in places]
        contenders = [*named(POLICIES), _unordered()]
        for place in places:
            for asked in place.pressures:
                pool, pressure = pool_for(place.load, asked, seeds=repetitions)
                runs += sweep(options, place.load, contenders, pool, pressure, repetitions=repetitions, cost=place.cost)
        for load in few_at_once(options):
            loads.append(load)
            pool, pressure = pool_for(load, MIDDLE, seeds=repetitions)
            runs += sweep(
                options, load, _disturbed(options, load), pool, pressure, repetitions=repetitions,
                host_tokens=round(HOST_RATIO * pool),
            )  # fmt: skip
        pool, pressure = pool_for(loads[1], MIDDLE)
        timelines = [record(loads[1], c, pool, pressure) for c in contenders if c.label in ("lru", "pbkv-queue")]
    else:
        under = pbkv_engine_loads(options)
        loads = list(under)
        repetitions = options.repetitions or options.pick(tiny=1, quick=1, standard=5)
        pools = {load: [pool_for(load, p) for p in pressures] for load, pressures in under.items()}
        most = max(pool for found in pools.values() for pool, _ in found)
        with open_bench(options, most, max_running=ENGINE_RUNNING, model=COMPUTING) as bench:
            for load, found in pools.items():
                for pool, pressure in found:
                    runs += sweep_real(options, bench, load, named(ON_ENGINE), pool, pressure, repetitions=repetitions)
    rows = rows_of(runs)
    return Results(
        comparison="pbkv",
        mode=options.mode,
        size=options.size,
        title=TITLE,
        seconds=0.0,
        rows=rows,
        claims=claims(rows) if options.mode == "simulated" else engine_claims(rows),
        setting={
            "loads": {load.name: load.to_json() for load in loads},
            "model": f"{MODEL_NAME} on {HARDWARE_NAME}" if options.mode == "simulated" else str(COMPUTING),
        },
        timelines=timelines,
    )


def _unordered() -> Contender:
    """pbkv-queue with the queue as the engine orders it: what prediction does without the order of calls."""
    return with_options("pbkv-queue, any order", "pbkv-queue", order_calls=False)


def _disturbed(options: Options, load: Load) -> list[Contender]:
    """With a host tier: what prefetching does, and on the dynamic loads how wrong forecasts may be."""
    others = named(("lru", "lifecycle", "pbkv-he", "kvflow", "kvflow-oracle", "belady"))
    if load.kind not in DYNAMIC:
        return [*others, *named(("pbkv", "pbkv-aggressive"))]
    noises = options.pick(tiny=(0.0, 1.0), quick=(0.0, 0.5, 1.0), standard=(0.0, 0.25, 0.5, 0.75, 1.0))
    noisy = [with_options(name, name, noise=noise) for name in ("pbkv", "pbkv-aggressive") for noise in noises]
    return [*others, pbkv_oracle(), *noisy]


def claims(rows: Sequence[Row]) -> list[Claim]:
    """The paper's figures, as far as the simulator's rows tell them."""
    dynamic = [r for r in rows if r.load.startswith(DYNAMIC) and not r.host_tokens]
    pbkv = select(dynamic, policy=_one_of(*OURS))
    static = select(rows, load=lambda name: name.startswith(STATIC), policy=_one_of(*OURS), noise=_quiet)
    out = [
        _best(pbkv, lambda r: _hits(rows, r, "lru"), 2.55, "hit rate of PBKV against lru"),
        _best(pbkv, lambda r: 1 / r.against_lru["e2e_mean"][0], 1.85, "end-to-end latency of PBKV against lru"),
        _best(
            select(dynamic, policy="lifecycle"), lambda r: _hits(rows, r, "lru"), 1.66,
            "hit rate of lifecycle alone against lru",
        ),
        _where_lru_has_ten(rows),
        _best(
            static, lambda r: _other(rows, r, "kvflow").e2e_mean / r.e2e_mean, 1.26,
            "end-to-end latency of PBKV against KVFlow on the static load",
        ),
        _best(
            static, lambda r: _hits(rows, r, "kvflow"), 1.39,
            "hit rate of PBKV against KVFlow on the static load",
        ),
    ]  # fmt: skip
    return [*out, *_robustness(rows)]


def engine_claims(rows: Sequence[Row]) -> list[Claim]:
    """What is asked of the real engine: better than all of these, and 1.3 times faster than lru somewhere."""
    out = []
    for ours, other in product(("pbkv-he", "pbkv-queue"), ("lru", "lifecycle", "kvflow")):
        pbkv = select(rows, policy=ours)
        gains = [r.hit_rate - _other(rows, r, other).hit_rate for r in pbkv]
        out.append(
            Claim(
                name=f"hit rate of {ours} on the engine against {other}",
                target="higher on every load under every pressure above 1",
                measured=100 * min(gains),
                met=min(gains) > 0,
                note="least difference, in points",
            )
        )
        ratios = [_other(rows, r, other).e2e_mean / r.e2e_mean for r in pbkv]
        out.append(
            Claim(
                name=f"end-to-end latency of {ours} on the engine against {other}",
                target="lower on every load under every pressure above 1",
                measured=min(ratios),
                met=min(ratios) > 1.0,
                note="least of the ratios of medians",
            )
        )
    pbkv = select(rows, policy=_one_of(*OURS))
    out.append(_best(pbkv, lambda r: 1 / r.against_lru["e2e_mean"][0], 1.3, "latency against lru under pressure"))
    return out


def _robustness(rows: Sequence[Row]) -> list[Claim]:
    out = []
    noisy = [r for r in rows if r.more.get("noise") is not None]
    worst, place = 0.0, ""
    for one in select(noisy, policy="pbkv"):
        full, none = (_noise(noisy, one, n).hit_rate for n in (1.0, 0.0))
        beyond = 100 * (none - one.hit_rate - one.more["noise"] * max(0.0, none - full))
        if beyond > worst:
            worst, place = beyond, f" ({one.load} at noise {one.more['noise']:g})"
    out.append(
        Claim(
            name="regret under noise",
            target="at most linear in the noise, within 1 point of hit rate",
            measured=worst,
            met=worst <= 1.0,
            note=f"points of hit rate above the line from noise 0 to noise 1{place}",
        )
    )
    loss = max(
        (_other(rows, r, "lifecycle").spread["hit_rate"][0] - r.spread["hit_rate"][1], r.load)
        for r in select(noisy, policy="pbkv", noise=1.0)
    )
    out.append(
        Claim(
            name="PBKV with forecasts of pure chance against lifecycle",
            target="not worse beyond the spread of repetitions",
            measured=100 * loss[0],
            met=loss[0] <= 0.01,
            note=f"points that its best run is below lifecycle's worst, at most, on {loss[1]}; 1 point is allowed",
        )
    )
    lost = max(
        _noise(noisy, r, r.more["noise"], "pbkv").hit_rate - r.hit_rate
        for r in select(noisy, policy="pbkv-aggressive", noise=lambda n: 0.25 <= n <= 0.75 or n == 1.0)
    )
    out.append(
        Claim(
            name="aggressive prefetch under noise",
            target="has fewer hits than conservative prefetch",
            measured=100 * lost,
            met=lost > 0,
            note="largest loss in points of hit rate",
        )
    )
    return out


def _best(rows: Sequence[Row], of: Callable[[Row], float], target: float, name: str) -> Claim:
    """The best of ``rows`` reaches the target."""
    best = max(rows, key=of)
    return Claim(
        name=name,
        target=f"{target:g}x or better at the best point",
        measured=of(best),
        met=of(best) >= target,
        note=f"{best.policy} on {best.load} at pressure {best.pressure:g}"
        + (", with a host tier" if best.host_tokens else ""),
    )


def _hits(rows: Sequence[Row], row: Row, policy: str) -> float:
    """The hit rate over that of the policy at the same place; 0.0 where that is next to nothing."""
    base = _other(rows, row, policy).hit_rate
    return row.hit_rate / base if base >= LEAST_HITS else 0.0


def _where_lru_has_ten(rows: Sequence[Row]) -> Claim:
    name, target = "hit rate of PBKV where lru has about 10 %", "50 % or more"
    plain = select(rows, host_tokens=0)
    low = {(r.load, r.pressure) for r in select(plain, policy="lru", hit_rate=lambda h: 0.05 <= h <= 0.15)}
    found = [r for r in select(plain, policy=_one_of(*OURS)) if (r.load, r.pressure) in low]
    if not found:
        least = min(select(rows, policy="lru"), key=lambda r: r.hit_rate)
        note = f"lru has at least {least.hit_rate:.0%} here ({least.load} at pressure {least.pressure:g})"
        return Claim(name=name, target=target, measured=None, met=False, note=note)
    best = max(found, key=lambda r: r.hit_rate)
    note = f"{best.policy} on {best.load} at pressure {best.pressure:g}"
    return Claim(name=name, target=target, measured=best.hit_rate, met=best.hit_rate >= 0.5, note=note)


def _other(rows: Sequence[Row], row: Row, policy: str) -> Row:
    """The row of another policy at the same place."""
    found = [
        r
        for r in select(rows, policy=policy, load=row.load, pressure=row.pressure)
        if (r.host_tokens > 0) == (row.host_tokens > 0)
    ]
    return found[0]


def _noise(rows: Sequence[Row], row: Row, noise: float, policy: str = "pbkv") -> Row:
    return select(rows, policy=policy, load=row.load, pressure=row.pressure, noise=noise)[0]


def _one_of(*names: str) -> Callable[[str], bool]:
    return lambda name: name in names


def _quiet(noise: float | None) -> bool:
    return not noise


COMPARISON = Comparison(name="pbkv", title=TITLE, modes=("simulated", "engine"), run=run)
