"""Cost models: published sizes, sums without loops, and fits that find what made the samples."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentflow.bench.simulator import (
    HARDWARE,
    MODELS,
    CalibratedCost,
    DecodeSample,
    Prefill,
    PrefillSample,
    RooflineCost,
    TransferSample,
    pool_tokens,
)
from agentflow.bench.simulator.cost import sum_of_larger
from agentflow.errors import UsageError

LINE = st.tuples(st.floats(0, 100), st.floats(0, 10))


@given(LINE, LINE, st.integers(0, 200))
def test_the_sum_of_the_larger_line_is_that_of_a_loop(a, b, steps):
    expected = sum(max(a[0] + a[1] * k, b[0] + b[1] * k) for k in range(steps))
    assert sum_of_larger(a, b, steps) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(
    ("model", "parameters", "kv_bytes"),
    [("qwen3-14b", 14.8e9, 163_840), ("qwen3-32b", 32.8e9, 262_144), ("llama-3.1-8b", 8.03e9, 131_072)],
)
def test_shapes_give_the_published_sizes(model, parameters, kv_bytes):
    shape = MODELS[model]
    assert shape.weight_bytes / 2 == pytest.approx(parameters, rel=0.01)
    assert shape.kv_bytes == kv_bytes


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("hardware", HARDWARE)
@pytest.mark.parametrize("batch", [1, 16, 400])
def test_decode_steps_at_once_cost_what_they_cost_one_by_one(model, hardware, batch):
    cost = RooflineCost.of(model, hardware, gpus=2)
    one_by_one = sum(cost.decode(batch, 5_000 * batch + batch * k) for k in range(300))
    assert cost.decode(batch, 5_000 * batch, 300) == pytest.approx(one_by_one)


def test_figures_are_of_the_right_size():
    """Qwen3-14B on an H100: a decode step reads 28 GB at 80 % of 3.35 TB/s, 10.4 ms; 8,000 tokens of prefill are
    2 x 13.2e9 x 8000 FLOP at 55 % of 989 TFLOPS, 0.388 s, and 2.6e13 FLOP of attention at 35 %, 0.076 s."""
    cost = RooflineCost.of("qwen3-14b", "h100")
    assert cost.decode(1, 1_000) == pytest.approx(0.0104 + 0.002, rel=0.01)
    assert cost.prefill([Prefill(8_000, 0)]) == pytest.approx(0.388 + 0.076 + 0.002, rel=0.01)
    assert cost.transfer(1_000) == pytest.approx(0.0005 + 163_840_000 / 51.2e9)


def test_cached_tokens_are_cheaper_than_computed_ones_and_not_free():
    cost = RooflineCost.of("llama-3.1-8b", "a100-80g")
    whole = cost.prefill([Prefill(20_000, 0)])
    rest = cost.prefill([Prefill(1_000, 19_000)])
    alone = cost.prefill([Prefill(1_000, 0)])
    assert alone < rest < 0.2 * whole


def test_faster_hardware_is_faster_and_holds_more():
    times = [RooflineCost.of("qwen3-14b", h).decode(8, 50_000) for h in ("a100-80g", "h100", "h200")]
    assert times == sorted(times, reverse=True)
    pools = [pool_tokens(MODELS["qwen3-14b"], HARDWARE[h]) for h in ("a100-80g", "h200")]
    assert pools[0] < pools[1]
    assert pools[0] == int((80e9 * 0.88 - MODELS["qwen3-14b"].weight_bytes) / 163_840)


def test_weights_that_do_not_fit_and_names_not_known_are_refused():
    with pytest.raises(UsageError, match="take more or larger accelerators"):
        pool_tokens(MODELS["qwen3-32b"], HARDWARE["h100"], share=0.5)
    with pytest.raises(UsageError, match="no cost model of gpt on h100; known"):
        RooflineCost.of("gpt", "h100")


def samples(cost: CalibratedCost) -> tuple[list[PrefillSample], list[DecodeSample], list[TransferSample]]:
    works = [(Prefill(n, c),) for n in (10, 100, 1_000) for c in (0, 500, 3_000)] + [(Prefill(50, 0), Prefill(70, 10))]
    prefills = [PrefillSample(w, cost.prefill(w)) for w in works]
    decodes = [DecodeSample(b, kv, cost.decode(b, kv, n), n) for b in (1, 4, 9) for kv in (100, 9_000) for n in (1, 30)]
    return prefills, decodes, [TransferSample(n, cost.transfer(n)) for n in (10, 1_000)]


def test_a_fit_finds_the_coefficients_that_made_the_samples():
    true = CalibratedCost(
        p_pass=0.02, p_request=0.003, p_token=1e-4, p_pair=2e-8,
        d_pass=0.01, d_request=0.002, d_kv=1e-6, t_pass=1e-3, t_token=1e-5,
    )  # fmt: skip
    found = CalibratedCost.fit(*samples(true))
    assert found.to_json() == pytest.approx(true.to_json())
    assert CalibratedCost.from_json(found.to_json()) == found


def test_a_fit_has_no_negative_costs():
    """Samples in which long contexts happen to be faster: the coefficient is 0, not below."""
    prefills, _, _ = samples(CalibratedCost(p_pass=0.02, p_token=1e-4))
    decodes = [DecodeSample(1, 100, 0.011), DecodeSample(1, 9_000, 0.010), DecodeSample(4, 100, 0.013)]
    found = CalibratedCost.fit(prefills, decodes)
    assert found.d_kv == 0.0
    assert min(v for v in found.to_json().values() if isinstance(v, float)) >= 0.0
    assert found.decode(1, 100) == pytest.approx(0.0105, rel=0.1)


def test_a_fit_needs_samples_of_both_passes():
    prefills, decodes, _ = samples(CalibratedCost(p_pass=1.0, d_pass=1.0))
    with pytest.raises(UsageError, match="needs samples"):
        CalibratedCost.fit(prefills, [])
    with pytest.raises(UsageError, match="positive"):
        CalibratedCost.fit(prefills, [*decodes, DecodeSample(1, 1, 0.0)])
    with pytest.raises(UsageError, match="no calibration"):
        CalibratedCost.from_json({"speed": 1})
