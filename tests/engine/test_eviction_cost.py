"""An eviction decision costs no more than SGLang's own, with thousands of leaves."""

import pytest

from agentflow.engine.sglang.arguments import RADIX_CACHE

pytestmark = [pytest.mark.engine, pytest.mark.slow]  # importing SGLang takes longer than the tests


def test_a_decision_costs_no_more_than_sglangs(capfd: pytest.CaptureFixture[str]) -> None:
    """Against SGLang's Python tree, the only one that takes policies; its Rust tree is shown by the command."""
    eviction_cost = pytest.importorskip("agentflow.engine.sglang.eviction_cost")
    figures = eviction_cost.measure(leaves=3_000, workflows=100, rounds=25)
    assert RADIX_CACHE == "agentflow"
    for policy in eviction_cost.POLICIES:
        assert figures[f"{RADIX_CACHE} {policy}"]["ratio"] < 1.5, figures
