"""The cache alone: nothing beats the oracle, and the bound is the best that search finds."""

from __future__ import annotations

from functools import cache
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentflow.bench.simulator import cache_replay, most_hits
from agentflow.bench.traces.model import Span, Trace, TraceCall, TraceTool, TraceWorkflow
from agentflow.cache.ledger import NodeRecord
from agentflow.cache.policy import Policy, Score, policy_names
from agentflow.errors import UsageError

PAGE = 2


class Arbitrary(Policy):
    """Scores that mean nothing, to reach orders that no sensible policy has."""

    name: ClassVar[str] = "arbitrary"

    def score_node(self, node: NodeRecord) -> Score:
        return (float(node.path_hash * 2654435761 % 97), float(node.hits % 3))


POLICIES = [n for n in policy_names() if n != "belady"] + [f"{__name__}:Arbitrary"]


@st.composite
def traces(draw, *, fresh: bool, workflows: int = 4, calls: int = 5):
    """Workflows over a small alphabet of spans. ``fresh``: every answer is written once only."""
    made = []
    number = 0
    for w in range(draw(st.integers(1, workflows))):
        history: list[Span] = []
        of = []
        for c in range(draw(st.integers(1, calls))):
            number += 1
            start = history[: draw(st.integers(0, len(history)))]
            alphabet = st.integers(0, 5).map(lambda n: Span(f"s{n}", n + 1))
            prompt = start + draw(st.lists(alphabet, min_size=0 if start else 1, max_size=3))
            size = draw(st.integers(0, 5))
            answer = Span(f"out{number}" if fresh else f"out{size}", size)
            of.append(
                TraceCall(
                    id=str(c),
                    agent=draw(st.sampled_from(["planner", "coder"])),
                    prompt=tuple(prompt),
                    output=(answer,),
                    wait_for=(str(c - 1),) if c else (),
                    delay=draw(st.sampled_from([0.0, 1.0, 3.0])),
                    tools=(TraceTool(name="bash", duration=0.5),) if c else (),
                    superseded=draw(st.booleans()),
                )
            )
            history = [*prompt, answer] if answer.tokens else prompt
        made.append(TraceWorkflow(id=f"w{w}", calls=tuple(of), arrival=float(draw(st.integers(0, 4)))))
    return Trace(name="made", workflows=tuple(made), edges={"planner": ("coder",), "coder": ("planner",)})


@settings(max_examples=150, deadline=None)
@given(traces(fresh=True), st.integers(4, 40))
def test_no_policy_ever_beats_the_oracle(trace, capacity):
    oracle = cache_replay(trace, "belady", capacity, PAGE)
    for policy in POLICIES:
        result = cache_replay(trace, policy, capacity, PAGE)
        assert result.hit_pages <= oracle.hit_pages, policy
        assert (result.prompt_pages, result.skipped) == (oracle.prompt_pages, oracle.skipped)
    assert oracle.hit_pages == most_hits(trace, capacity, PAGE).hit_pages


@settings(max_examples=150, deadline=None)
@given(traces(fresh=False), st.integers(4, 40))
def test_no_policy_ever_beats_the_bound_whatever_is_written_again(trace, capacity):
    bound = most_hits(trace, capacity, PAGE)
    for policy in [*POLICIES, "belady"]:
        assert cache_replay(trace, policy, capacity, PAGE).hit_pages <= bound.hit_pages, policy


@settings(max_examples=100, deadline=None)
@given(traces(fresh=True, workflows=3, calls=3), st.integers(3, 7))
def test_the_bound_is_what_an_exhaustive_search_finds(trace, pages):
    assert most_hits(trace, pages, 1).hit_pages == best_by_search(trace, pages)


def best_by_search(trace: Trace, capacity: int) -> int:
    """The most hits over all that could be kept after each call, in pages of one token, closed under prefixes."""
    from agentflow.bench.simulator.replay import _steps

    steps, _ = _steps(trace, capacity, 1)
    paths = [tuple(s.path) for s in steps]
    parent = {p: path[i - 1] if i else None for path in paths for i, p in enumerate(path)}

    @cache
    def best(number: int, cached: frozenset) -> int:
        if number == len(steps):
            return 0
        path = set(paths[number])
        hits = sum(p in cached for p in paths[number][: steps[number].prompt])
        others = cached - path
        return hits + max(
            best(number + 1, frozenset(path | kept)) for kept in closed(frozenset(others), path, capacity - len(path))
        )

    def closed(others: frozenset, path: set, room: int) -> set[frozenset]:
        """The largest choices of at most ``room`` of the others whose parents are there too."""
        if len(others) <= room:
            return {others}
        out: set[frozenset] = set()
        for leaf in others:
            if not any(parent[p] == leaf for p in others):
                out |= closed(others - {leaf}, path, room)
        return out

    return best(0, frozenset())


def call(number: int, *spans: str, wait: bool = True, output: int = 0) -> TraceCall:
    return TraceCall(
        id=str(number),
        agent="a",
        prompt=tuple(Span(s, 1) for s in spans),
        output=(Span(f"out{number}", output),),
        wait_for=(str(number - 1),) if wait and number else (),
        delay=1.0,
    )


def test_a_hand_worked_case():
    """Four pages. After ab, ac, ad the cache is full; e needs one page. Needed next are ab and ad, so that the oracle
    drops c, where LRU drops b."""
    calls = [("a", "b"), ("a", "c"), ("a", "d"), ("e",), ("a", "b"), ("a", "d")]
    workflow = TraceWorkflow(id="w", calls=tuple(call(n, *spans) for n, spans in enumerate(calls)))
    trace = Trace(name="t", workflows=(workflow,))
    oracle = cache_replay(trace, "belady", 4, 1)
    lru = cache_replay(trace, "lru", 4, 1)
    assert oracle.hit_pages == 1 + 1 + 0 + 2 + 2
    assert lru.hit_pages == 1 + 1 + 0 + 1 + 2
    assert most_hits(trace, 4, 1).hit_pages == 6
    assert oracle.prompt_pages == 11
    assert oracle.evicted_pages == 1
    assert oracle.hit_rate == pytest.approx(6 / 11)


def test_lifecycle_keeps_what_a_live_workflow_will_read_where_lru_does_not():
    """A finished workflow's pages are newer than those of one that waits for its tool."""
    waits = TraceWorkflow(
        id="waits",
        calls=(
            TraceCall(id="0", agent="a", prompt=(Span("x", 4),), output=()),
            TraceCall(id="1", agent="a", prompt=(Span("x", 4),), output=(), wait_for=("0",), delay=9.0),
        ),
    )
    ends = TraceWorkflow(
        id="ends", arrival=1.0, calls=(TraceCall(id="0", agent="a", prompt=(Span("y", 4),), output=()),)
    )
    more = TraceWorkflow(
        id="more", arrival=2.0, calls=(TraceCall(id="0", agent="a", prompt=(Span("z", 4),), output=()),)
    )
    trace = Trace(name="t", workflows=(waits, ends, more))
    assert cache_replay(trace, "lifecycle", 8, 1).hit_pages == 4
    assert cache_replay(trace, "lru", 8, 1).hit_pages == 0
    assert cache_replay(trace, "belady", 8, 1).hit_pages == 4


def test_calls_that_do_not_fit_are_left_out_and_counted():
    workflow = TraceWorkflow(id="w", calls=(call(0, "a"), call(1, "a", "b", "c"), call(2, "a")))
    result = cache_replay(Trace(name="t", workflows=(workflow,)), "lru", 2, 1)
    assert (result.calls, result.skipped, result.hit_pages) == (2, 1, 1)


def test_only_whole_pages_count():
    workflow = TraceWorkflow(
        id="w", calls=tuple(TraceCall(id=str(n), agent="a", prompt=(Span("x", 7),), output=()) for n in range(2))
    )
    result = cache_replay(Trace(name="t", workflows=(workflow,)), "lru", 100, 4)
    assert (result.prompt_pages, result.hit_pages) == (2, 1)


def test_a_cache_smaller_than_a_page_is_refused():
    with pytest.raises(UsageError, match="holds no page"):
        cache_replay(Trace(name="t", workflows=()), "lru", 3, 4)


def test_the_oracle_is_refused_where_nobody_tells_the_future():
    from agentflow.runtime import Runtime

    with pytest.raises(UsageError, match="recorded future"):
        Runtime(["belady"])
