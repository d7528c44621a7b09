"""Corrected KV in the real SGLang: exactness, namespaces, reports, fallbacks."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from typing import Any

import pytest

from agentflow.engine.base import Call, Completion, Coordinates, Reuse, Sampling, Segment
from agentflow.engine.embedded import EmbeddedEngine
from agentflow.errors import EngineFailure
from agentflow.events import WorkflowEnded

pytestmark = pytest.mark.engine

Part = tuple[str | None, list[int]]


@pytest.fixture
def fullshared(engine: EmbeddedEngine) -> EmbeddedEngine:
    """The session's engine, which reuses KV of shared segments unchanged (keys moved)."""
    correct(engine, "fullshared")
    return engine


def correct(engine: EmbeddedEngine, method: str | Mapping[str, Any]) -> None:
    """Choose a method for an engine that was just emptied."""
    engine.control("configure", {"reset": False, "correction": method})


def configure(engine: EmbeddedEngine, method: str | Mapping[str, Any]) -> None:
    """Empty the engine and choose a method."""
    engine.configure(reset=True)  # waits until the last call has left the scheduler
    correct(engine, method)


def sound(engine: EmbeddedEngine) -> list[dict[str, Any]]:
    """What the integrity check says once the engine is idle: the last call may not have left the scheduler yet."""
    deadline = time.monotonic() + 20
    while not (found := engine.control("check"))[0]["idle"] and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def empty(engine: EmbeddedEngine) -> None:
    """Empty the radix cache; sources that corrections start from stay."""
    before = engine.stats().details["correction"]["sources"]
    deadline = time.monotonic() + 20
    while True:  # the last call may not have left the scheduler yet
        try:
            engine.control("flush", {})
            break
        except EngineFailure as error:
            if "is busy" not in str(error) or time.monotonic() > deadline:
                raise
        time.sleep(0.02)
    assert engine.stats().details["correction"]["sources"] == before


def tokens(seed: int, n: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1_000, 40_000) for _ in range(n)]


def call(
    agent: str, parts: list[Part], *, reuse: Reuse = "corrected", workflow: str = "w", n: int = 6, forced: Any = None
) -> Call:
    """A call whose prompt is ``parts``: private where the slot is None, else shared in that slot."""
    ids: list[int] = []
    segments = []
    for slot, part in parts:
        segments.append(Segment("private" if slot is None else "shared", len(ids), len(part), slot))
        ids += part
    return Call(
        token_ids=ids,
        segments=tuple(segments),
        at=Coordinates(workflow=workflow, agent=agent),
        sampling=Sampling(max_tokens=n, ignore_eos=True, forced_tokens=forced),
        reuse=reuse,
    )


def kinds(done: Completion) -> list[str]:
    return [d.kind for d in done.decisions if d.policy.startswith("kvcmas")]


PREFIX, QUESTION, GLUE, PLAN, END = tokens(1, 40), tokens(2, 120), tokens(3, 30), tokens(4, 90), tokens(5, 20)
PROMPT: list[Part] = [(None, PREFIX), ("question", QUESTION), (None, GLUE), ("plan", PLAN), (None, END)]


def test_filled_with_the_true_kv_the_answer_is_the_dense_one(fullshared: EmbeddedEngine) -> None:
    """Same prefix, so that the other agent's KV is what a dense prefill would give: every fill is exact."""
    dense = fullshared.generate(call("a", PROMPT))
    assert dense.usage.corrected == 0
    empty(fullshared)
    filled = fullshared.generate(call("b", PROMPT))
    assert filled.usage.corrected == len(QUESTION) + len(PLAN)
    assert filled.usage.cached_device == 0
    assert filled.token_ids == dense.token_ids
    assert kinds(filled) == ["correct"]
    terms = next(d.terms for d in filled.decisions if d.kind == "correct")
    assert terms["computed"] == len(PREFIX) + len(GLUE) + len(END)
    assert terms["ratio"] == 1.0
    assert sound(fullshared) == [{"idle": True, "problems": []}]


def test_exact_calls_never_see_approximate_kv(fullshared: EmbeddedEngine) -> None:
    """The same call gives bit-equal results whether approximate KV of its tokens is cached or not."""
    other: list[Part] = [(None, tokens(9, 70)), *PROMPT[1:]]
    exact = call("b", other, reuse="exact")
    alone = fullshared.generate(exact)
    empty(fullshared)
    fullshared.generate(call("a", PROMPT))
    approximate = fullshared.generate(call("b", other))
    assert approximate.usage.corrected == len(QUESTION) + len(PLAN)
    beside = fullshared.generate(call("b", other, reuse="exact"))
    assert beside.token_ids == alone.token_ids
    assert beside.usage.corrected == 0
    # The private beginning, before the first corrected token, is exact and shared.
    assert beside.usage.cached_device == 70
    # The approximate KV is found by a call that opted in, and not even needed where exact KV reaches as far.
    again = fullshared.generate(call("b", other))
    assert again.usage.cached_device == len(exact.token_ids) - 1
    assert sound(fullshared) == [{"idle": True, "problems": []}]


def test_approximate_kv_is_found_again_by_those_who_opted_in(fullshared: EmbeddedEngine) -> None:
    other: list[Part] = [(None, tokens(9, 70)), *PROMPT[1:]]
    fullshared.generate(call("a", PROMPT))
    first = fullshared.generate(call("b", other))
    again = fullshared.generate(call("b", other))
    assert first.usage.corrected == len(QUESTION) + len(PLAN)
    assert again.usage.corrected == 0
    assert again.usage.cached_device == first.usage.prompt_tokens - 1
    assert again.token_ids == first.token_ids
    more: list[Part] = [*other, ("answer", list(first.token_ids) + tokens(11, 40)), (None, END)]
    longer = fullshared.generate(call("b", more))
    assert longer.usage.cached_device >= first.usage.prompt_tokens


def test_an_answer_is_a_source_for_who_reads_it(fullshared: EmbeddedEngine) -> None:
    answer = fullshared.generate(call("writer", PROMPT, n=24))
    read: list[Part] = [(None, tokens(21, 50)), ("draft", list(answer.token_ids)), (None, END)]
    done = fullshared.generate(call("reader", read))
    assert done.usage.corrected == 23  # the last token was never run through the model
    # Text that goes on otherwise is computed from where it does.
    changed = list(answer.token_ids)
    changed[18] += 1
    read = [(None, tokens(22, 50)), ("draft", changed), (None, END)]
    assert fullshared.generate(call("critic", read)).usage.corrected == 18


def test_what_cannot_be_corrected_says_why(fullshared: EmbeddedEngine) -> None:
    def fallbacks(done: Completion) -> set[str]:
        return {d.reason for d in done.decisions if d.kind == "fallback"}

    none = {"no other agent's KV of this segment is at hand"}
    assert fallbacks(fullshared.generate(call("a", PROMPT))) == none
    other: list[Part] = [(None, GLUE), *PROMPT[1:]]
    assert fallbacks(fullshared.generate(call("b", other, workflow="other"))) == none
    nowhere = call("a", PROMPT)
    short = Sampling(max_tokens=2, ignore_eos=True)
    nowhere = Call(token_ids=nowhere.token_ids, segments=nowhere.segments, sampling=short, reuse="corrected")
    assert fallbacks(fullshared.generate(nowhere)) == {"the call belongs to no workflow"}
    at = Coordinates(workflow="w", agent="a")
    unknown = Call(token_ids=nowhere.token_ids, at=at, sampling=short, reuse="corrected")
    assert fallbacks(fullshared.generate(unknown)) == {"the prompt's segments are not known"}
    stats = fullshared.stats()
    assert stats.details["correction"]["obstacle"] is None
    assert stats.counters["correction_fallbacks"] == 6
    assert "corrected_tokens" not in stats.counters
    fullshared.emit(WorkflowEnded(workflow="w", seq=1, time=1.0))
    fullshared.flush()
    assert fullshared.stats().details["correction"]["sources"] == 2


def test_an_estimator_that_fails_costs_nothing(engine: EmbeddedEngine) -> None:
    correct(engine, {"method": "fullshared", "faults": 1.0})
    dense = engine.generate(call("a", PROMPT))
    empty(engine)
    failed = engine.generate(call("b", PROMPT))
    assert failed.token_ids == dense.token_ids
    assert failed.usage.corrected == 0
    assert {d.reason for d in failed.decisions if d.kind == "fallback"} == {"the estimator failed: RuntimeError"}
    assert engine.stats().counters["estimates_failed"] == 2


def test_methods_are_chosen_by_name(engine: EmbeddedEngine) -> None:
    correct(engine, "nonshared")
    engine.generate(call("a", PROMPT))
    done = engine.generate(call("b", PROMPT[1:]))
    assert kinds(done) == []
    for wrong, said in (
        ("nonsense", "no KV correction method 'nonsense'; known: cacheblend, default"),
        ({"methd": "default"}, "correction takes no methd"),
        ({"faults": 2}, "faults must be a number from 0 to 1"),
        ({"corrector": {"tua": 1}}, "unexpected keyword argument 'tua'"),
        (7, "correction must be a method's name or an object"),
    ):
        with pytest.raises(EngineFailure, match=said):
            engine.control("configure", {"reset": True, "correction": wrong})
    assert engine.stats().details["correction"]["method"] == "nonshared"
    engine.configure(reset=True)
    assert engine.stats().details["correction"]["method"] == "default"


def test_long_prompts_are_filled_chunk_by_chunk(fullshared: EmbeddedEngine) -> None:
    """More than one of the engine's prefill chunks: the plan goes on where the last chunk ended."""
    long: list[Part] = [(None, PREFIX), ("document", tokens(31, 2_600)), (None, GLUE)]
    dense = fullshared.generate(call("a", long))
    empty(fullshared)
    filled = fullshared.generate(call("b", long))
    assert filled.usage.corrected == 2_600
    assert filled.token_ids == dense.token_ids


def test_a_method_may_change_while_a_corrected_call_runs(fullshared: EmbeddedEngine) -> None:
    """Its KV stays under the key that it has: under another the same slots would be in the tree twice."""
    fullshared.generate(call("a", PROMPT))
    empty(fullshared)
    stream = fullshared.stream(call("b", PROMPT, n=120))
    next(stream)
    correct(fullshared, "cacheblend")
    *_, last = stream
    assert last.completion is not None
    assert last.completion.usage.corrected > 0
    assert last.completion.usage.completion_tokens == 120
    assert sound(fullshared) == [{"idle": True, "problems": []}]
    assert fullshared.generate(call("c", PROMPT)).usage.corrected == 0  # nothing of the old method is used
    assert sound(fullshared) == [{"idle": True, "problems": []}]


def test_dense_prefills_become_anchors(engine: EmbeddedEngine) -> None:
    correct(engine, {"method": "default", "corrector": {"min_anchors": 3}})
    for i in range(3):
        parts: list[Part] = [("question", tokens(50 + i, 60)), (None, END)]
        workflow = f"w{i}"
        engine.generate(call("a", [(None, PREFIX), *parts], workflow=workflow))
        engine.generate(call("b", [(None, GLUE), *parts], workflow=workflow))
    deadline = time.monotonic() + 60
    while (found := engine.stats().details["correction"])["work_left"] and time.monotonic() < deadline:
        time.sleep(0.05)  # the engine works when nothing else is due
    assert found["corrector"]["learned"] == 3
    parts = [("question", tokens(70, 60)), (None, END)]
    engine.generate(call("a", [(None, PREFIX), *parts], workflow="new"))
    done = engine.generate(call("b", [(None, GLUE), *parts], workflow="new"))
    assert 40 <= done.usage.corrected < 60


def test_corrected_calls_are_checked_when_the_engine_is_idle(engine: EmbeddedEngine) -> None:
    """Filled with the true KV there is nothing to find; with another agent's, a random model is far off."""
    correct(engine, {"method": "fullshared", "check": 1.0})
    engine.generate(call("a", PROMPT))
    empty(engine)
    engine.generate(call("b", PROMPT))
    same = checked(engine, 1)
    assert same["kl"] < 1e-6
    assert same["agreement"] == 1.0
    whole = engine.stats()
    assert whole.device_free + whole.device_cached + whole.device_held == whole.device_total
    assert sound(engine) == [{"idle": True, "problems": []}]
    configure(engine, {"method": "fullshared", "check": 1.0})
    engine.generate(call("a", PROMPT))
    for i in range(2):
        engine.generate(call("b", [(None, tokens(80 + i, 60)), *PROMPT[1:]]))
    other = checked(engine, 2)
    assert 1e-6 < other["kl"] < 1.0


def checked(engine: EmbeddedEngine, n: int) -> dict[str, Any]:
    deadline = time.monotonic() + 60
    while (found := dict(engine.stats().details["correction"]))["checks"] < n:
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    return found
