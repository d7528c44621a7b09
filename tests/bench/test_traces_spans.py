"""Spans are exact: two calls share them as far as they share token ids, and they turn back into such ids."""

from __future__ import annotations

import time
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentflow.bench.traces.generators import GENERATORS, Plan, generate
from agentflow.bench.traces.model import Content, Span, Trace, TraceCall, TraceWorkflow
from agentflow.bench.traces.spans import BlockTokens, SpanTokens, SpanTrie
from agentflow.errors import UsageError

ids = st.lists(st.integers(0, 2), max_size=12)
calls = st.lists(st.tuples(ids, ids), min_size=1, max_size=12)


def common(a: list[int], b: list[int]) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


def common_tokens(a: Content, b: Content) -> int:
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += x.tokens
    return n


def trace_of(contents: list[tuple[Content, Content]], tokens: dict[str, tuple[int, ...]] | None = None) -> Trace:
    made = tuple(TraceCall(id=str(i), agent="a", prompt=p, output=o) for i, (p, o) in enumerate(contents))
    return Trace(name="t", workflows=(TraceWorkflow(id="w", calls=made),), tokens=tokens or {})


@settings(max_examples=400, deadline=None)
@given(calls)
def test_spans_are_shared_exactly_as_far_as_token_ids(calls: list[tuple[list[int], list[int]]]) -> None:
    trie = SpanTrie()
    for prompt, output in calls:
        trie.add(prompt, output)
    contents, tokens = trie.contents(), trie.tokens()
    for (prompt, output), (p, o) in zip(calls, contents, strict=True):
        assert sum(s.tokens for s in p) == len(prompt)
        assert [i for s in p for i in tokens[s.id]] == prompt
        assert [i for s in o for i in tokens[s.id]] == output
        assert all(s.tokens for s in p + o)
    for (a, b), (x, y) in zip(combinations(calls, 2), combinations(contents, 2), strict=True):
        assert common_tokens(x[0] + x[1], y[0] + y[1]) == common(a[0] + a[1], b[0] + b[1])


@settings(max_examples=200, deadline=None)
@given(calls, st.integers(0, 5))
def test_made_up_ids_share_as_much_as_the_spans_do(calls: list[tuple[list[int], list[int]]], seed: int) -> None:
    trie = SpanTrie()
    for prompt, output in calls:
        trie.add(prompt, output)
    contents = trie.contents()
    made = SpanTokens(trace_of(contents), low=5, high=9, seed=seed)
    back = [made.ids(p + o) for p, o in contents]
    for (a, b), (x, y) in zip(combinations(calls, 2), combinations(back, 2), strict=True):
        assert common(x, y) == common(a[0] + a[1], b[0] + b[1])
        assert all(5 <= i < 9 for i in x)


def test_a_prompt_inside_another_cuts_it() -> None:
    trie = SpanTrie()
    trie.add([1, 2, 3, 4], [5])
    trie.add([1, 2], [3])
    (long, out), (short, answer) = trie.contents()
    assert [s.tokens for s in long] == [2, 1, 1]
    assert short == long[:1]
    assert answer == long[1:2]
    assert out != answer


def test_spans_behind_several_prefixes_stay_apart_in_all_of_them() -> None:
    a, b, c = Span("a", 1), Span("b", 1), Span("c", 1)
    trace = trace_of([((a, c), ()), ((b, c), ()), ((a, b), ()), ((b, a), ()), ((c, a), ()), ((c, b), ())])
    made = SpanTokens(trace, high=3)
    assert len({made.ids((s,))[0] for s in (a, b, c)}) == 3
    with pytest.raises(UsageError, match="raise high"):
        SpanTokens(trace, high=2)


def test_recorded_ids_are_used_and_made_up_ones_keep_clear_of_them() -> None:
    spans = [Span(str(i), 3) for i in range(6)]
    tokens = {"0": (4, 4, 4), "1": (2, 0, 0)}
    trace = trace_of([((s,), ()) for s in spans], tokens)
    made = SpanTokens(trace, high=6)
    assert made.ids((spans[0],)) == [4, 4, 4]
    assert sorted(made.ids((s,))[0] for s in spans) == [0, 1, 2, 3, 4, 5]


def test_made_up_ids_depend_on_the_seed_alone() -> None:
    trace = generate("hover", Plan(workflows=3))
    contents = [c.prompt for w in trace.workflows for c in w.calls]
    one, same, other = SpanTokens(trace, seed=1), SpanTokens(trace, seed=1), SpanTokens(trace, seed=2)
    backwards = [same.ids(c) for c in reversed(contents)][::-1]
    assert [one.ids(c) for c in contents] == backwards
    assert one.ids(contents[0]) != other.ids(contents[0])


@pytest.mark.parametrize("name", sorted(GENERATORS))
def test_generated_spans_come_back_from_their_token_ids(name: str) -> None:
    trace = generate(name, Plan(workflows=4, max_calls=12, scale=0.2))
    made = SpanTokens(trace)
    every = [c for w in trace.workflows for c in w.calls]
    trie = SpanTrie()
    for call in every:
        trie.add(made.ids(call.prompt), made.ids(call.output))
    found = trie.contents()
    for i, j in combinations(range(len(every)), 2):
        assert common_tokens(found[i][0], found[j][0]) == common_tokens(every[i].prompt, every[j].prompt)


def test_a_thousand_long_calls_take_seconds() -> None:
    rng = np.random.default_rng(0)
    system = rng.integers(0, 1000, 2000).tolist()
    sessions = [[*system, *rng.integers(0, 1000, 2000).tolist()] for _ in range(20)]
    given = []
    for turn in range(50):
        for session in sessions:
            prompt = session[: 4000 + 100 * turn]
            given.append((prompt, rng.integers(0, 1000, 50).tolist()))
            session.extend([*given[-1][1], *rng.integers(0, 1000, 150).tolist()])
    start = time.perf_counter()
    trie = SpanTrie()
    for prompt, output in given:
        trie.add(prompt, output)
    contents = trie.contents()
    assert time.perf_counter() - start < 10
    assert len(contents) == 1000
    assert sum(s.tokens for s in contents[-1][0]) == 8900


@given(st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=4), st.integers(0, 7)), min_size=1, max_size=8))
def test_prompts_of_blocks_share_as_far_as_their_blocks(prompts: list[tuple[list[int], int]]) -> None:
    blocks = BlockTokens(8)
    trie = SpanTrie()
    for hashes, rest in prompts:
        trie.add(blocks.prompt(hashes, 8 * len(hashes) + rest), blocks.fresh(1))
    contents = trie.contents()
    for ((a, _), (b, _)), (x, y) in zip(combinations(prompts, 2), combinations(contents, 2), strict=True):
        assert common_tokens(x[0], y[0]) == 8 * common(a, b)


def test_the_last_block_may_be_partial() -> None:
    blocks = BlockTokens(8)
    assert len(blocks.prompt([1, 2], 11)) == 11
    for hashes, length in (([1, 2], 8), ([1, 2], 0), ([-1], 3)):
        with pytest.raises(ValueError, match=r"more than|negative"):
            blocks.prompt(hashes, length)
    with pytest.raises(UsageError):
        BlockTokens(0)
