"""The parts of KV correction in the engine that need no engine: plans, sources, namespaces, options."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agentflow.cache.kvcmas import Estimate, SegmentKV
from agentflow.engine.sglang.correction.namespace import broken_paths, is_approximate, marked
from agentflow.engine.sglang.correction.options import CorrectionOptions
from agentflow.engine.sglang.correction.plan import Fill, FillPlan, fills_of
from agentflow.engine.sglang.correction.rows import runs_of
from agentflow.engine.sglang.correction.sources import Source, Sources
from agentflow.errors import UsageError


def kv(start: int, tokens: int) -> SegmentKV:
    values = torch.arange(start, start + tokens, dtype=torch.float32).reshape(1, tokens, 1, 1)
    return SegmentKV(values, -values, start)


def positions(part: SegmentKV) -> list[int]:
    assert part.keys.flatten().tolist() == list(range(part.start, part.end))
    return list(range(part.start, part.end))


def test_a_plan_computes_what_it_does_not_fill() -> None:
    plan = FillPlan(5, (Fill(kv(10, 10)), Fill(kv(30, 5))))
    assert plan.boundary == 10
    assert plan.tokens == 15
    assert plan.runs(5, 40) == [(5, 10), (20, 30), (35, 40)]
    assert [positions(p) for p in plan.within(5, 40)] == [list(range(10, 20)), list(range(30, 35))]
    # In chunks: each computes its last token, filled or not, and something at least.
    assert plan.runs(5, 15) == [(5, 10), (14, 15)]
    assert plan.runs(15, 18) == [(17, 18)]
    assert plan.runs(18, 40) == [(20, 30), (35, 40)]
    assert plan.runs(10, 20) == [(19, 20)]
    assert [positions(p) for p in plan.within(15, 18)] == [[15, 16, 17]]
    assert FillPlan(0, ()).runs(0, 9) == [(0, 9)]
    assert FillPlan(0, ()).boundary is None


@pytest.mark.parametrize(
    ("wants", "folded"), [((), True), (("return_logprob",), False), (("return_hidden_states",), False)]
)
def test_a_batch_is_computed_whole_where_sglang_counts_its_rows(wants: tuple[str, ...], folded: bool) -> None:
    plan = FillPlan(0, (Fill(kv(10, 10)),))
    req = SimpleNamespace(agentflow=SimpleNamespace(correction=SimpleNamespace(plan=plan)))
    options = {"return_logprob": False, "return_hidden_states": False, **dict.fromkeys(wants, True)}
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(is_extend=lambda: True),
        decoding_reqs=None,
        reqs=[req],
        prefix_lens=[0],
        extend_lens=[30],
        **options,
    )
    assert runs_of(batch) == ({0: [(0, 10), (20, 30)]} if folded else {})


def test_an_estimate_becomes_fills_around_what_is_recomputed() -> None:
    estimate = Estimate(kv=kv(100, 10), recompute=(0, 1, 5, 9), confidence=1.0, method="m")
    assert [positions(f.kv) for f in fills_of(estimate, 0)] == [[102, 103, 104], [106, 107, 108]]
    assert [positions(f.kv) for f in fills_of(estimate, 4)] == [[104], [106, 107, 108]]
    assert [positions(f.kv) for f in fills_of(estimate, 7)] == [[107, 108]]
    assert fills_of(Estimate(kv=kv(0, 2), recompute=(0, 1), confidence=1.0, method="m"), 0) == []


def source(agent: str, tokens: list[int], *, workflow: str = "w", exact: bool = True) -> Source:
    return Source(workflow, agent, tuple(tokens), kv(0, len(tokens)), exact)


def test_sources_are_found_by_how_they_begin() -> None:
    sources = Sources(10**6)
    text = list(range(100, 140))
    assert sources.add(source("a", text))
    assert sources.add(source("b", [*text[:20], 1, 2, 3]))
    assert [(f.source.agent, f.tokens) for f in sources.find("w", text, minimum=16)] == [("a", 40), ("b", 20)]
    assert [(f.source.agent, f.tokens) for f in sources.find("w", text[:30], minimum=25)] == [("a", 30)]
    assert sources.find("other", text, minimum=16) == []
    assert sources.find("w", text[1:], minimum=16) == []
    assert not sources.add(source("a", text[:7]))  # too short to be told apart


def test_an_exact_source_is_not_replaced_by_an_approximate_one() -> None:
    sources = Sources(10**6)
    text = list(range(20))
    sources.add(source("a", text))
    assert not sources.add(source("a", text, exact=False))
    assert sources.has("w", "a", text, exact=True)
    sources.add(source("b", text, exact=False))
    assert sources.has("w", "b", text, exact=False)
    assert not sources.has("w", "b", text, exact=True)
    sources.add(source("b", text))
    assert sources.has("w", "b", text, exact=True)
    assert len(sources) == 2


def test_sources_are_bounded_in_bytes_and_the_unused_go_first() -> None:
    size = source("a", list(range(20))).kv.nbytes
    sources = Sources(3 * size)
    made = [source("a", list(range(n, n + 20))) for n in (0, 100, 200)]
    for one in made:
        sources.add(one)
    sources.used(made[0])
    sources.add(source("a", list(range(300, 320))))
    assert {s.tokens[0] for s in sources} == {0, 200, 300}
    assert (sources.bytes, sources.dropped) == (3 * size, 1)
    assert not sources.add(source("a", list(range(100))))  # larger than all there is room for
    sources.add(source("a", list(range(20)), workflow="v"))
    sources.ended("w")
    assert [s.workflow for s in sources] == ["v"]
    assert sources.bytes == size
    sources.clear()
    assert (len(sources), sources.bytes) == (0, 0)


@dataclass
class Key:
    ids: array[int]

    def raw_token_ids(self) -> array[int]:
        return self.ids


@dataclass
class Node:
    id: int
    key: Key
    parent: Any = None
    children: dict[Any, Any] = field(default_factory=dict)


def test_approximate_keys_are_out_of_reach_of_exact_ones() -> None:
    ids = array("q", [5, 6, 7, 8])
    mine = marked(ids, 2, 3)
    assert list(mine[:2]) == [5, 6]
    assert all(is_approximate(t) for t in mine[2:])
    assert not any(is_approximate(t) for t in ids)
    assert list(marked(ids, 2, 4)[2:]) != list(mine[2:])
    assert list(ids) == [5, 6, 7, 8]


def test_broken_namespaces_are_seen() -> None:
    root = Node(0, Key(array("q")))
    exact = Node(1, Key(array("q", [1, 2])), root)
    rough = Node(2, Key(marked(array("q", [3, 4]), 0, 1)), exact)
    below = Node(3, Key(marked(array("q", [5]), 0, 1)), rough)
    assert broken_paths([root, exact, rough, below], root) == []
    below.key = Key(array("q", [5]))
    exact.key = Key(marked(array("q", [1, 2]), 1, 1))
    found = broken_paths([root, exact, rough, below], root)
    assert found == [
        "node 1 mixes namespaces [0, 1]",
        "node 3 of namespaces [0] hangs below namespace 1",
    ]


def test_options_are_read_from_a_name_an_object_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CorrectionOptions.read(None) == CorrectionOptions()
    assert CorrectionOptions.read("kvcomm").method == "kvcomm"
    assert CorrectionOptions.read({"check": 1, "minimum": 8}) == CorrectionOptions(check=1, minimum=8)
    assert CorrectionOptions.read("nonshared").off
    monkeypatch.setenv("AGENTFLOW_CORRECTION", "fullshared")
    assert CorrectionOptions.from_environment().method == "fullshared"
    monkeypatch.setenv("AGENTFLOW_CORRECTION", '{"method": "segment", "corrector": {"rank": 16}}')
    assert CorrectionOptions.from_environment().corrector == {"rank": 16}
    some = CorrectionOptions(method="segment", check=0.5)
    assert some.alike(CorrectionOptions(method="segment", check=0.0, enforce=False))
    assert not some.alike(CorrectionOptions(method="ridge", check=0.5))
    wrong = ({"minimum": 0}, {"check": True}, {"enforce": 1}, {"corrector": 3}, {"method": 3}, 7, {"x": 1})
    for raw in wrong:
        with pytest.raises(UsageError, match="correction"):
            CorrectionOptions.read(raw)
