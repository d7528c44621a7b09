"""Comparisons at tiny sizes: rows, spread, the bound, claims, the same on the real engine."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentflow.bench.comparisons import Options, Row, comparison, comparison_names, read_results, run_comparison
from agentflow.bench.comparisons.bound import best_hit_rate, in_served_order
from agentflow.bench.comparisons.calibrating import calibrate
from agentflow.bench.comparisons.contenders import named, pbkv_oracle, with_options
from agentflow.bench.comparisons.loads import Load, pool_for, working_set
from agentflow.bench.comparisons.machine import machine
from agentflow.bench.comparisons.measure import Run, rows_of, select
from agentflow.bench.comparisons.parity import claims as parity_claims
from agentflow.bench.comparisons.pbkv import claims as pbkv_claims
from agentflow.bench.comparisons.real import RealBench, rotated, sweep_real
from agentflow.bench.comparisons.simulated import default_cost, record, sweep
from agentflow.bench.simulator import Arrivals, EngineSpec, simulate
from agentflow.bench.standard import STANDARD, Part, markdown, run_standard
from agentflow.bench.traces.model import Span, Trace, TraceCall, TraceWorkflow
from agentflow.engine.embedded import EmbeddedEngine
from agentflow.errors import EngineFailure, UsageError

TINY = Load(name="tiny", kind="hover", workflows=4, concurrency=2, scale=0.1, max_calls=5)


def run_of(policy: str, repetition: int, hit_rate: float, *, pressure: float = 2.0, **axes: Any) -> Run:
    figures = dict.fromkeys(
        (
            "ttft_p50", "e2e_mean", "job_mean", "throughput", "ttft_mean", "ttft_p99", "e2e_p99", "job_p99",
            "queued_mean", "hit_rate_device", "hit_rate_host", "evicted_tokens", "evicted_regretted_tokens",
            "prefetches", "prefetch_used_tokens", "prefetch_wasted_tokens", "retractions", "calls_rejected",
            "calls_aborted", "policy_errors",
        ),
        1.0,
    )  # fmt: skip
    figures |= {"hit_rate": hit_rate, "share_of_oracle": hit_rate}
    mode = axes.pop("mode", "simulated")
    job = axes.pop("job_mean", 1.0)
    load = axes.pop("load", "hover")
    return Run(
        load=load, policy=policy, pressure=pressure, repetition=repetition, pool_tokens=100, host_tokens=0,
        mode=mode, figures=figures | {"job_mean": job}, axes=axes,
    )  # fmt: skip


# ---------------------------------------------------------------------- measuring


def test_rows_hold_medians_spread_and_ratios_within_a_repetition() -> None:
    runs = [run_of("lru", i, h) for i, h in enumerate((0.2, 0.4, 0.5))]
    runs += [run_of("lfu", i, h) for i, h in enumerate((0.3, 0.4, 1.0))]
    lru, lfu = rows_of(runs)
    assert (lru.hit_rate, lru.repetitions, lru.spread["hit_rate"]) == (0.4, 3, [0.2, 0.5])
    assert lru.against_lru["hit_rate"] == [1.0, 1.0, 1.0]
    assert lfu.against_lru["hit_rate"] == pytest.approx([1.5, 1.0, 2.0])
    assert select([lru, lfu], policy="lfu") == [lfu]
    assert select([lru, lfu], hit_rate=lambda h: h < 0.3) == []


def test_rows_keep_places_apart() -> None:
    runs = [run_of("lru", 0, 0.2), run_of("lru", 0, 0.1, pressure=4.0), run_of("pbkv", 0, 0.3, noise=0.5)]
    runs += [run_of("pbkv", 0, 0.2, noise=1.0), run_of("lru", 0, 0.4, intensity=0.5)]
    rows = rows_of(runs)
    assert len(rows) == 5
    assert [r.against_lru["hit_rate"][0] for r in select(rows, policy="pbkv")] == pytest.approx([1.5, 1.0])
    assert rows[2].to_json()["noise"] == 0.5


def test_pressure_makes_the_pool_and_the_longest_call_bounds_it() -> None:
    needed = working_set(TINY.trace(0), TINY.concurrency)
    pool, pressure = pool_for(TINY, 1.0)
    assert pool == needed
    assert pressure == 1.0
    small, capped = pool_for(TINY, 1_000.0)
    assert small < pool
    assert capped == pytest.approx(needed / small, abs=0.01)
    assert TINY.trace(0) is TINY.trace(0)
    assert TINY.trace(1) != TINY.trace(0)


def test_workflows_of_the_first_wave_can_begin_one_after_another() -> None:
    apart = replace(TINY, stagger=0.5)
    plain, staggered = TINY.trace(0), apart.trace(0)
    moved = [a.calls[0].delay - b.calls[0].delay for a, b in zip(staggered.workflows, plain.workflows, strict=True)]
    assert moved == [0.0, 0.5, 0.0, 0.0], "two at once, so that only the second of them waits"
    assert [w.calls[1:] for w in staggered.workflows] == [w.calls[1:] for w in plain.workflows]


def test_working_set_counts_what_is_shared_once() -> None:
    common = Span("common", 100)
    workflows = tuple(
        TraceWorkflow(
            id=w, calls=(TraceCall(id="1", agent="a", prompt=(common, Span(w, 10)), output=(Span(f"{w}o", 5),)),)
        )
        for w in ("v", "w")
    )
    assert working_set(Trace(name="t", workflows=workflows), 2) == 130


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 50), st.floats(1.0, 8.0), st.sampled_from(["lru", "lifecycle", "belady", "fifo", "autellix"]))
def test_no_run_has_more_hits_than_were_possible(seed: int, asked: float, policy: str) -> None:
    trace = TINY.trace(seed % 5)
    pool, _ = pool_for(TINY, asked, seeds=5)
    result = simulate(
        trace, EngineSpec(pool_tokens=pool), default_cost(), [policy], arrivals=Arrivals(kind="closed", concurrency=2)
    )
    assert result.hit_rate <= best_hit_rate(trace, result, pool) + 1e-9


def test_the_bound_keeps_the_order_in_which_calls_were_served() -> None:
    trace = TINY.trace(0)
    result = simulate(trace, EngineSpec(pool_tokens=4_000), default_cost(), ["lru"], arrivals=TINY.arrivals())
    again = in_served_order(trace, result)
    first = min(result.calls, key=lambda c: (c.admitted, c.first_token))
    assert again.workflows[0].id == f"{first.workflow}/{first.call}"
    assert again.calls == trace.calls
    assert best_hit_rate(trace, result, 10**9) > best_hit_rate(trace, result, 150)


def test_contenders() -> None:
    trace = TINY.trace(0)
    assert [c.label for c in named(["lru", "no-such-policy", "lifecycle+ttl"])] == ["lru", "lifecycle+ttl"]
    assert named(["lifecycle+ttl"])[0].specs(trace) == ["lifecycle", "ttl"]
    assert named(["belady"])[0].simulated_only
    noisy = with_options("x", "pbkv", noise=0.5)
    assert noisy.axes == {"noise": 0.5}
    assert noisy.specs(trace) == [{"name": "pbkv", "noise": 0.5}]
    (told,) = pbkv_oracle().specs(trace)
    assert isinstance(told, dict)
    workflow = trace.workflows[0]
    assert told["predictor"]["future"](workflow.id, 1) == [c.agent for c in workflow.calls[1:]]
    assert [c.label for c in rotated(named(["lru", "lfu", "slru"]), 1)] == ["lfu", "slru", "lru"]


def test_moments_hold_what_plots_show() -> None:
    pool, pressure = pool_for(TINY, 4.0)
    found = record(TINY, named(["lru"])[0], pool, pressure)
    assert [w["workflow"] for w in found["workflows"]] == [w.id for w in TINY.trace(0).workflows]
    assert len(found["calls"]) == TINY.trace(0).calls
    assert found["decided"]["evict"] == len(found["decisions"]) + found["left_out"]["decisions"]
    for sample in found["memory"]["samples"]:
        held = sum(sample["owners"]) + sample["others"]
        assert sample["free"] + sample["private"] + held == pool
    json.dumps(found)


# ---------------------------------------------------------------------- comparisons


@pytest.mark.parametrize("name", ["baselines", "pbkv", "ttl"])
def test_a_simulated_comparison_gives_rows_and_claims(name: str, tmp_path: Path) -> None:
    said: list[str] = []
    results = run_comparison(name, Options(size="tiny", say=said.append))
    data = results.to_json()
    for row in data["rows"]:
        for column in (
            "load",
            "policy",
            "pressure",
            "repetitions",
            "hit_rate",
            "share_of_oracle",
            "ttft_p50",
            "e2e_mean",
        ):
            assert row[column] is not None
        assert 0 <= row["hit_rate"] <= row["share_of_oracle"] <= 1.0
        for figure in ("hit_rate", "share_of_oracle", "ttft_p50", "e2e_mean", "job_mean"):
            least, greatest = row["spread"][figure]
            assert least <= row[figure] <= greatest
        assert row["policy_errors"] == 0
        assert row["against_lru"]["hit_rate"][0] > 0
    for claim in data["claims"]:
        assert set(claim) == {"name", "target", "measured", "met", "note"}
    assert data["claims"]
    assert said
    assert data["seconds"] > 0
    path = tmp_path / "results.json"
    path.write_text(json.dumps(data))
    assert read_results(path)["rows"] == data["rows"]


def test_the_same_comparison_gives_the_same_figures() -> None:
    first, second = (run_comparison("ttl", Options(size="tiny")).rows for _ in range(2))
    assert first == second


def test_parity_claims_tell_differences() -> None:
    real = [("lru", 0.40, 10.0), ("lifecycle", 0.50, 9.0), ("lfu", 0.45, 9.5)]
    same = [run_of(p, 0, h, mode="engine", job_mean=j) for p, h, j in real]
    close = [run_of(p, 0, h + 0.015, job_mean=j * 1.2) for p, h, j in real]
    assert all(c.met for c in parity_claims(rows_of(same + close)))
    far = [run_of("lru", 0, 0.55, job_mean=14.0), *close[1:]]
    verdicts = {c.name: (c.met, c.measured) for c in parity_claims(rows_of(same + far))}
    assert verdicts["hit rate of lru in the simulator"] == (False, pytest.approx(15.0))
    assert verdicts["ranking of policies"] == (False, 2.0)
    assert verdicts["completion time in the simulator, calibrated"] == (False, pytest.approx(40.0))


def test_regret_above_the_line_is_told() -> None:
    def rows(middle: float, last: float) -> list[Row]:
        runs = [run_of(p, 0, h, load=load) for load in ("hover", "financebench") for p, h in
                (("lru", 0.3), ("lifecycle", 0.35), ("kvflow", 0.3), ("pbkv", 0.6))]  # fmt: skip
        for name, worse in (("pbkv", 0.0), ("pbkv-aggressive", 0.1)):
            runs += [run_of(name, 0, h - worse * n, noise=n) for n, h in ((0.0, 0.6), (0.5, middle), (1.0, last))]
        return rows_of(runs)

    linear = {c.name: c for c in pbkv_claims(rows(0.5, 0.4))}
    assert linear["regret under noise"].met
    assert linear["PBKV with forecasts of pure chance against lifecycle"].met
    assert linear["aggressive prefetch under noise"].met
    assert linear["hit rate of PBKV against lru"].measured == pytest.approx(2.0)
    assert not linear["hit rate of PBKV where lru has about 10 %"].met
    early = {c.name: c for c in pbkv_claims(rows(0.4, 0.3))}
    assert not early["regret under noise"].met
    assert early["regret under noise"].measured == pytest.approx(5.0)
    assert not early["PBKV with forecasts of pure chance against lifecycle"].met


def test_wrong_uses_are_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there are baselines, cachesage, parity, pbkv, ttl"):
        comparison("speed")
    with pytest.raises(UsageError, match="parity runs in mode engine only"):
        run_comparison("parity", Options())
    with pytest.raises(UsageError, match="repetitions must be at least 1"):
        Options(repetitions=0)
    bad = tmp_path / "bad.json"
    for text, said in (("{", "is not JSON"), ('{"rows": []}', "holds no results"), ("[]", "holds no results")):
        bad.write_text(text)
        with pytest.raises(UsageError, match=said):
            read_results(bad)
    with pytest.raises(UsageError, match="cannot read"):
        read_results(tmp_path / "absent.json")
    bad.write_text(json.dumps({"format": "agentflow-bench", "version": 99, "rows": []}))
    with pytest.raises(UsageError, match="newer agentflow"):
        read_results(bad)


def test_every_comparison_says_what_it_is() -> None:
    for name in comparison_names():
        found = comparison(name)
        assert found.name == name
        assert found.title
        assert found.modes
    assert machine()["cores"] >= 1


# ---------------------------------------------------------------------- the real engine


def test_sweep_on_the_real_engine(engine: EmbeddedEngine) -> None:
    bench = RealBench(engine=engine, has_host=True, say=print)
    contenders = named(["lru", "lifecycle", "belady"])
    pool, pressure = pool_for(TINY, 2.0)
    try:
        runs = sweep_real(Options(), bench, TINY, contenders, pool, pressure, repetitions=1)
    finally:
        bench.control("configure", {"policies": ["lifecycle"], "reset": True})
    assert [r.policy for r in runs] == ["lru", "lifecycle"], "what cannot travel to an engine takes no part"
    simulated = sweep(Options(), TINY, contenders[:2], pool, pressure, repetitions=1)
    for real, modelled in zip(runs, simulated, strict=True):
        assert real.mode == "engine"
        assert real.figures["hit_rate"] == pytest.approx(modelled.figures["hit_rate"], abs=0.1)
        assert 0 < real.figures["share_of_oracle"] <= 1


def test_calibration_measures_this_engine(engine: EmbeddedEngine) -> None:
    cost = calibrate(engine, lengths=(64, 256), batches=(1, 2), steps=8, rounds=1)
    assert cost.decode(1, 100) > 0
    assert cost.decode(1, 100, steps=20) > cost.decode(1, 100, steps=2)
    assert cost.p_pass + cost.p_request + cost.p_token + cost.p_pair > 0


@pytest.mark.slow
def test_parity_runs_on_an_engine_of_ones_own(engine: EmbeddedEngine) -> None:
    @contextlib.contextmanager
    def lent(pool_tokens: int, host_ratio: float) -> Iterator[EmbeddedEngine]:
        assert pool_tokens <= 4_096
        yield engine

    data = run_comparison("parity", Options(mode="engine", size="tiny", engine_factory=lent)).to_json()
    assert {r["mode"] for r in data["rows"]} == {"engine", "simulated"}
    assert [c["name"] for c in data["claims"]][-2:] == [
        "ranking of policies",
        "completion time in the simulator, calibrated",
    ]


# ---------------------------------------------------------------------- the standard set


def test_the_standard_set_writes_a_page_and_tells_failures(tmp_path: Path) -> None:
    def no_engine(pool_tokens: int, host_ratio: float) -> Any:
        raise EngineFailure("no engine | here")

    said: list[str] = []
    options = Options(size="tiny", say=said.append, engine_factory=no_engine)
    found = run_standard([Part("parity", "engine"), Part("ttl", "simulated")], tmp_path, options)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "parity-engine.json", "report.csv", "report.html", "report.json", "ttl-simulated.json",
    ]  # fmt: skip
    page = markdown(found, command="make bench", facts={"processor": "a | b", "cores": 2})
    assert "Failed: EngineFailure: no engine | here" in page
    assert "`agentflow bench ttl --simulated`" in page
    for claim in found[1]["claims"]:
        assert claim["name"] in page
    tables = [line for line in page.splitlines() if line.startswith("|")]
    rows = [line for line in tables if line.startswith(("| swebench", "| bfcl"))]
    assert len({line.count("|") for line in rows}) == 1
    assert "ttl --simulated ..." in said[2]
    assert {p.comparison for p in STANDARD} == set(comparison_names())
