"""The simulated engine: hand-worked runs, and properties that hold for any load."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentflow.bench.simulator import (
    Arrivals,
    CalibratedCost,
    EngineSpec,
    SimResult,
    engine_of,
    informed,
    simulate,
)
from agentflow.bench.simulator import run as run_module
from agentflow.bench.simulator.speed import load
from agentflow.bench.traces.model import Span, Trace, TraceCall, TraceTool, TraceWorkflow
from agentflow.cache.policy import (
    CallArrived,
    CallFinished,
    Evicted,
    Loaded,
    Observation,
    Policy,
    PolicySpec,
    PoolState,
    Prefetch,
    WaitingCall,
    policy_names,
)
from agentflow.events import AgentStarted, Event, StateSuperseded, ToolEnded, ToolStarted, WorkflowEnded

#: A second a token of prefill, a hundredth a decode step, a thousandth a token moved between the tiers.
COST = CalibratedCost(p_token=1.0, d_pass=0.01, t_token=0.001)


def call(name: str, prompt: list[tuple[str, int]], output: int, **fields: Any) -> TraceCall:
    spans = tuple(Span(*s) for s in prompt)
    wrote = (Span(f"out/{name}", output),) if output else ()
    return TraceCall(id=name, agent=fields.pop("agent", "a"), prompt=spans, output=wrote, **fields)


def workflow(name: str, *calls: TraceCall, arrival: float = 0.0) -> TraceWorkflow:
    return TraceWorkflow(id=name, calls=calls, arrival=arrival)


def trace(*workflows: TraceWorkflow) -> Trace:
    return Trace(name="t", workflows=workflows)


def serve(*workflows: TraceWorkflow, pool: int = 1_000, policies: Any = ("lru",), **fields: Any) -> SimResult:
    spec = EngineSpec(pool_tokens=pool, **{k: fields.pop(k) for k in list(fields) if k in EngineSpec.__slots__})
    return simulate(trace(*workflows), spec, fields.pop("cost", COST), policies, **fields)


class Watcher(Policy):
    """Remembers what it observes."""

    name: ClassVar[str] = "watcher"
    wants_pool_state: ClassVar[bool] = True
    seen: ClassVar[list[tuple[float, Observation]]] = []

    def observe(self, observation: Observation) -> None:
        self.seen.append((self.clock(), observation))


class Shortest(Policy):
    """Short prompts first."""

    name: ClassVar[str] = "shortest"

    def score_call(self, waiting: WaitingCall) -> tuple[float, ...]:
        return (float(waiting.tokens),)


class Idle(Policy):
    """Is asked for effects, and wants none: has the engine decode in short stretches."""

    name: ClassVar[str] = "idle"

    def act(self) -> tuple[()]:
        return ()


class FetchAll(Policy):
    """Wants every node back on the device."""

    name: ClassVar[str] = "fetch-all"

    def act(self) -> list[Prefetch]:
        return [Prefetch(n, "because", value=float(n)) for n in range(1, 30)]


HERE = "tests_bench_simulator_policies"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let policies of this file be named as ``module:Class``."""
    import sys
    import types

    module = types.ModuleType(HERE)
    for cls in (Watcher, Shortest, Idle, FetchAll):
        setattr(module, cls.__name__, cls)
    monkeypatch.setitem(sys.modules, HERE, module)
    monkeypatch.setattr(Watcher, "seen", [])


# -- hand-worked ---------------------------------------------------------------------------------------


def test_one_call_takes_its_prefill_and_its_decode_steps():
    """10 tokens of prompt give the first of 5 tokens after 10 s; 4 decode steps give the rest."""
    (only,) = serve(workflow("w", call("c", [("p", 10)], 5))).calls
    assert (only.ttft, only.e2e) == (pytest.approx(10.0), pytest.approx(10.04))
    assert (only.prompt_tokens, only.output_tokens, only.cached_device) == (10, 5, 0)


def test_a_following_call_finds_prompt_and_answer_but_for_the_last_token():
    """The KV of the last token sampled is never computed: 10 + 5 - 1 of the 17 tokens are cached."""
    first = call("1", [("p", 10)], 5)
    second = call("2", [("p", 10), ("out/1", 5), ("q", 2)], 1, wait_for=("1",), delay=3.0)
    result = serve(workflow("w", first, second))
    one, two = result.calls
    assert two.arrived == pytest.approx(one.finished + 3.0)
    assert two.cached_device == 14
    assert two.ttft == pytest.approx(3.0)
    assert result.hit_rate == pytest.approx(14 / 27)
    assert result.workflows[0].seconds == pytest.approx(10.04 + 3.0 + 3.0)


def test_a_prompt_cached_to_its_end_computes_its_last_token():
    again = [call(str(n), [("p", 10)], 1, wait_for=(str(n - 1),) if n else ()) for n in range(2)]
    assert serve(workflow("w", *again)).calls[1].cached_device == 9


def test_calls_that_come_together_are_prefilled_together_and_decoded_together():
    a, b = workflow("a", call("1", [("p", 10)], 3)), workflow("b", call("1", [("q", 20)], 5))
    result = serve(a, b)
    assert [c.ttft for c in result.calls] == [pytest.approx(30.0)] * 2
    assert [c.e2e for c in result.calls] == [pytest.approx(30.02), pytest.approx(30.04)]
    assert result.decode_steps == 4


def test_prefill_goes_before_decode_at_the_step_after_an_arrival():
    """b comes in the third decode step of a, is prefilled after it, and a goes on with b."""
    a = workflow("a", call("1", [("p", 10)], 101))
    b = workflow("b", call("1", [("q", 5)], 1), arrival=10.025)
    result = serve(a, b)
    done = {c.workflow: c for c in result.calls}
    assert done["b"].admitted == pytest.approx(10.03)
    assert done["b"].finished == pytest.approx(15.03)
    assert done["a"].finished == pytest.approx(10.0 + 1.0 + 5.0)


def test_a_long_prefill_is_cut_in_chunks_and_others_join_its_last():
    a = workflow("a", call("1", [("p", 25)], 1))
    b = workflow("b", call("1", [("q", 4)], 1), arrival=1.0)
    result = serve(a, b, chunked_prefill=10)
    done = {c.workflow: c for c in result.calls}
    assert done["a"].ttft == pytest.approx(29.0)
    assert done["b"].first_token == pytest.approx(29.0)
    assert result.passes == 3


def test_requests_beyond_the_limit_wait_for_a_place():
    result = serve(*(workflow(n, call("1", [(n, 10)], 11)) for n in "abc"), max_running=2)
    assert sorted(round(c.queued, 2) for c in result.calls) == [0.0, 0.0, 20.1]


def test_admission_keeps_memory_for_the_answers_of_running_calls():
    """Each needs 10 + 30 of 64 slots: with the answers foreseen, the second waits until the first is over."""
    result = serve(workflow("a", call("1", [("p", 10)], 30)), workflow("b", call("1", [("q", 10)], 30)), pool=64)
    assert result.retractions == 0
    assert [round(c.queued, 2) for c in result.calls] == [0.0, 10.29]


def test_without_foresight_decode_runs_out_of_memory_and_sends_one_back():
    """The newest of equals with the longer prompt is retracted, and starts over when the first is done."""
    result = serve(
        workflow("a", call("1", [("p", 10)], 30)),
        workflow("b", call("1", [("q", 11)], 30)),
        pool=64,
        ignore_eos=False,
        new_token_ratio=0.1,
        min_new_token_ratio=0.1,
    )
    done = {c.workflow: c for c in result.calls}
    assert result.retractions == 1
    assert (done["a"].retracted, done["b"].retracted) == (0, 1)
    assert done["a"].finished < done["b"].finished
    assert {c.output_tokens for c in result.calls} == {30}
    assert done["b"].outcome == "done"


def test_a_prompt_longer_than_the_pool_is_refused_and_its_workflow_goes_on():
    result = serve(workflow("w", call("1", [("p", 200)], 5), call("2", [("q", 10)], 1, wait_for=("1",))), pool=100)
    assert [c.outcome for c in result.calls] == ["rejected", "done"]
    summary = result.summary()
    assert (summary["calls"], summary["calls_rejected"], summary["prompt_tokens"]) == (1, 1, 10)


def test_least_recently_used_goes_first_answer_before_prompt():
    """Pool 100: a and b hold 29 each (20 of prompt, 9 of answer). c needs 60, so that 18 must go: the answer of a,
    then its prompt, which is older than the answer of b. a then computes its prompt anew, b does not."""
    ask = [workflow(n, call("1", [(n, 20)], 10), arrival=40.0 * i) for i, n in enumerate("ab")]
    big = workflow("c", call("1", [("c", 60)], 1), arrival=80.0)
    again = [workflow(f"{n}2", call("1", [(n, 20)], 1), arrival=200.0 + 40 * i) for i, n in enumerate("ba")]
    result = serve(*ask, big, *again, pool=100)
    done = {c.workflow: c for c in result.calls}
    assert done["b2"].cached_device == 19
    assert done["a2"].cached_device == 0
    assert result.counters["evict_regretted_tokens"] == 20


def test_a_finished_workflow_goes_before_one_that_waits_for_its_tool():
    waiting = workflow("waits", call("1", [("p", 40)], 1), call("2", [("p", 40)], 1, wait_for=("1",), delay=300.0))
    ended = workflow("ends", call("1", [("q", 40)], 1), arrival=50.0)
    third = workflow("third", call("1", [("r", 40)], 1), arrival=100.0)
    found = {p: serve(waiting, ended, third, pool=100, policies=[p]).cached_tokens for p in ("lru", "lifecycle")}
    assert found == {"lru": 0, "lifecycle": 39}


def test_what_leaves_the_device_is_found_on_the_host_and_loaded_in_time():
    """Pool 100, host 200: p is written through, demoted for q, and loaded back: 59 tokens in 0.059 s before the
    prefill of the last."""
    first = [workflow(n, call("1", [(n, 60)], 1), arrival=100.0 * i) for i, n in enumerate("pq")]
    again = workflow("p2", call("1", [("p", 60)], 1), arrival=300.0)
    result = serve(*first, again, pool=100, host_tokens=200)
    back = result.calls[-1]
    assert (back.cached_device, back.cached_host) == (0, 59)
    assert back.ttft == pytest.approx(1.0 + 0.059)
    assert result.counters["demote_tokens"] == 120
    assert result.counters["demote_regretted_tokens"] == 59
    assert result.counters["evict_tokens"] == 0
    overlapping = serve(
        *first, again, pool=100, host_tokens=200, cost=CalibratedCost(p_token=1.0, t_token=0.001, load_overlaps=True)
    )
    assert overlapping.calls[-1].ttft == pytest.approx(1.0)


def test_a_full_host_tier_drops_its_own_least_recently_used():
    """The host holds one of them: q's copy pushes out p's, which is lost when the device needs the room."""
    first = [workflow(n, call("1", [(n, 60)], 1), arrival=100.0 * i) for i, n in enumerate("pqr")]
    again = [workflow(f"{n}2", call("1", [(n, 60)], 1), arrival=300.0 + 100 * i) for i, n in enumerate("rp")]
    result = serve(*first, *again, pool=100, host_tokens=70)
    done = {c.workflow: c for c in result.calls}
    assert done["r2"].cached_device == 59
    assert done["p2"].cached_device + done["p2"].cached_host == 0
    assert result.counters["evict_host_tokens"] >= 60


def test_a_host_hit_too_short_to_load_is_computed():
    first = [workflow(n, call("1", [(n, 9), (f"{n}/rest", 20)], 1), arrival=100.0 * i) for i, n in enumerate("pq")]
    again = workflow("p2", call("1", [("p", 9), ("other", 5)], 1), arrival=300.0)
    result = serve(*first, again, pool=36, host_tokens=200)
    assert result.calls[-1].cached_host == 0
    assert result.calls[-1].ttft == pytest.approx(14.0)


def test_policies_order_the_waiting_queue():
    many = [workflow(f"w{n}", call("1", [(f"p{n}", n)], 1), arrival=0.1 * (n > 30)) for n in (31, 50, 40, 60)]
    first = workflow("first", call("1", [("first", 30)], 1))
    plain = serve(first, *many, chunked_prefill=None, max_prefill_tokens=30)
    short = serve(first, *many, chunked_prefill=None, max_prefill_tokens=30, policies=[f"{HERE}:Shortest"])
    assert [c.prompt_tokens for c in plain.calls] == [30, 31, 50, 40, 60]
    assert [c.prompt_tokens for c in short.calls] == [30, 31, 40, 50, 60]


def test_prefetches_go_into_free_space_and_are_settled_when_used():
    """Pool 100. q (80) demotes p (40); r (30) demotes q, which leaves 70 free: p is fetched, q does not fit. Until
    then there is no room for either."""
    loads = [("p", 40, 0.0), ("q", 80, 100.0), ("r", 30, 200.0)]
    made = [workflow(n, call("1", [(n, size)], 1), arrival=at) for n, size, at in loads]
    again = workflow("p2", call("1", [("p", 40)], 1), arrival=300.0)
    fetched = serve(*made, again, pool=100, host_tokens=300, policies=[f"{HERE}:FetchAll"])
    plain = serve(*made, again, pool=100, host_tokens=300)
    assert (fetched.calls[-1].cached_device, fetched.calls[-1].cached_host) == (39, 0)
    assert (plain.calls[-1].cached_device, plain.calls[-1].cached_host) == (0, 39)
    assert fetched.calls[-1].ttft < plain.calls[-1].ttft
    assert fetched.counters["prefetches"] == 1
    assert fetched.counters["prefetches_refused"] > 0
    assert fetched.counters["prefetch_used_tokens"] == 40
    assert fetched.counters["prefetch_wasted_tokens"] == 0


def test_a_prefetch_that_nobody_reads_is_wasted():
    """As before, but what comes back for is q: p, fetched in vain, makes room for it."""
    loads = [("p", 40, 0.0), ("q", 80, 100.0), ("r", 30, 200.0)]
    made = [workflow(n, call("1", [(n, size)], 1), arrival=at) for n, size, at in loads]
    again = workflow("q2", call("1", [("q", 80)], 1), arrival=300.0)
    result = serve(*made, again, pool=100, host_tokens=300, policies=[f"{HERE}:FetchAll"])
    assert result.counters["prefetch_wasted_tokens"] == 40
    assert result.calls[-1].cached_host == 79


def test_policies_hear_of_workflows_agents_tools_and_the_pool():
    calls = (
        call("1", [("p", 10)], 2, agent="planner"),
        call(
            "2",
            [("q", 10)],
            2,
            agent="coder",
            wait_for=("1",),
            delay=5.0,
            tools=(TraceTool(name="bash", start=1.0, duration=2.0),),
            superseded=True,
        ),
    )
    serve(workflow("w", *calls), policies=[f"{HERE}:Watcher"])
    at = {type(o).__name__: t for t, o in Watcher.seen}
    kinds = [type(o) for _, o in Watcher.seen if isinstance(o, Event)]
    assert kinds[0].__name__ == "WorkflowStarted"
    assert kinds[-2:] == [StateSuperseded, WorkflowEnded]
    end = next(t for t, o in Watcher.seen if isinstance(o, CallFinished))
    assert at["ToolStarted"] == pytest.approx(end + 1.0)
    assert at["ToolEnded"] == pytest.approx(end + 3.0)
    tool = next(o for _, o in Watcher.seen if isinstance(o, ToolEnded))
    assert (tool.tool, tool.duration, tool.agent) == ("bash", 2.0, "planner")
    assert next(o for _, o in Watcher.seen if isinstance(o, ToolStarted)).call_id == tool.call_id
    agents = [o.agent for _, o in Watcher.seen if isinstance(o, AgentStarted)]
    assert agents == ["planner", "coder"]
    seqs = [o.seq for _, o in Watcher.seen if isinstance(o, Event)]
    assert seqs == sorted(set(seqs))
    assert {o.total for _, o in Watcher.seen if isinstance(o, PoolState)} == {1_000}


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        (0, [("p", "device", False), ("q", "device", False)]),
        (300, [("p", "device", True), ("q", "device", True), ("p", "loaded", True)]),
        (100, [("p", "device", True), ("p", "host", False), ("q", "device", True), ("q", "host", False)]),
    ],
)
def test_policies_hear_what_leaves_a_tier_and_what_comes_back(host, expected):
    """Pool 100: p (40), q (80), p again. A host of 100 drops p when q is copied to it, and q when p is."""
    made = [workflow(f"{n}{at}", call("1", [(n, size)], 1), arrival=at) for n, size, at in
            [("p", 40, 0.0), ("q", 80, 100.0), ("p", 40, 200.0)]]  # fmt: skip
    serve(*made, pool=100, host_tokens=host, policies=[f"{HERE}:Watcher"])
    heard = []
    for _, seen in Watcher.seen:
        if isinstance(seen, Evicted | Loaded):
            name = "q" if seen.node.tokens == 80 else "p"
            heard.append((name, seen.tier, seen.kept) if isinstance(seen, Evicted) else (name, "loaded", True))
    assert heard == expected
    arrived, finished = (
        [o.request for _, o in Watcher.seen if isinstance(o, kind)] for kind in (CallArrived, CallFinished)
    )
    assert arrived == finished == ["p0.0/1", "q100.0/1", "p200.0/1"]


# -- arrivals and clusters -----------------------------------------------------------------------------


def test_a_closed_loop_keeps_its_number_of_workflows():
    result = simulate(
        load(30, 4), EngineSpec(pool_tokens=50_000), COST, arrivals=Arrivals(kind="closed", concurrency=3)
    )
    spans = [(w.started, w.finished) for w in result.workflows]
    assert len(spans) == 30
    for at, _ in spans:
        assert sum(a <= at < b for a, b in spans) <= 3
    assert sum(a == 0.0 for a, _ in spans) == 3


def test_poisson_arrivals_have_their_rate_and_their_seed():
    quick = CalibratedCost(p_token=1e-6, d_pass=1e-6)

    def starts(seed: int) -> list[float]:
        arrivals = Arrivals(kind="poisson", rate=5.0)
        result = simulate(load(400, 1), EngineSpec(pool_tokens=50_000), quick, arrivals=arrivals, seed=seed)
        return sorted(w.started for w in result.workflows)

    assert starts(1) == starts(1) != starts(2)
    assert 400 / starts(1)[-1] == pytest.approx(5.0, rel=0.2)


def test_recorded_times_and_tools_are_scaled():
    first = call("1", [("p", 1)], 1)
    second = call("2", [("p", 1)], 1, wait_for=("1",), delay=8.0)
    result = serve(workflow("w", first, second, arrival=10.0), arrivals=Arrivals(speed=2.0, tool_speed=4.0))
    assert result.workflows[0].started == 5.0
    assert result.calls[1].arrived == pytest.approx(6.0 + 2.0)


def test_a_cluster_keeps_workflows_on_their_engine_and_is_faster():
    many = load(60, 5)
    spec = EngineSpec(pool_tokens=20_000)
    cost = CalibratedCost(p_token=1e-4, d_pass=0.01)
    one = simulate(many, spec, cost)
    four = simulate(many, spec, cost, engines=4)
    assert {c.workflow: c.engine for c in four.calls} == {str(w): engine_of(str(w), 4) for w in range(60)}
    assert len({c.engine for c in four.calls}) == 4
    assert four.seconds < 0.6 * one.seconds
    assert len(four.calls) == len(one.calls) == 300


# -- properties ----------------------------------------------------------------------------------------


def loads(seed: int, workflows: int = 12, calls: int = 6) -> Trace:
    """Workflows with shared prefixes, fan-out, tools and superseded calls."""
    rng = random.Random(seed)
    out = []
    for w in range(workflows):
        made: list[TraceCall] = []
        for c in range(rng.randint(1, calls)):
            earlier = rng.choice(made) if made and rng.random() < 0.7 else None
            start = [*earlier.prompt, *earlier.output] if earlier else [Span(f"sys{rng.randint(0, 2)}", 40)]
            start = start[: rng.randint(1, len(start))]
            waits = tuple({rng.choice(made).id for _ in range(rng.randint(0, 2))}) if made else ()
            made.append(
                TraceCall(
                    id=str(c),
                    agent=rng.choice("xyz"),
                    branch=rng.choice([None, "b"]),
                    prompt=(*start, Span(f"{w}/{c}", rng.randint(1, 60))),
                    output=(Span(f"{w}/{c}/out", rng.randint(0, 50)),),
                    wait_for=waits,
                    delay=rng.choice([0.0, 0.3, 2.0]),
                    tools=(TraceTool(name="t", start=0.0, duration=0.2),) if waits else (),
                    superseded=rng.random() < 0.2,
                )
            )
        out.append(workflow(f"w{w}", *made, arrival=rng.random() * 5))
    return trace(*out)


POLICIES: list[PolicySpec] = ["lru", "lifecycle", "continuum", "ttl", "belady", f"{HERE}:FetchAll"]
POLICIES += [n for n in policy_names() if n.startswith(("kvflow", "pbkv"))]
#: Holding calls back for the slightest reason, computing anchors ahead at any price, and other orders.
POLICIES += ["fairness", "shaping", {"name": "admission", "high": 0.3, "low": 0.1}]
POLICIES += [{"name": "cachesage", "weight": w, "budget": 100.0} for w in (0.0, 4.0)]
#: Prefetching for the slightest reason, and on wrong forecasts.
POLICIES += [
    {"name": n, "noise": noise, "threshold": 0.01} for n in ("pbkv", "pbkv-aggressive") for noise in (0.0, 0.5)
]
FAST = CalibratedCost(p_pass=0.01, p_token=0.001, d_pass=0.01, d_request=0.001, d_kv=1e-6, t_pass=0.01, t_token=1e-4)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from(POLICIES), st.integers(250, 900), st.sampled_from([0, 300, 2_000]))
def test_every_slot_is_accounted_for_after_every_step(seed, policy, pool, host):
    """Slots free, private and in the tree make up the pool; the tree is sound; at the end nothing is held."""
    spec = EngineSpec(
        pool_tokens=pool,
        host_tokens=host,
        chunked_prefill=[None, 50, 8_192][seed % 3],
        max_running=[3, 2_048][seed % 2],
        ignore_eos=bool(seed % 2),
        new_token_ratio=0.2,
        min_new_token_ratio=0.1,
    )
    cost = replace(FAST, t_token=[1e-4, 0.1][seed % 5 == 0])
    served = loads(seed)
    simulation = run_module._Simulation(served, spec, cost, informed([policy], served), Arrivals(), 2, 0, False, 1.0)
    checked = 0
    for engine in simulation.engines:
        advance = engine.advance

        def checking(now: float, engine: Any = engine, advance: Any = advance) -> None:
            nonlocal checked
            advance(now)
            checked += 1
            tree = engine.tree
            steps = engine.decode_steps
            private = sum(r.private + steps - r.joined for r in engine.running)
            private += sum(r.private for r in engine._batch)
            if engine._chunked is not None and engine._chunked not in engine._batch:
                private += engine._chunked.private
            assert tree.free + tree.evictable + tree.protected + private == pool
            assert tree.free >= 0
            assert tree.check() == []

        engine.advance = checking  # type: ignore[method-assign]
    result = simulation.run()
    assert checked > 5
    assert len(result.calls) == simulation.trace.calls
    assert all(c.output_tokens >= 1 for c in result.calls if c.outcome == "done")
    for engine in simulation.engines:
        while engine.waiting or engine.running or engine._batch:  # what is computed ahead may outlast the last call
            assert engine.due is not None
            engine.advance(engine.due)
        engine._transfers.settle(float("inf"))
        assert engine.tree.protected == 0
        assert not engine.waiting
        assert not engine.running


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([250, 400, 3_000]), st.sampled_from([0, 600]))
def test_decode_taken_at_once_is_decode_step_by_step(seed, pool, host):
    """The same load with stretches of one decode step, as the engine takes them, and with as many as can be."""

    def run(steps: int) -> SimResult:
        spec = EngineSpec(
            pool_tokens=pool, host_tokens=host, act_steps=steps, ignore_eos=bool(seed % 2), poll_seconds=0
        )
        return simulate(loads(seed), spec, FAST, ["lifecycle", f"{HERE}:Idle"])

    single, many = run(1), run(1_000_000)
    key = lambda c: (c.workflow, c.call)  # noqa: E731
    assert single.decode_steps == many.decode_steps
    assert dict(single.counters) == dict(many.counters)
    for a, b in zip(sorted(single.calls, key=key), sorted(many.calls, key=key), strict=True):
        assert a.finished == pytest.approx(b.finished, abs=1e-6)
        assert (a.cached_device, a.cached_host, a.retracted) == (b.cached_device, b.cached_host, b.retracted)


@pytest.mark.parametrize("policy", ["lru", "lifecycle", "kvflow", "continuum", "ttl"])
def test_the_same_arguments_give_the_same_result(policy):
    def run() -> SimResult:
        return simulate(
            loads(3, workflows=30),
            EngineSpec(pool_tokens=500, host_tokens=900),
            FAST,
            [policy],
            arrivals=Arrivals(kind="poisson", rate=3.0),
            engines=2,
            seed=5,
            timeline=True,
        )

    assert run() == run()


def test_more_memory_never_hurts_much_and_lifecycle_beats_lru_under_pressure():
    rates: dict[str, list[float]] = {}
    many = load(60, 8)
    cost = CalibratedCost(p_token=2e-5, d_pass=0.01)
    for policy in ("lru", "lifecycle"):
        for pool in (20_000, 40_000, 80_000, 10**7):
            result = simulate(
                many, EngineSpec(pool_tokens=pool), cost, [policy], arrivals=Arrivals(kind="closed", concurrency=8)
            )
            rates.setdefault(policy, []).append(result.hit_rate)
    assert rates["lru"] == sorted(rates["lru"])
    assert rates["lifecycle"][-1] == rates["lru"][-1]
    assert all(a >= b for a, b in zip(rates["lifecycle"], rates["lru"], strict=True))
    assert rates["lifecycle"][0] > rates["lru"][0] + 0.02


@pytest.mark.parametrize("arrivals", [Arrivals(kind="closed", concurrency=8), Arrivals(kind="poisson", rate=0.5)])
def test_knowing_the_future_beats_not_knowing_it(arrivals):
    many = load(60, 8)
    cost = CalibratedCost(p_token=2e-5, d_pass=0.01)
    spec = EngineSpec(pool_tokens=16_000)
    names = ("lru", "lifecycle", "kvflow", "continuum", "belady")
    rates = {p: simulate(many, spec, cost, [p], arrivals=arrivals).hit_rate for p in names}
    assert max(rates, key=rates.__getitem__) == "belady"


# -- the rest ------------------------------------------------------------------------------------------


def test_the_timeline_tells_calls_decisions_and_memory_in_order():
    result = simulate(loads(1), EngineSpec(pool_tokens=400), FAST, ["lifecycle"], timeline=True, sample_seconds=0.5)
    kinds = {row["kind"] for row in result.timeline}
    assert kinds == {"workflow_started", "workflow_ended", "call", "memory", "decision"}
    times = [row["time"] for row in result.timeline]
    assert times == sorted(times)
    for row in result.timeline:
        if row["kind"] == "memory":
            assert row["free"] + row["private"] + row["locked"] + row["live"] + row["retired"] == 400
            assert sum(row["owners"].values()) == row["locked"] + row["live"] + row["retired"]
    decisions = [r for r in result.timeline if r["kind"] == "decision"]
    assert len(decisions) == result.counters["evict"]
    assert simulate(loads(1), EngineSpec(pool_tokens=400), FAST).timeline == ()


def test_policies_are_told_what_the_trace_knows():
    known = Trace(name="t", workflows=(workflow("w", call("1", [("p", 1)], 1)),), edges={"a": ("b",)})
    assert informed(["lru", "kvflow", "kvflow-oracle", {"name": "kvflow", "edges": {}}], known) == [
        "lru",
        {"name": "kvflow", "edges": {"a": ["b"]}},
        {"name": "kvflow-oracle", "futures": {"w": ["a"]}},
        {"name": "kvflow", "edges": {}},
    ]


def test_a_load_without_calls_is_over_at_once():
    assert serve().summary()["hit_rate"] == 0.0
    empty = serve(workflow("w"))
    assert (len(empty.workflows), empty.calls) == (1, [])
