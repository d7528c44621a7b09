"""The benchmarks of policies run, and their findings hold together; what policies cost."""

from __future__ import annotations

import pytest

from agentflow.bench import policy_cost
from agentflow.bench.policies import EXPERIMENTS, run_experiments
from agentflow.bench.policies.scheduler import admission, fairness
from agentflow.bench.simulator import EngineSpec, RooflineCost, simulate
from agentflow.bench.simulator.config import Arrivals
from agentflow.bench.traces.generators import Plan, generate
from agentflow.errors import UsageError

RUN = {e.policy: e.run for e in EXPERIMENTS}


@pytest.mark.parametrize(
    "policy", ["safety", *(pytest.param(p, marks=pytest.mark.slow) for p in ("memo", "speculation"))]
)
def test_findings_of_the_framework(policy: str) -> None:
    found = RUN[policy](1, True)
    assert found.met, found
    assert all(least <= found.figures[n][0] <= most for n, (least, most) in found.spread.items())


def test_one_policy_alone_and_one_that_is_not_there() -> None:
    assert [f.policy for f in run_experiments(quick=True, only=["safety"])] == ["safety"]
    with pytest.raises(UsageError, match="no experiment with adapters here; there are memo"):
        run_experiments(only=["safety", "adapters"])
    with pytest.raises(UsageError, match="there are shaping, fairness, admission, adapters"):
        run_experiments(engine=True, only=["memo"])


@pytest.mark.slow
@pytest.mark.parametrize("experiment", [fairness, admission])
def test_findings_of_the_scheduler(experiment: object) -> None:
    assert callable(experiment)
    found = experiment(1, True)
    assert found.met, found


@pytest.mark.parametrize("name", policy_cost.POLICIES)
def test_state_stays_within_its_bound(name: str) -> None:
    """Sizes after 6,000 and after 15,000 observations: what is bounded by the newest workflows stays so."""
    few, many = (policy_cost.measure(name, events=n, samples=2).state_bytes for n in (6_000, 15_000))
    if name == "cachesage":
        assert many <= 25_000
    assert many <= max(25_000, 3 * few)  # per workflow followed: these grow until 10,000 are


@pytest.mark.slow
@pytest.mark.parametrize("name", policy_cost.POLICIES)
def test_state_after_a_million_observations(name: str) -> None:
    assert policy_cost.measure(name, samples=2).state_bytes <= 8_000_000


def test_a_simulated_engine_holds_calls_back_and_serves_all_of_them() -> None:
    trace = generate("swebench", Plan(workflows=6, scale=0.3, max_calls=4, max_prompt=2_000))
    cost = RooflineCost.of("qwen3-14b", "a100-80g")
    policies = [{"name": "admission", "high": 0.5, "low": 0.3}, "lru"]
    result = simulate(
        trace, EngineSpec(pool_tokens=3_000), cost, policies, arrivals=Arrivals(kind="closed", concurrency=6)
    )
    assert result.counters["calls_held"] > 0
    assert len(result.workflows) == len(trace.workflows)
    assert result.counters["policy_errors"] == 0
    again = simulate(
        trace, EngineSpec(pool_tokens=3_000), cost, policies, arrivals=Arrivals(kind="closed", concurrency=6)
    )
    assert again.seconds == result.seconds


def test_a_simulated_engine_computes_anchors_ahead() -> None:
    trace = generate("team-mmlu", Plan(workflows=40))
    cost = RooflineCost.of("qwen3-14b", "a100-80g")
    result = simulate(
        trace,
        EngineSpec(pool_tokens=4_500),
        cost,
        [{"name": "cachesage", "weight": 0.0}],
        arrivals=Arrivals(kind="closed", concurrency=2),
    )
    assert result.counters["warm_ups"] > 0
    assert len(result.workflows) == 40
    assert all(c.outcome == "done" for c in result.calls)
