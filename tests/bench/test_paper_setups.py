"""The set-ups like the papers': recorded runs as loads, bounded running calls, and what the order of calls is worth."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentflow.bench.comparisons import Options
from agentflow.bench.comparisons import recorded as recorded_module
from agentflow.bench.comparisons.contenders import named
from agentflow.bench.comparisons.loads import Load, pool_for
from agentflow.bench.comparisons.measure import rows_of, select
from agentflow.bench.comparisons.paper import few_at_once, pbkv_engine_loads, pbkv_places
from agentflow.bench.comparisons.recorded import RECORDED, has_recorded, recorded
from agentflow.bench.comparisons.simulated import default_cost, engine_spec, sweep
from agentflow.bench.simulator import simulate
from agentflow.errors import UsageError

CROWD = Load(name="crowd", kind="swebench", workflows=24, concurrency=16, max_calls=14, max_prompt=8_000, max_running=2)


def test_an_engine_runs_no_more_calls_at_once_than_its_load_allows() -> None:
    pool, _ = pool_for(CROWD, 2.0)
    result = simulate(CROWD.trace(0), engine_spec(CROWD, pool), default_cost(), ["lru"], arrivals=CROWD.arrivals())
    moments = sorted(
        [(c.admitted, 1) for c in result.calls] + [(c.finished, -1) for c in result.calls], key=lambda m: (m[0], m[1])
    )
    running = most = 0
    for _, change in moments:
        running += change
        most = max(most, running)
    assert most == 2
    assert engine_spec(Load(name="free", kind="hover", workflows=1), 100_000).max_running > 1_000


def test_with_more_live_workflows_than_the_pool_holds_the_order_of_calls_saves_what_lru_loses() -> None:
    pool, pressure = pool_for(CROWD, 4.0, seeds=2)
    contenders = named(["lru", "lifecycle", "lifecycle+by-workflow", "pbkv-queue"])
    rows = rows_of(sweep(Options(), CROWD, contenders, pool, pressure, repetitions=2))
    hits = {r.policy: r.hit_rate for r in rows}
    jobs = {r.policy: r.job_mean for r in rows}
    assert hits["pbkv-queue"] > 1.3 * hits["lru"]
    assert hits["lifecycle+by-workflow"] > 1.1 * hits["lifecycle"]
    assert jobs["pbkv-queue"] < 0.95 * jobs["lru"]
    assert all(r.more["calls_aborted"] == r.more["policy_errors"] == 0.0 for r in rows)
    assert len(select(rows, policy="lru")) == 1


@pytest.mark.parametrize("kind", sorted(RECORDED))
def test_recorded_runs_are_cut_and_chosen_by_seed(kind: str) -> None:
    if kind == "kv-cache-tester":
        pytest.skip("reading it takes a quarter of a minute")
    if not has_recorded(kind):
        pytest.skip(f"needs {RECORDED[kind].path}, which is not part of the repository")
    trace = recorded(kind, 12, seed=1, max_calls=9, max_prompt=9_000)
    assert len(trace.workflows) == 12
    for workflow in trace.workflows:
        ids = [c.id for c in workflow.calls]
        assert 2 <= len(ids) <= 9
        assert all(c.prompt_tokens <= 9_000 and set(c.wait_for) <= set(ids) for c in workflow.calls)
    assert recorded(kind, 12, seed=1, max_calls=9, max_prompt=9_000) == trace
    assert recorded(kind, 12, seed=2, max_calls=9, max_prompt=9_000) != trace
    load = Load(name=kind, kind=kind, workflows=12, max_calls=9, max_prompt=9_000)
    assert load.trace(1) == trace


def test_recorded_runs_that_are_not_there_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(recorded_module, "DATA", tmp_path)
    assert not has_recorded("mini-swe-agent")
    with pytest.raises(UsageError, match="not part of the repository"):
        recorded("mini-swe-agent", 3)


@pytest.mark.parametrize("size", ["tiny", "quick", "standard"])
def test_every_size_has_dynamic_and_static_loads_and_memory_from_ample_to_starved(size: str) -> None:
    options = Options(size=size)  # type: ignore[arg-type]
    places = pbkv_places(options)
    kinds = {p.load.kind for p in places}
    assert kinds == {"hover", "swebench", "financebench", "financebench-pages-first"}
    names = [p.load.name for p in places] + [load.name for load in few_at_once(options)]
    assert len(names) == len(set(names))
    if size == "standard":
        swebench = next(p for p in places if p.load.name == "swebench")
        assert min(swebench.pressures) <= 1.0
        assert max(swebench.pressures) >= 8.0
        assert {p.model for p in places} == {"qwen3-14b", "qwen3-32b"}
    assert all(load.max_running is not None for load in pbkv_engine_loads(options))
