"""The simulator's edges: wrong arguments, percentiles, and the command that measures its speed."""

from __future__ import annotations

from typing import Any

import pytest

from agentflow.bench.simulator import Arrivals, CalibratedCost, EngineSpec, SimResult, percentile, simulate
from agentflow.bench.simulator.speed import main
from agentflow.bench.traces.model import Span, Trace, TraceCall, TraceWorkflow
from agentflow.errors import UsageError


def call(name: str, wait_for: tuple[str, ...] = ()) -> TraceCall:
    return TraceCall(id=name, agent="a", prompt=(Span("p", 1),), output=(Span(f"out{name}", 1),), wait_for=wait_for)


def workflow(name: str, *calls: TraceCall) -> TraceWorkflow:
    return TraceWorkflow(id=name, calls=calls)


def serve(*workflows: TraceWorkflow, policies: Any = ("lru",), engines: int = 1) -> SimResult:
    trace = Trace(name="t", workflows=workflows)
    return simulate(trace, EngineSpec(pool_tokens=1_000), CalibratedCost(p_pass=1.0), policies, engines=engines)


def test_errors_say_what_is_wrong():
    with pytest.raises(UsageError, match="waits for 9, which is not before it"):
        serve(workflow("w", call("1", wait_for=("9",))))
    with pytest.raises(UsageError, match="two calls 1"):
        serve(workflow("w", call("1"), call("1")))
    with pytest.raises(UsageError, match="two workflows w"):
        serve(workflow("w"), workflow("w"))
    with pytest.raises(UsageError, match="unknown policy 'nothing'"):
        serve(workflow("w", call("1")), policies=["nothing"])
    with pytest.raises(UsageError, match="at least 16"):
        EngineSpec(pool_tokens=3)
    with pytest.raises(UsageError, match="must be positive"):
        Arrivals(rate=0.0)
    with pytest.raises(UsageError, match="at least one engine"):
        serve(workflow("w", call("1")), engines=0)


def test_percentiles():
    assert percentile([], 50) == 0.0
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([0.0, 10.0], 90) == pytest.approx(9.0)


def test_the_speed_command_runs(capsys):
    assert main(["--workflows", "20", "--calls", "3", "--within", "300"]) == 0
    assert capsys.readouterr().out.count('"calls": 60') == 2
    assert main(["--workflows", "5", "--calls", "2", "--policies", "lru", "--within", "0"]) == 1
