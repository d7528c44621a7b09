"""Generated loads: by seed, well-formed, with the statistics of the runs they are measured on."""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from agentflow.bench.traces import fit
from agentflow.bench.traces.generators import GENERATORS, Plan, generate, measured
from agentflow.bench.traces.generators._draw import PROBABILITIES, choose, count, draw
from agentflow.bench.traces.importers.mini_swe_agent import phase_of
from agentflow.bench.traces.model import Trace, TraceCall
from agentflow.errors import UsageError

DATA = Path(__file__).parents[2] / ".." / "shared" / "data"
NAMES = sorted(GENERATORS)


def calls_of(trace: Trace) -> list[TraceCall]:
    return [c for w in trace.workflows for c in w.calls]


@pytest.fixture(scope="module", params=NAMES)
def trace(request: pytest.FixtureRequest) -> Trace:
    return generate(request.param, Plan(workflows=60, seed=3, rate=2.0))


def test_the_same_seed_gives_the_same_trace_and_another_another(trace: Trace) -> None:
    plan = Plan(workflows=60, seed=3, rate=2.0)
    assert generate(trace.name, plan) == trace
    assert generate(trace.name, Plan(workflows=60, seed=4, rate=2.0)) != trace


def test_more_workflows_begin_with_the_same_ones(trace: Trace) -> None:
    assert generate(trace.name, Plan(workflows=61, seed=3, rate=2.0)).workflows[:60] == trace.workflows


def test_traces_are_well_formed(trace: Trace) -> None:
    agents = set(trace.edges)
    lengths: dict[str, int] = {}
    for flow in trace.workflows:
        by_id: dict[str, TraceCall] = {}
        for call in flow.calls:
            assert call.agent in agents
            assert call.id not in by_id
            assert by_id.keys() >= set(call.wait_for)
            assert len(by_id) == 0 or call.wait_for
            for before in call.wait_for:
                assert call.agent in trace.edges[by_id[before].agent]
            assert call.delay >= max((t.start + t.duration for t in call.tools), default=0.0)
            at = 0
            for _, start, tokens, _, _ in call.segments:
                assert start == at
                assert tokens > 0
                at += tokens
            assert at == call.prompt_tokens
            for span in call.prompt + call.output:
                assert span.tokens > 0
                assert lengths.setdefault(span.id, span.tokens) == span.tokens
            by_id[call.id] = call


def test_what_is_superseded_is_not_read_again(trace: Trace) -> None:
    for flow in trace.workflows:
        for i, call in enumerate(flow.calls):
            if not call.superseded:
                continue
            earlier = max((shared(call, c) for c in flow.calls[:i]), default=0)
            assert all(shared(call, c) <= earlier for c in flow.calls[i + 1 :])
    flagged = sum(c.superseded for c in calls_of(trace))
    assert (flagged > 0) == (trace.name in ("hover", "openhands"))


def shared(a: TraceCall, b: TraceCall) -> int:
    n = 0
    for x, y in zip(a.prompt + a.output, b.prompt + b.output, strict=False):
        if x != y:
            break
        n += 1
    return n


def test_workflows_of_one_graph_share_instructions_and_nothing_of_their_own(trace: Trace) -> None:
    first: dict[str, set[str]] = defaultdict(set)
    owners: dict[str, set[str]] = defaultdict(set)
    for flow in trace.workflows:
        for call in flow.calls:
            first[call.agent].add(call.prompt[-1 if trace.name.endswith("pages-first") else 0].id)
            for span in call.output:
                owners[span.id].add(flow.id)
    for agent, spans in first.items():
        assert len(spans) == (len(spans) if trace.name == "bfcl" else 1), agent
    assert all(len(o) == 1 for o in owners.values())
    assert len(set().union(*first.values())) >= len(trace.edges)


def test_histories_only_grow() -> None:
    for flow in generate("swebench", Plan(workflows=20)).workflows:
        latest: dict[str, TraceCall] = {}
        for call in flow.calls:
            if call.agent in latest:
                before = latest[call.agent].prompt + latest[call.agent].output
                assert call.prompt[: len(before)] == before
            latest[call.agent] = call


def test_arrivals_are_poisson_or_at_once() -> None:
    trace = generate("financebench", Plan(workflows=3000, rate=4.0))
    times = [w.arrival for w in trace.workflows]
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    assert times == sorted(times)
    assert statistics.mean(gaps) == pytest.approx(0.25, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.1)
    assert trace.meta["arrivals"] == "poisson"
    closed = generate("financebench", Plan(workflows=3, concurrency=2))
    assert {w.arrival for w in closed.workflows} == {0.0}
    assert (closed.meta["arrivals"], closed.meta["concurrency"]) == ("closed", 2)


@pytest.mark.parametrize("name", NAMES)
def test_scales_and_limits(name: str) -> None:
    full = calls_of(generate(name, Plan(workflows=30)))
    half = calls_of(generate(name, Plan(workflows=30, scale=0.5, tool_scale=0.0)))
    assert len(half) == len(full) or name == "openhands"  # which condenses by length
    ratio = statistics.mean(c.prompt_tokens for c in half) / statistics.mean(c.prompt_tokens for c in full)
    assert ratio == pytest.approx(0.5, rel=0.1)
    assert {c.delay for c in half} == {0.0}
    short = generate(name, Plan(workflows=30, max_calls=4))
    assert max(len(w.calls) for w in short.workflows) == 4
    assert {w.outcome for w in short.workflows if len(w.calls) < 4} <= {"done"}
    assert "limit" in {w.outcome for w in short.workflows}
    limit = round(statistics.median(c.prompt_tokens for c in full))
    narrow = generate(name, Plan(workflows=30, max_prompt=limit))
    assert max(c.prompt_tokens for c in calls_of(narrow)) <= limit
    assert "limit" in {w.outcome for w in narrow.workflows}


def test_tenants_take_turns() -> None:
    trace = generate("financebench", Plan(workflows=4, tenants=("a", "b")))
    assert [w.tenant for w in trace.workflows] == ["a", "b", "a", "b"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"workflows": -1},
        {"rate": 0.0},
        {"rate": math.inf},
        {"concurrency": 0},
        {"scale": 0.0},
        {"scale": math.nan},
        {"tool_scale": -1.0},
        {"max_calls": 0},
        {"max_prompt": 0},
    ],
)
def test_plans_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        Plan(**wrong)


def test_unknown_generators_are_refused() -> None:
    with pytest.raises(UsageError, match="no trace generator 'x'; there are bfcl"):
        generate("x")


def top1(counts: dict[Any, Counter[str]]) -> float:
    """Share of next agents that the most frequent follower of each context gets right."""
    return sum(max(c.values()) for c in counts.values()) / sum(sum(c.values()) for c in counts.values())


def bits(counts: dict[Any, Counter[str]]) -> float:
    """Entropy of the next agent, given the context, in bits."""
    total = sum(sum(c.values()) for c in counts.values())
    return -sum(n * math.log2(n / sum(c.values())) for c in counts.values() for n in c.values()) / total


def test_the_path_tells_more_than_the_current_agent() -> None:
    first: dict[Any, Counter[str]] = defaultdict(Counter)
    second: dict[Any, Counter[str]] = defaultdict(Counter)
    for flow in generate("swebench", Plan(workflows=2000)).workflows:
        agents = [c.agent for c in flow.calls]
        turns = [a for i, a in enumerate(agents) if i == 0 or a != agents[i - 1]]
        for before, now, after in zip(["start", *turns], turns, [*turns[1:], "end"], strict=False):
            first[now][after] += 1
            second[before, now][after] += 1
    assert bits(second) < bits(first) - 0.03
    assert top1(second) >= top1(first)


def test_searches_that_brought_nothing_come_in_runs() -> None:
    trace = generate("hover", Plan(workflows=2000))
    plans = Counter(sum(c.agent == "plan" for c in w.calls) for w in trace.workflows)
    assert 0.05 < (plans.total() - plans[1]) / plans.total() < 0.3  # some are planned again
    fan_out = Counter(len({c.branch for c in w.calls if c.branch}) for w in trace.workflows)
    assert len(fan_out) > 5
    parallel = Counter(len(c.wait_for) for c in calls_of(trace))
    assert parallel[2] > 0
    assert parallel[3] > 0


def test_lengths_and_tools_follow_the_measured_runs() -> None:
    trace = generate("swebench", Plan(workflows=1500))
    for agent, tool in (("planner", "read"), ("coder", "edit"), ("tester", "run_tests")):
        answers = [c.output_tokens for c in calls_of(trace) if c.agent == agent]
        assert statistics.median(answers) == pytest.approx(measured.SWE_ANSWER_TOKENS[agent][3], rel=0.1)
        times = [t.duration for c in calls_of(trace) for t in c.tools if t.name == tool]
        assert statistics.median(times) == pytest.approx(measured.SWE_TOOL_SECONDS[agent][3], rel=0.15)
    steps = [len(w.calls) for w in trace.workflows]
    assert statistics.median(steps) == pytest.approx(33, rel=0.2)  # the runs' own median, handing in left out
    checks = [t.outcome for c in calls_of(trace) for t in c.tools if t.name == "run_tests"]
    assert 0.1 < checks.count("error") / len(checks) < 0.3


def test_draws_follow_the_quantiles() -> None:
    rng = random.Random(0)
    table = (0, 10, 20, 40, 80, 160, 320, 640)
    values = [draw(rng, table) for _ in range(20_000)]
    for p, value in zip(PROBABILITIES[1:-1], table[1:-1], strict=True):
        below = sum(v <= value for v in values) / len(values)
        assert below == pytest.approx(p / PROBABILITIES[-1], abs=0.01)
    assert max(values) <= 640
    assert count(rng, (0,) * 8, least=2) == 2
    shares = Counter(choose(rng, {"a": 1.0, "b": 3.0}) for _ in range(4000))
    assert shares["b"] / 4000 == pytest.approx(0.75, abs=0.03)


def test_the_constants_are_what_the_data_says() -> None:
    if not (DATA / "mini-swe-agent").exists():
        pytest.skip("shared/data is not here")
    found = fit.fit(DATA)
    written = {k: v for k, v in vars(measured).items() if k.isupper()}
    assert set(found) == set(written)
    for name, (value, source) in found.items():
        assert written[name] == value, name
        assert f"#: {source}." in Path(measured.__file__).read_text(encoding="utf-8")


def test_fitting_needs_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit.main([str(tmp_path / "none")]) == 2
    assert "usage" in capsys.readouterr().err


def test_commands_of_coding_agents_have_a_phase() -> None:
    assert phase_of("cd /x && pytest -q") == "tester"
    assert phase_of("cat <<EOF > test_a.py") == "coder"
    assert phase_of("sed -n 1,9p a.py") == phase_of(None) == "planner"
