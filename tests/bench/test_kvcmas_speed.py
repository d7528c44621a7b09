"""The cost model of KVCMAS at 32K tokens, on loads small enough to follow by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agentflow.bench.kvcmas.speed import (
    WAYS,
    Load,
    anchor_seconds,
    corrected_seconds,
    estimate_seconds,
    pool_bytes,
    simulate,
    speed_claims,
    speed_table,
)
from agentflow.bench.simulator.cost import Prefill, RooflineCost

COST = RooflineCost.of("llama-3.1-8b", "h100")
ONE = Load(workflows=1, replicas=1, reuse=1.0, answer=60.0)
BY_NAME = {way.name: way for way in WAYS}


def test_one_workflow_alone_waits_for_nothing() -> None:
    dense = COST.prefill([Prefill(32_768 + 512, 0)])
    assert simulate(BY_NAME["NonShared"], COST, ONE) == pytest.approx([dense] * 4)
    kernel = BY_NAME["token-kernel + first 20 %"]
    corrected = corrected_seconds(kernel, COST, ONE)
    assert simulate(kernel, COST, ONE) == pytest.approx([dense, corrected, corrected, corrected])
    assert simulate(kernel, COST, replace(ONE, reuse=0.0)) == pytest.approx([dense] * 4)


def test_a_reference_is_prefilled_before_the_second_agent_can_use_it() -> None:
    chained, unchained = BY_NAME["segment, chained (paper)"], BY_NAME["segment, unchained"]
    alone = COST.prefill([Prefill(32_768, 0)])
    hasty = replace(ONE, answer=0.0)
    first, second, *rest = simulate(unchained, COST, hasty)
    assert second == pytest.approx(alone + corrected_seconds(unchained, COST, ONE))
    assert [first, *rest] == pytest.approx([simulate(chained, COST, hasty)[n] for n in (0, 2, 3)])


def test_making_an_anchor_keeps_the_next_call_waiting() -> None:
    way, refused = BY_NAME["token-kernel"], replace(ONE, reuse=0.0, answer=0.0)
    dense = COST.prefill([Prefill(32_768 + 512, 0)])
    making = anchor_seconds(way, COST, refused)
    assert making > 0
    assert simulate(way, COST, refused) == pytest.approx([dense, dense, dense + making, dense + making])


def test_low_rank_anchors_take_a_fraction_of_full_ones() -> None:
    full, low = (pool_bytes(BY_NAME[n], COST, Load()) for n in ("KVComm", "token-kernel"))
    assert full / low == pytest.approx(32_768 * 1024 / (32 * (32_768 + 1024)))
    assert pool_bytes(BY_NAME["FullShared"], COST, Load()) == 0
    # Ten anchors, three edges, base and delta of keys and values, 32 layers, 16 bit.
    assert full == 10 * 3 * 4 * 32 * 32_768 * 1024 * 2


def test_correction_costs_more_with_more_to_do() -> None:
    order = ["FullShared", "token-kernel", "segment, chained (paper)", "token-kernel + first 20 %"]
    taken = [corrected_seconds(BY_NAME[n], COST, Load()) for n in order]
    assert taken == sorted(taken)
    assert estimate_seconds(BY_NAME["NonShared"], COST, Load()) == 0
    short = corrected_seconds(BY_NAME["token-kernel"], COST, replace(Load(), shared=4096))
    assert short < taken[1]


def test_table_and_claims_are_the_same_every_time() -> None:
    rows = speed_table(Load(workflows=40), setups=[("llama-3.1-8b", "h100")])
    assert rows == speed_table(Load(workflows=40), setups=[("llama-3.1-8b", "h100")])
    by_way = {r["way"]: r for r in rows}
    assert by_way["NonShared"]["speedup"] == 1
    assert by_way["segment, unchained"]["below_unchained"] == 0
    assert not by_way["KVComm"]["fits"]
    assert by_way["token-kernel"]["fits"]
    assert len(speed_claims(rows)) == 3
