"""The examples under all nine policies of the runtime layer at once: the same answers, and nothing left behind."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from agentflow.bench.directed import Directed
from agentflow.cache.policy import PolicySpec
from agentflow.engine.base import Call
from agentflow.engine.embedded import EmbeddedEngine
from agentflow.engine.scripted import ScriptedEngine, tool_call
from examples.hover.agents import DONE
from examples.hover.data import load_claims, load_passages
from examples.hover.retrieval import Index
from examples.hover.run import check_claims
from examples.swebench.instance import load_own
from examples.swebench.measure import measure
from examples.swebench.run import Limits, agents_solver, predict

pytestmark = [pytest.mark.engine, pytest.mark.slow]

NINE: list[PolicySpec] = [
    "admission", "fairness", "shaping", "cachesage", "adapters", "safety", "memo", "speculation", "hedging",
]  # fmt: skip


def hover(engine: EmbeddedEngine) -> Any:
    """Answers depend on the prompt alone, as a model's do: a call that is made early asks nothing of its turn."""
    claims = [c for c in load_claims() if len(c.titles) >= 2][:4]
    by_workflow = {f"hover-{c.uid}": c for c in claims}

    def title(call: Call) -> str | None:
        read = engine.tokenizer.decode(call.token_ids).count("- Read about ")
        titles = by_workflow[str(call.at.workflow)].titles
        return titles[read] if read < len(titles) else None

    script = ScriptedEngine(
        {
            "plan": lambda call: "Look it up.",
            "query": lambda call: title(call) or DONE,
            "note": lambda call: f"Read about {title(call)}.",
            "verify": lambda call: f'{{"label": "{by_workflow[str(call.at.workflow)].label}"}}',
        }
    )
    directed = Directed(engine, script)
    directed.guards = engine.guards
    made = asyncio.run(check_claims(claims, directed, Index(load_passages()), concurrency=2))
    assert not made.errors
    told = ("uid", "label", "found", "queries", "notes")
    return sorted([{k: r[k] for k in told} for r in made.records], key=lambda r: r["uid"])


def swebench(engine: EmbeddedEngine) -> Any:
    task = next(t for t in load_own() if t.instance_id == "smallrepos__spans-8")
    edit = tool_call(
        "edit",
        path="spans/core.py",
        old="    for start, end in spans:\n        if start > end:",
        new="    for start, end in sorted(spans):\n        if start > end:",
    )
    script = ScriptedEngine(
        {
            "planner": ["Sort the spans."],
            "coder": [tool_call("bash", command="ls"), edit, "Sorted."],
            "tester": ['{"decision": "accept", "feedback": "good"}'],
        }
    )
    directed = Directed(engine, script)
    directed.guards = engine.guards
    made = asyncio.run(predict([task], agents_solver(directed, Limits()), model="directed"))
    assert made.batch.errors == {}
    return [{k: v for k, v in r.items() if k in ("instance_id", "model_patch", "patch")} for r in made.batch.records]


@pytest.mark.parametrize("example", [hover, swebench])
def test_the_same_answers_with_all_nine(engine: EmbeddedEngine, example: Any) -> None:
    wanted = example(engine)
    assert wanted
    engine.flush()
    engine.configure(policies=NINE, reset=True)
    try:
        assert engine.guards is not None
        assert example(engine) == wanted
        deadline = time.monotonic() + 20
        while not (reply := engine.control("check")[0])["idle"]:
            assert time.monotonic() < deadline
        assert reply["problems"] == []
        stats = engine.stats()
        assert stats.counters.get("internal_errors", 0) == stats.counters.get("policy_errors", 0) == 0
        framework = stats.details["framework"]
        assert framework["counters"].get("policies_left_out", 0) == 0
        assert set(framework["policies"]) == {"safety", "memo", "speculation", "hedging"}
        assert set(stats.details["policies"]) == {"admission", "fairness", "shaping", "cachesage", "adapters"}
    finally:
        engine.flush()
        engine.configure(policies=["lifecycle"], reset=True)


def test_policies_are_measured_on_the_same_work(engine: EmbeddedEngine) -> None:
    try:
        found = measure(engine, ["lru"], engine.stats().device_total, load_own()[:1], 1)
    finally:
        engine.flush()
        engine.configure(policies=["lifecycle"], reset=True)
    assert 0.0 < found.completion <= found.seconds
    assert 0.5 < found.hit_rate < 1.0
