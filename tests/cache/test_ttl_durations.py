"""Distributions of tool durations: Kaplan-Meier by hand, bounds, the cold-start chain, persistence."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentflow.cache.ttl import Curve, Exponential, Samples, ToolDurations, ToolKey, product

DURATIONS = st.lists(st.tuples(st.floats(0, 100), st.booleans()), min_size=1, max_size=60)


def test_empirical_cdf() -> None:
    curve = Curve.empirical([2.0, 1.0, 2.0, math.inf])
    assert [curve.cdf(t) for t in (0.5, 1.0, 1.5, 2.0, 1e9)] == [0.0, 0.25, 0.25, 0.75, 0.75]
    assert curve.candidates().tolist() == [1.0, 2.0]


def test_kaplan_meier_of_a_textbook_case() -> None:
    # Watched 5 at 1 s (one returns), 4 at 2 s (one returns, one is cut off there), 2 at 3 s (cut off), 1 at 4 s.
    curve = Curve.kaplan_meier([1, 2, 2, 3, 4], [False, False, True, True, False])
    assert curve.candidates().tolist() == [1.0, 2.0, 4.0]
    assert [curve.cdf(t) for t in (1, 2, 3, 4)] == pytest.approx([1 / 5, 1 - 4 / 5 * 3 / 4, 0.4, 1.0])


def test_leaving_out_tools_that_still_run_would_make_them_look_fast() -> None:
    durations = [1.0, 1.0, 60.0, 60.0]
    cut = [False, False, True, True]
    assert Curve.kaplan_meier(durations, cut).cdf(30.0) == 0.5
    assert Curve.empirical([d for d, c in zip(durations, cut, strict=True) if not c]).cdf(30.0) == 1.0


def test_only_censored_ones_say_that_nothing_ever_returned() -> None:
    curve = Curve.kaplan_meier([5.0, 6.0], [True, True])
    assert curve.cdf(100.0) == 0.0
    assert not len(curve.candidates())
    assert Curve.kaplan_meier([], []).cdf(1.0) == 0.0


@given(DURATIONS)
def test_the_estimate_is_a_cdf_whatever_comes(samples: list[tuple[float, bool]]) -> None:
    curve = Curve.kaplan_meier([s for s, _ in samples], [c for _, c in samples])
    values = curve.values
    assert np.all((values >= 0) & (values <= 1 + 1e-12))
    assert np.all(np.diff(values) >= 0)
    assert set(curve.times) == {s for s, c in samples if not c}


@given(st.lists(st.floats(0, 100), min_size=1, max_size=60))
def test_without_censoring_kaplan_meier_is_the_empirical_cdf(durations: list[float]) -> None:
    ours = Curve.kaplan_meier(durations, [False] * len(durations))
    plain = Curve.empirical(durations)
    assert ours.times.tolist() == plain.times.tolist()
    assert ours.values == pytest.approx(plain.values)


def test_several_tools_at_once_are_back_when_the_last_one_is() -> None:
    both = product([Curve.empirical([1.0, 2.0]), Curve.empirical([1.0, 4.0])])
    assert [both.cdf(t) for t in (0.5, 1, 2, 3, 4)] == [0.0, 0.25, 0.5, 0.5, 1.0]
    with_prior = product([Curve.empirical([1.0]), Exponential(1.0)])
    assert with_prior.cdf(0.9) == 0.0
    assert with_prior.cdf(2.0) == pytest.approx(1 - math.exp(-2), abs=0.02)


def test_a_window_forgets_the_oldest() -> None:
    samples = Samples(window=4)
    for seconds in (9.0, 9.0, 9.0, 9.0, 1.0, 1.0, 1.0, 1.0):
        samples.add(seconds)
    assert len(samples) == samples.complete == 4
    assert samples.curve().cdf(1.0) == 1.0
    samples.add(2.0, censored=True)
    assert (len(samples), samples.complete) == (4, 3)


@pytest.mark.parametrize("bad", [-1.0, math.nan, -math.inf])
def test_durations_of_a_clock_that_jumped_are_left_out(bad: float) -> None:
    samples = Samples()
    samples.add(bad)
    assert len(samples) == 0


def test_the_chain_goes_from_the_prior_over_all_tools_to_the_tool_and_its_variant() -> None:
    known = ToolDurations(enough=4, enough_each=3)
    pytest_run = ToolKey("bash", "pytest")
    assert known.distribution(pytest_run, 0.0) == (known.prior, "prior")
    known.seed([("ls", 0.5)] * 4)
    found, source = known.distribution(pytest_run, 0.0)
    assert (found.cdf(0.5), source) == (1.0, "global")
    for _ in range(3):
        known.add(ToolKey("bash", "echo"), 1.0)
    found, source = known.distribution(pytest_run, 0.0)
    assert (found.cdf(0.5), found.cdf(1.0), source) == (0.0, 1.0, "tool")
    for _ in range(3):
        known.add(pytest_run, 60.0)
    found, source = known.distribution(pytest_run, 0.0)
    assert (found.cdf(59.0), found.cdf(60.0), source) == (0.0, 1.0, "variant")
    found, source = known.distribution(ToolKey("bash"), 0.0)
    assert (found.cdf(1.0), source) == (0.5, "tool")
    assert known.known() == {"ls": 4, "bash": 6}


def test_calls_that_are_out_count_as_censored_at_their_age() -> None:
    known = ToolDurations(enough=1, enough_each=1)
    known.add(ToolKey("bash"), 1.0)
    for i in range(3):
        known.started(i, ToolKey("bash"), 10.0 * i)
    found, _ = known.distribution(ToolKey("bash"), 30.0)
    assert found.cdf(1.0) == 0.25  # one of four watched for a second and more returned
    assert known.running == 3


def test_what_is_not_heard_of_again_stays_as_censored() -> None:
    known = ToolDurations(enough=1, enough_each=1)
    known.add(ToolKey("bash"), 1.0)
    known.started("x", ToolKey("bash"), 0.0)
    known.gone("x", 50.0)
    known.gone("unknown", 50.0)
    assert known.running == 0
    assert known.distribution(ToolKey("bash"), 99.0)[0].cdf(2.0) == 0.5
    assert known.observations == 1


def test_an_end_without_a_start_and_a_start_twice_are_harmless() -> None:
    known = ToolDurations(enough=1, enough_each=1)
    known.ended("never-started", "bash", 2.0)
    known.started("x", ToolKey("bash", "ls"), 0.0)
    known.started("x", ToolKey("bash", "ls"), 1.0)
    known.ended("x", "bash", 3.0)
    known.ended("x", "bash", 3.0)
    assert known.running == 0
    assert known.known() == {"bash": 3}
    assert known.mean("bash") == pytest.approx(8 / 3)
    assert known.mean("unknown") == 0.0


def test_everything_is_bounded() -> None:
    known = ToolDurations(window=8, tools=4, running=10)
    for i in range(2_000):
        known.started(i, ToolKey(f"tool{i % 50}", f"v{i % 7}"), float(i))
        if i % 3:
            known.ended(i, f"tool{i % 50}", 1.0)
    assert known.running <= 10
    assert len(known._by_key) <= 8
    assert len(known._all) == 32
    assert sum(map(len, known._out.values())) == known.running


def test_kept_between_runs(tmp_path: Path) -> None:
    first = ToolDurations(enough=2, enough_each=2)
    first.seed([("ls", 0.5), ("ls", 0.25)])
    first.add(ToolKey("bash", "pytest"), 60.0, censored=True)
    first.add(ToolKey("bash", "pytest"), math.inf)
    path = tmp_path / "deep" / "durations.json"
    first.save(path)
    json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert [p.name for p in path.parent.iterdir()] == ["durations.json"]
    second = ToolDurations(enough=2, enough_each=2)
    assert second.load(path)
    assert second.to_json() == first.to_json()
    assert second.distribution(ToolKey("ls"), 0.0)[0].cdf(0.25) == 0.5
    assert not second.load(tmp_path / "absent.json")


@pytest.mark.parametrize(
    "data",
    [None, [], {}, {"format": "x"}, {"format": "agentflow-tool-durations/1"},
     {"format": "agentflow-tool-durations/1", "all": [[1, 0]], "tools": [["a", None, [[-5, 0]]]]},
     {"format": "agentflow-tool-durations/1", "all": [["x", 0]], "tools": []}],
)  # fmt: skip
def test_a_file_of_something_else_is_refused_and_nothing_is_added(data: object) -> None:
    known = ToolDurations()
    with pytest.raises(ValueError, match="tool durations"):
        known.load_json(data)
    assert known.observations == 0
