"""Leaves against a full sort, under every way of keeping scores."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentflow.cache.leaves import Leaves, Scoring
from agentflow.cache.ledger import Ledger, NodeRecord
from agentflow.cache.lifecycle import Lifecycle
from agentflow.cache.policy import Score
from agentflow.events import StateSuperseded, WorkflowEnded

OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["add", "touch", "discard", "pop", "evict"]), st.integers(0, 9), st.integers(0, 3)),
    max_size=80,
)


@settings(max_examples=300)
@given(OPERATIONS, st.sampled_from([Scoring.ALWAYS, Scoring.RECENCY]))
def test_lowest_is_what_a_full_sort_says(operations, scoring):
    """Scores change behind the structure's back and count from the next eviction on."""
    scores = dict.fromkeys(range(10), 0.0)
    fixed: dict[int, float] = {}

    def score(record: NodeRecord) -> Score:
        fixed[record.id] = scores[record.id]
        return (scores[record.id],)

    records = [NodeRecord(i, 1, 0.0) for i in range(10)]
    leaves = Leaves(score, scoring)
    recency: dict[int, float] = {}
    tick = 0.0

    def expected() -> int:
        return min(recency, key=lambda i: ((fixed[i],) if scoring is Scoring.ALWAYS else (), recency[i]))

    for what, which, value in operations:
        tick += 1
        record = records[which]
        if what == "add":
            leaves.add(record, tick)
            recency[which] = tick
        elif what == "touch":
            leaves.touch(record, tick)
            if which in recency:
                recency[which] = tick
        elif what == "discard":
            leaves.discard(record)
            recency.pop(which, None)
        else:
            scores[which] = float(value)
            if what == "evict":
                leaves.start()
            for _ in range(value if what == "evict" else 1):
                lowest = leaves.lowest()
                assert (lowest is None) == (not recency)
                if lowest is None:
                    break
                assert lowest.id == expected()
                assert leaves.pop() is lowest
                del recency[lowest.id]
        assert {r.id for r in leaves} == set(recency)
        assert len(leaves) == len(recency)
        assert (record in leaves) == (which in recency)


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["call", "leaf", "gone", "ended", "superseded", "evict"]), st.integers(0, 4), st.integers(0, 11)
    ),
    max_size=100,
)


@settings(max_examples=300)
@given(EVENTS)
def test_scores_kept_by_owner_are_those_of_now(operations):
    """With lifecycle on a real ledger: after each event of a workflow the order is that of scores asked for now."""
    now = [0.0]
    ledger = Ledger(clock=lambda: now[0])
    policy = Lifecycle(ledger, lambda: now[0])
    leaves = Leaves(policy.score_node, Scoring.BY_OWNER, clock=lambda: now[0])
    records = [NodeRecord(i, 1, 0.0) for i in range(12)]
    recency: dict[int, float] = {}
    calls = {}
    for tick, (what, w, n) in enumerate(operations):
        now[0] += 0.01
        name = f"w{w}"
        if what == "call":
            calls[w] = ledger.call(name, f"a{n % 2}", None, f"r{tick}")
            leaves.changed(name)
        elif what == "leaf":
            if w in calls:
                ledger.touch(records[n], calls[w])
            leaves.add(records[n], float(tick))
            recency[n] = float(tick)
        elif what == "gone":
            leaves.discard(records[n])
            recency.pop(n, None)
        elif what == "ended":
            ledger.observe(WorkflowEnded(workflow=name, seq=tick, time=now[0]))
            leaves.changed(name)
        elif what == "superseded":
            ledger.observe(StateSuperseded(workflow=name, seq=tick, time=now[0], agent=f"a{n % 2}"))
            leaves.changed(name)
        elif recency:
            leaves.start()
            lowest = leaves.pop()
            assert lowest is not None
            assert lowest.id == min(recency, key=lambda i: (policy.score_node(records[i]), recency[i]))
            del recency[lowest.id]


def test_scores_by_owner_are_asked_for_only_where_something_changed():
    ledger = Ledger(clock=lambda: 0.0)
    asked: list[int] = []
    leaves = Leaves(lambda r: asked.append(r.id) or (0.0,), Scoring.BY_OWNER, clock=lambda: 0.0)
    records = [NodeRecord(i, 1, 0.0) for i in range(4)]
    for i, record in enumerate(records):
        ledger.touch(record, ledger.call(f"w{i % 2}", "a", None, f"r{i}"))
        leaves.add(record, float(i))
    leaves.start()
    assert sorted(asked) == [0, 1, 2, 3]
    asked.clear()
    leaves.start()
    assert leaves.lowest() is records[0]
    assert asked == []
    leaves.changed("w1")
    leaves.start()
    assert sorted(asked) == [1, 3]


def test_a_silent_workflow_expires_within_the_maximal_age():
    now = [0.0]
    ledger = Ledger(clock=lambda: now[0])
    policy = Lifecycle(ledger, lambda: now[0])
    leaves = Leaves(policy.score_node, Scoring.BY_OWNER, clock=lambda: now[0], max_age=60.0)
    silent, heard = NodeRecord(1, 1, 0.0), NodeRecord(2, 1, 0.0)
    ledger.touch(silent, ledger.call("silent", "a", None, "r1"))
    ledger.touch(heard, ledger.call("heard", "a", None, "r2"))
    leaves.add(heard, 1.0)
    leaves.add(silent, 2.0)
    leaves.start()
    assert leaves.lowest() is heard
    now[0] = ledger.limits.idle_seconds + 1
    ledger.call("heard", "a", None, "r3")
    leaves.changed("heard")
    leaves.start()
    assert leaves.lowest() is silent


@pytest.mark.parametrize("scoring", list(Scoring))
def test_memory_stays_in_proportion_to_the_leaves(scoring):
    leaves = Leaves(lambda r: (float(r.id % 3),), scoring, clock=lambda: 0.0)
    records = [NodeRecord(i, 1, 0.0) for i in range(50)]
    for tick in range(20_000):
        record = records[tick * 7 % 50]
        leaves.discard(record)
        leaves.add(record, float(tick))
        if tick % 10 == 0:
            leaves.start()
            leaves.lowest()
    assert len(leaves) == 50
    assert len(leaves._heap) < 1_000
