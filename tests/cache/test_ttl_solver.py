"""tau*, memorability, queueing delay and the cost of a miss: by hand, and against brute force."""

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentflow.cache.ledger import CallRef
from agentflow.cache.policy import CallFinished
from agentflow.cache.ttl import Curve, Exponential, Memorability, MissCost, QueueingDelay, tau_star

FAST_OR_SLOW = Curve.empirical([1.0, 1.0, 1.0, 10.0])


def test_waits_for_the_fast_three_quarters_only() -> None:
    # 1 s: 0.75 * 4 - 1 = 2; 10 s: 4 - 10 < 0.
    assert tau_star(FAST_OR_SLOW, benefit=4.0, cost=1.0) == (1.0, 0.75, 2.0)


def test_waits_for_all_when_a_miss_is_dear_and_for_none_when_it_is_cheap() -> None:
    # 1 s: 0.75 * 40 - 1 = 29; 10 s: 40 - 10 = 30.
    assert tau_star(FAST_OR_SLOW, benefit=40.0, cost=1.0) == (10.0, 1.0, 30.0)
    # 1 s: 0.75 - 1 < 0.
    assert tau_star(FAST_OR_SLOW, benefit=1.0, cost=1.0).tau == 0.0


def test_cost_scales_with_memory() -> None:
    assert tau_star(FAST_OR_SLOW, benefit=4.0, cost=0.0).tau == 10.0
    assert tau_star(FAST_OR_SLOW, benefit=4.0, cost=0.05).tau == 10.0  # 3.5 against 2.95
    assert tau_star(FAST_OR_SLOW, benefit=4.0, cost=3.0).tau == 0.0  # 0.75 * 4 - 3 = 0: a tie


def test_ties_go_to_the_smaller() -> None:
    # 1 s: 0.75 * 36 - 1 = 26; 10 s: 36 - 10 = 26.
    assert tau_star(FAST_OR_SLOW, benefit=36.0, cost=1.0).tau == 1.0


def test_the_prior_has_its_optimum_at_mean_times_the_log_of_the_ratio() -> None:
    assert tau_star(Exponential(1.0), benefit=math.e, cost=1.0).tau == pytest.approx(1.0)
    assert tau_star(Exponential(2.0), benefit=8.0, cost=1.0).tau == pytest.approx(2.0 * math.log(4.0))
    assert tau_star(Exponential(1.0), benefit=1.0, cost=1.0).tau == 0.0
    assert tau_star(Exponential(1.0), benefit=1.0, cost=0.0).probability == pytest.approx(0.9999)


def test_a_pin_that_ends_with_the_return_costs_what_it_really_holds() -> None:
    # 1 s: 0.75 * 20 - 1 = 14; 10 s: 20 - (1 + 9 * 0.25) = 16.75, where tau itself would cost 10.
    assert tau_star(FAST_OR_SLOW, benefit=20.0, cost=1.0) == (1.0, 0.75, 14.0)
    assert tau_star(FAST_OR_SLOW, benefit=20.0, cost=1.0, held=True) == (10.0, 1.0, 16.75)
    assert tau_star(Exponential(2.0), benefit=1.9, cost=1.0, held=True).tau == 0.0
    assert tau_star(Exponential(2.0), benefit=2.1, cost=1.0, held=True).probability == pytest.approx(0.9999)


@given(st.lists(st.floats(0, 50), min_size=1, max_size=30), st.floats(0.01, 100), st.floats(0, 10))
def test_held_time_is_the_mean_of_the_shorter_of_both(durations: list[float], benefit: float, cost: float) -> None:
    curve = Curve.empirical(durations)

    def gain(tau: float) -> float:
        return curve.cdf(tau) * benefit - cost * float(np.mean([min(d, tau) for d in durations]))

    best = tau_star(curve, benefit, cost, held=True)
    assert best.gain == pytest.approx(max(0.0, *map(gain, durations)), abs=1e-6)
    assert gain(best.tau) == pytest.approx(best.gain, abs=1e-6)


@pytest.mark.parametrize("benefit", [0.0, -1.0, math.nan, math.inf])
def test_no_benefit_that_makes_sense_no_pin(benefit: float) -> None:
    assert tau_star(FAST_OR_SLOW, benefit, 1.0).tau == 0.0
    assert tau_star(Curve.empirical([]), 5.0, 1.0).tau == 0.0


@given(st.lists(st.integers(0, 60), min_size=1, max_size=40), st.integers(1, 400), st.integers(0, 40), st.booleans())
def test_a_curve_that_was_asked_before_answers_the_same(
    durations: list[int], benefit: int, cost: int, held: bool
) -> None:
    curve = Curve.empirical([d / 4 for d in durations])
    first = tau_star(curve, benefit / 8, cost / 8, held=held)
    again = tau_star(curve, benefit / 8, cost / 8, held=held)
    assert again.gain == pytest.approx(first.gain)
    paid = float(np.mean([min(d / 4, again.tau) for d in durations])) if held else again.tau
    if again.tau:
        assert again.probability * benefit / 8 - cost / 8 * paid == pytest.approx(first.gain)


def test_ties_go_to_the_smaller_whenever_it_is_asked() -> None:
    curve = Curve.empirical([1.0, 1.0, 1.0, 10.0])
    assert [tau_star(curve, benefit=36.0, cost=1.0).tau for _ in range(3)] == [1.0] * 3
    assert [tau_star(curve, benefit=4.0, cost=3.0).tau for _ in range(3)] == [0.0] * 3


@given(st.lists(st.floats(0, 50), min_size=1, max_size=40), st.floats(0.01, 100), st.floats(0, 10))
def test_nothing_on_a_fine_grid_is_better(durations: list[float], benefit: float, cost: float) -> None:
    curve = Curve.empirical(durations)
    best = tau_star(curve, benefit, cost)
    grid = np.concatenate([np.linspace(0, 60, 301), durations])
    assert max(curve.cdf(t) * benefit - cost * t for t in grid) <= best.gain + 1e-9
    assert best.gain == pytest.approx(curve.cdf(best.tau) * benefit - cost * best.tau)
    assert best.tau in {0.0, *durations}


# -- memorability ------------------------------------------------------------------------------------------


def brute_eta(lengths: list[int]) -> float:
    pairs = [(k, n - k) for n in lengths for k in range(1, n + 1)]
    return float(-np.corrcoef(np.array(pairs, dtype=float).T)[0, 1])


def test_programs_of_one_length_are_wholly_memorable() -> None:
    eta = Memorability()
    assert eta.eta() == 1.0
    for _ in range(5):
        eta.finished(7)
    assert eta.eta() == pytest.approx(1.0)


def test_eta_by_hand() -> None:
    eta = Memorability()
    eta.finished(1)
    eta.finished(2)
    # Pairs (1, 0), (1, 1), (2, 0): covariance -1/9, variances 2/9 and 2/9.
    assert eta.eta() == pytest.approx(0.5)


def test_lengths_that_vary_are_less_memorable_and_heavy_tails_turn_the_sign() -> None:
    rng = random.Random(1)
    uniform, geometric = Memorability(), Memorability()
    for _ in range(200):
        uniform.finished(rng.randint(8, 12))
        geometric.finished(1 + int(math.log(rng.random()) / math.log(0.8)))
    assert 0.8 < uniform.eta() < 1.0
    assert abs(geometric.eta()) < 0.35
    heavy = Memorability()
    for n in [1] * 200 + [100] * 2:
        heavy.finished(n)
    assert heavy.eta() < 0.0  # whoever made a second step has many left


@given(st.lists(st.integers(1, 40), min_size=2, max_size=80))
def test_the_running_sums_agree_with_the_definition_over_the_window(lengths: list[int]) -> None:
    eta = Memorability(window=20)
    for n in lengths:
        eta.finished(n)
    assert len(eta) == min(20, len(lengths))
    if len({*lengths[-20:]}) > 1:
        assert eta.eta() == pytest.approx(brute_eta(lengths[-20:]), abs=1e-9)


def test_too_few_programs_count_as_memorable() -> None:
    eta = Memorability(enough=3)
    for n in (1, 2):
        eta.finished(n)
    assert eta.eta() == 1.0
    eta.finished(0)  # no program
    assert len(eta) == 2


# -- what a miss costs -------------------------------------------------------------------------------------


def finished(tokens: int, cached: int = 0, **told: float) -> CallFinished:
    host = int(told.pop("host", 0))
    return CallFinished("r", CallRef(None), tokens, cached, 0, host, **told)  # type: ignore[arg-type]


def test_rates_are_measured_and_the_priors_hold_until_then() -> None:
    cost = MissCost(prefill=1e-3, reload=1e-4)
    assert cost.seconds(1000) == pytest.approx(1.0)
    cost.finished(finished(1000, prefill_seconds=2.0), expected=0)
    assert cost.prefill_rate == pytest.approx(2e-3)
    cost.finished(finished(2000, cached=1000, prefill_seconds=1.0), expected=0)
    assert cost.prefill_rate == pytest.approx(1.5e-3)
    assert cost.seconds(1000) == pytest.approx(1.5)


def test_a_host_tier_makes_a_miss_as_cheap_as_what_is_found_there() -> None:
    cost = MissCost()
    # 1000 tokens were left; 200 still on the device, 600 on the host, 200 computed.
    cost.finished(finished(1000, cached=800, host=600, prefill_seconds=0.2, reload_seconds=0.06), expected=1000)
    assert cost.on_host == pytest.approx(0.75)
    assert cost.reload_rate == pytest.approx(1e-4)
    assert cost.prefill_rate == pytest.approx(1e-3)
    assert cost.seconds(100) == pytest.approx(100 * (0.75 * 1e-4 + 0.25 * 1e-3))


def test_an_engine_that_measures_nothing_leaves_the_priors() -> None:
    cost = MissCost(prefill=1e-3)
    cost.finished(finished(1000, cached=1000), expected=1000)
    assert len(cost) == 0
    cost.finished(finished(1000), expected=1000)  # lost and not on the host
    assert cost.on_host == 0.0
    assert cost.seconds(10) == pytest.approx(0.01)


def test_the_window_moves_on() -> None:
    cost = MissCost(window=4)
    for _ in range(4):
        cost.finished(finished(1000, prefill_seconds=9.0), expected=0)
    for _ in range(4):
        cost.finished(finished(1000, prefill_seconds=1.0), expected=0)
    assert len(cost) == 4
    assert cost.prefill_rate == pytest.approx(1e-3)
    delay = QueueingDelay(window=2)
    assert delay.mean() == 0.0
    for seconds in (9.0, 1.0, 3.0, -1.0, math.nan):
        delay.add(seconds)
    assert delay.mean() == pytest.approx(2.0)
