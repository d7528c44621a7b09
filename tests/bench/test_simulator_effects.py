"""Prefetches in the simulator: what gives way to them, and when they are carried out. All worked by hand."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import pytest

from agentflow.bench.simulator import Arrivals, CalibratedCost, EngineSpec, SimResult, simulate
from agentflow.bench.simulator.content import Content, Links
from agentflow.bench.simulator.effects import carry_out
from agentflow.bench.simulator.speed import load
from agentflow.bench.simulator.tree import Node, Tree
from agentflow.bench.traces.model import Span, Trace, TraceCall, TraceWorkflow
from agentflow.cache.ledger import Ledger
from agentflow.cache.policy import Policy, Prefetch
from agentflow.runtime import Runtime

Displace = Literal["nothing", "retired", "active"]

#: A second a token of prefill, a hundredth a decode step, a thousandth a token moved between the tiers.
COST = CalibratedCost(p_token=1.0, d_pass=0.01, t_token=0.001)
HERE = "tests_bench_simulator_effects_policies"


class FetchOnce(Policy):
    """Wants the first node made back on the device, once, as soon as it is asked after ``at`` seconds."""

    name: ClassVar[str] = "fetch-once"

    def __init__(self, ledger: Ledger, clock: Callable[[], float], *, at: float, displace: Displace) -> None:
        super().__init__(ledger, clock)
        self.at = at
        self.displace: Displace = displace

    def act(self) -> list[Prefetch]:
        if self.clock() < self.at:
            return []
        self.at = float("inf")
        return [Prefetch(1, "because", displace=self.displace)]


class FetchAlways(Policy):
    """Wants every node back on the device whenever it is asked; notes when that is."""

    name: ClassVar[str] = "fetch-always"
    asked: ClassVar[list[float]] = []

    def act(self) -> list[Prefetch]:
        self.asked.append(self.clock())
        return [Prefetch(n, "because", value=float(n), displace="active") for n in range(1, 30)]


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let policies of this file be named as ``module:Class``."""
    module = types.ModuleType(HERE)
    for cls in (FetchOnce, FetchAlways):
        setattr(module, cls.__name__, cls)
    monkeypatch.setitem(sys.modules, HERE, module)
    monkeypatch.setattr(FetchAlways, "asked", [])


def workflow(name: str, size: int, arrival: float, *, again_after: float | None = None) -> TraceWorkflow:
    """One call whose prompt is ``size`` tokens of the workflow's own; the same once more after a wait, if there is
    one: until then the workflow is alive."""
    prompt = (Span(name, size),)
    calls = [TraceCall(id="1", agent="a", prompt=prompt, output=(Span(f"{name}/out", 1),))]
    if again_after is not None:
        calls.append(TraceCall(id="2", agent="a", prompt=prompt, output=(), wait_for=("1",), delay=again_after))
    return TraceWorkflow(id=name, calls=tuple(calls), arrival=arrival)


def serve(*workflows: TraceWorkflow, policies: Any, pool: int = 100, **spec: Any) -> SimResult:
    return simulate(
        Trace(name="t", workflows=workflows), EngineSpec(pool_tokens=pool, host_tokens=400, **spec), COST, policies
    )


def cached(result: SimResult, workflow: str, call: str) -> tuple[int, int]:
    """Tokens found on the device and on the host."""
    (found,) = (c for c in result.calls if (c.workflow, c.call) == (workflow, call))
    return found.cached_device, found.cached_host


# -- what gives way ------------------------------------------------------------------------------------


@pytest.mark.parametrize("displace", ["nothing", "retired", "active"])
@pytest.mark.parametrize("alive", [False, True])
def test_retired_kv_gives_way_and_active_kv_where_the_effect_says_so(displace, alive):
    """Pool 100. q (80) demotes p (40) and ends, or waits for its second call; 20 are free when p is wanted at 200."""
    q = workflow("q", 80, 100.0, again_after=400.0 if alive else None)
    once = {"name": f"{HERE}:FetchOnce", "at": 200.0, "displace": displace}
    result = serve(workflow("p", 40, 0.0), q, workflow("end", 1, 300.0), policies=["lifecycle", once])
    done = displace == "active" or (displace == "retired" and not alive)
    assert (result.counters["prefetches"], result.counters["prefetches_refused"]) == (int(done), int(not done))
    assert result.counters["demote_tokens"] == 40 + 80 * done + (40 if done and alive else 0)
    if alive:
        assert cached(result, "q", "2") == ((0, 79) if done else (79, 0))


@pytest.mark.parametrize(("wanted", "fits"), [(40, True), (50, False)])
def test_retired_leaves_go_one_by_one_and_stay_gone_when_they_do_not_suffice(wanted, fits):
    """q (60, alive) and r (20, over) demoted p, and 20 are free. Without r there are 40: enough for p of 40, which
    fills the pool and makes room for the last call."""
    once = {"name": f"{HERE}:FetchOnce", "at": 250.0, "displace": "retired"}
    made = [workflow("p", wanted, 0.0), workflow("q", 60, 100.0, again_after=500.0), workflow("r", 20, 200.0)]
    result = serve(*made, workflow("end", 1, 300.0), policies=["lifecycle", once])
    assert result.counters["prefetches"] == int(fits)
    assert result.counters["demote_tokens"] == wanted + 20 + (wanted if fits else 0)
    assert cached(result, "q", "2") == (59, 0)


@pytest.mark.parametrize("displace", ["retired", "active"])
def test_what_a_load_hangs_on_is_kept(displace):
    """x (30) hangs on p (30), which is all that could be evicted; a call holds 50 of 100, so 20 are free."""
    runtime = Runtime(["lifecycle"], clock=lambda: 0.0)
    tree, links = Tree(EngineSpec(pool_tokens=100, host_tokens=300), runtime), Links()
    path = links.content((Span("p", 30), Span("x", 30)))
    x = put(tree, path)
    p = tree.match(links.content((Span("p", 30), Span("y", 30))), 60).node
    assert tree.make_room(50)
    assert (p.device, x.device, x.host) == (True, False, True)
    tree.free -= 50
    carry_out(tree, [Prefetch(x.record.id, "because", displace=displace)], lambda node, tokens: tree.lock(node))
    assert runtime.counters["prefetches_refused"] == 1
    assert (p.device, x.device, tree.free) == (True, False, 20)
    assert tree.check() == []


def test_all_that_a_prefetch_brings_is_settled():
    """x hangs on p, and both are on the host: one prefetch brings both, and a call that reads p uses 30 of it."""
    runtime = Runtime(["lifecycle"], clock=lambda: 0.0)
    tree, links = Tree(EngineSpec(pool_tokens=100, host_tokens=300), runtime), Links()
    x = put(tree, links.content((Span("p", 30), Span("x", 20))))
    p = tree.match(links.content((Span("p", 30),)), 30).node
    assert tree.make_room(100)
    loads: list[tuple[Node, int]] = []
    carry_out(tree, [Prefetch(x.record.id, "because")], lambda node, tokens: loads.append((node, tokens)))
    assert loads == [(x, 50)]
    tree.touch(p, runtime.call("w", "a", None, "r"))
    assert tree.make_room(100)
    assert runtime.counters["prefetch_used_tokens"] == 30
    assert runtime.counters["prefetch_wasted_tokens"] == 20
    assert {d.request for d in runtime.log.since(0) if d.kind == "demote"} == {None}


def put(tree: Tree, content: Content) -> Node:
    """Compute and cache a content, and copy it to the host."""
    assert tree.make_room(content.tokens)
    tree.free -= content.tokens
    node, _ = tree.insert(content, content.tokens, protected=0, inserted=0)
    for written in tree.writes:
        tree.unlock(written)
    tree.writes.clear()
    return node


# -- when ----------------------------------------------------------------------------------------------


def test_nothing_is_fetched_into_what_a_prefill_cut_in_chunks_was_promised():
    """Pool 200. q (185) comes in chunks of 50. The third demotes p (20) and r (60), and leaves 50 free, of which the
    last needs 35: p, fetched between the two, would leave 30."""
    made = [workflow("p", 20, 0.0), workflow("r", 60, 50.0), workflow("q", 185, 200.0)]
    result = serve(*made, pool=200, policies=[f"{HERE}:FetchAlways"], chunked_prefill=50)
    assert [c.outcome for c in result.calls] == ["done"] * 3
    assert not [t for t in FetchAlways.asked if 200.0 < t < 385.0]
    assert [t for t in FetchAlways.asked if 100.0 < t < 200.0]


def test_nothing_is_fetched_while_a_call_waits():
    """One call runs at a time: b waits while a decodes, from the end of a's prefill at 130 to its end."""
    held = TraceCall(id="1", agent="a", prompt=(Span("a", 30),), output=(Span("a/out", 50),))
    made = [workflow("p", 40, 0.0), TraceWorkflow(id="a", calls=(held,), arrival=100.0), workflow("b", 30, 110.0)]
    result = serve(*made, pool=200, policies=[f"{HERE}:FetchAlways"], max_running=1)
    end = next(c.finished for c in result.calls if c.workflow == "a")
    assert end == pytest.approx(130.0 + 49 * 0.01)
    assert not [t for t in FetchAlways.asked if 110.0 <= t < end]
    assert [t for t in FetchAlways.asked if t > end]


def test_displacing_active_kv_makes_a_difference_under_pressure():
    """The same load with one policy and the other: more is fetched where active KV gives way, and more in vain."""
    fast = CalibratedCost(p_pass=0.01, p_token=1e-5, d_pass=0.01, d_request=0.001, t_pass=0.01, t_token=1e-6)
    arrivals = Arrivals(kind="closed", concurrency=8)
    spec = EngineSpec(pool_tokens=9_000, host_tokens=60_000)
    plain, aggressive = (
        simulate(load(workflows=24, calls=6), spec, fast, [policy], arrivals=arrivals).counters
        for policy in ("pbkv", "pbkv-aggressive")
    )
    assert 0 < plain["prefetches"] < aggressive["prefetches"]
    assert 0 < plain["prefetch_wasted_tokens"] < aggressive["prefetch_wasted_tokens"]
