"""CacheSage against recency on five teams of agents: what its learned order and its warm-ups bring."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from agentflow.bench.comparisons.contenders import Contender, named, with_options
from agentflow.bench.comparisons.loads import Load, longest_call, working_set
from agentflow.bench.comparisons.measure import Run, rows_of, select
from agentflow.bench.comparisons.model import Claim, Comparison, Options, Results, Row
from agentflow.bench.comparisons.real import COMPUTING, open_bench, sweep_real
from agentflow.bench.comparisons.simulated import HARDWARE_NAME, MODEL_NAME, sweep
from agentflow.bench.traces.generators.teams import TEAMS
from agentflow.bench.traces.model import Trace

__all__ = ["COMPARISON", "anchor_tokens", "claims"]

TITLE = "CacheSage: learned transitions and warm-ups against recency, on five teams of agents"
#: Pools, in anchors of the team: all anchors fit, if nothing else were kept; and half as much again.
POOLS = (1.0, 1.5)
#: Workflows at once: sessions that come one after another, and several together.
AT_ONCE = (2, 6)


def anchor_tokens(trace: Trace) -> int:
    """Tokens of all agents' own beginnings together."""
    return sum({c.prompt[0].id: c.prompt[0].tokens for w in trace.workflows for c in w.calls}.values())


def run(options: Options) -> Results:
    """Run it in the mode asked for."""
    if options.mode == "engine":
        return _on_engine(options)
    runs: list[Run] = []
    repetitions = options.repetitions or options.pick(tiny=1, quick=1, standard=5)
    for load in _loads(options, scale=1.0):
        for share in POOLS:
            for at_once in options.pick(tiny=AT_ONCE[:1], quick=AT_ONCE, standard=AT_ONCE):
                placed = replace(load, concurrency=at_once)
                pool, pressure = _pool(placed, share, repetitions)
                axes = {"pool_in_anchors": share, "at_once": at_once}
                runs += sweep(options, placed, _contenders(), pool, pressure, repetitions=repetitions, axes=axes)
    return _results(options, rows_of(runs), f"{MODEL_NAME} on {HARDWARE_NAME}, simulated")


def _on_engine(options: Options) -> Results:
    runs: list[Run] = []
    repetitions = options.repetitions or options.pick(tiny=1, quick=1, standard=5)
    loads = _loads(options, scale=0.5)
    places = [(load, share, *_pool(load, share, 1)) for load in loads for share in options.pick(
        tiny=POOLS[:1], quick=POOLS[:1], standard=POOLS
    )]  # fmt: skip
    with open_bench(options, max(pool for _, _, pool, _ in places), model=COMPUTING) as bench:
        for load, share, pool, pressure in places:
            axes = {"pool_in_anchors": share, "at_once": load.concurrency}
            runs += sweep_real(
                options, bench, load, _contenders(), pool, pressure, repetitions=repetitions, axes=axes
            )  # fmt: skip
    return _results(options, rows_of(runs), f"{COMPUTING}, texts half as long")


def _loads(options: Options, *, scale: float) -> list[Load]:
    on_engine = options.mode == "engine"
    number = options.pick(tiny=4, quick=8 if on_engine else 20, standard=16 if on_engine else 100)
    teams = options.pick(tiny=TEAMS[:1], quick=TEAMS, standard=TEAMS)
    tools = 0.02 if on_engine else 1.0
    return [
        Load(
            name=name, kind=f"team-{name}", workflows=number, concurrency=AT_ONCE[0], scale=scale, tool_scale=tools,
            max_prompt=round(6_000 * scale),
        )
        for name in teams
    ]  # fmt: skip


def _pool(load: Load, share: float, seeds: int) -> tuple[int, float]:
    """Tokens of a pool of ``share`` times the anchors, which holds the longest call, and the pressure on it."""
    trace = load.trace(0)
    longest = max(longest_call(load.trace(seed)) for seed in range(seeds))
    pool = max(round(share * anchor_tokens(trace)), round(1.1 * longest) + 64)
    return pool, round(working_set(trace, load.concurrency) / pool, 2)


def _contenders() -> list[Contender]:
    return [
        *named(("lru", "cachesage")),
        with_options("cachesage, no warm-ups", "cachesage", warm_up=False),
        *named(("continuum-preview", "belady")),
    ]


def _results(options: Options, rows: list[Row], model: str) -> Results:
    return Results(
        comparison="cachesage",
        mode=options.mode,
        size=options.size,
        title=TITLE,
        seconds=0.0,
        rows=rows,
        claims=claims(rows),
        setting={"model": model, "pools_in_anchors": list(POOLS), "workflows_at_once": list(AT_ONCE)},
    )


def claims(rows: Sequence[Row]) -> list[Claim]:
    """What the paper found on its five loads, and what is found here: medians over places, the range in the note."""
    out = []
    teams = sorted({r.load for r in rows})
    for team in teams:
        gains = [100 * (a.hit_rate - b.hit_rate) for a, b in _pairs(rows, team, "cachesage")]
        room = [100 * (a.hit_rate - b.hit_rate) for a, b in _pairs(rows, team, "belady")]
        if not gains:
            continue
        best = f"; the best order there is (belady) {min(room):+.1f} to {max(room):+.1f}" if room else ""
        out.append(
            Claim(
                name=f"{team}: hit rate over lru, points",
                target="+13 to +37",
                measured=statistics.median(gains),
                met=statistics.median(gains) >= 13.0,
                note=f"median of {len(gains)} places, {min(gains):+.1f} to {max(gains):+.1f}{best}",
            )
        )
    out += _ratios(rows, "ttft_mean", "mean time to first token against lru, %", "-12 to -29", lambda x: x <= -12.0)
    out += _ratios(rows, "throughput", "throughput against lru, %", "+6 to +14", lambda x: x >= 6.0)
    pins = [100 * (a.hit_rate - b.hit_rate) for a, b in _pairs(rows, None, "continuum-preview")]
    if pins:
        out.append(
            Claim(
                name="TTL pins alone (continuum-preview): hit rate over lru, points",
                target="-9 to -23",
                measured=statistics.median(pins),
                met=statistics.median(pins) <= -9.0,
                note=f"median over {len(pins)} places, {min(pins):+.1f} to {max(pins):+.1f}",
            )
        )
    return out


def _ratios(rows: Sequence[Row], figure: str, name: str, target: str, met: object) -> list[Claim]:
    changes = [
        100 * (_figure(a, figure) / _figure(b, figure) - 1)
        for a, b in _pairs(rows, None, "cachesage")
        if _figure(b, figure) > 0
    ]
    if not changes:
        return []
    best = min(changes) if "ttft" in figure else max(changes)
    assert callable(met)
    return [
        Claim(
            name=name,
            target=target,
            measured=statistics.median(changes),
            met=bool(met(statistics.median(changes))),
            note=f"median over {len(changes)} places, best {best:+.1f}, {min(changes):+.1f} to {max(changes):+.1f}",
        )
    ]


def _figure(row: Row, name: str) -> float:
    found: float = row.more[name] if name in row.more else getattr(row, name)
    return found


def _pairs(rows: Sequence[Row], team: str | None, policy: str) -> list[tuple[Row, Row]]:
    """Rows of the policy with lru's at the same place."""
    out = []
    for row in select(rows, policy=policy):
        if team is not None and row.load != team:
            continue
        places = {k: row.more.get(k) for k in ("pool_in_anchors", "at_once")}
        base = select(rows, policy="lru", load=row.load, **places)
        if base:
            out.append((row, base[0]))
    return out


COMPARISON = Comparison(name="cachesage", title=TITLE, modes=("simulated", "engine"), run=run)
