"""The engine benchmark of KV correction: its prompts and its figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentflow.bench.kvcmas.data import AGENTS
from agentflow.bench.kvcmas.engine import ANSWER, Workflows
from agentflow.bench.kvcmas.summarise import engine_table, summarise
from agentflow.engine.scripted import ScriptedEngine

DATA = Path(__file__).parents[2].parent / "shared" / "data"


@pytest.mark.skipif(not DATA.is_dir(), reason="the data is not there")
def test_prompts_hold_a_document_of_their_workflow_and_what_was_written_before() -> None:
    made = Workflows(ScriptedEngine([]), DATA, seed=1)
    first, second = made.prompts(64), made.prompts(64)
    assert [p.agent for p in first] == [a.name for a in AGENTS]
    documents = []
    for place, prompt in enumerate(first):
        shared = [s for s in prompt.segments if s.kind == "shared"]
        assert [s.length for s in shared] == [64, *[ANSWER] * place]
        assert [s.producer for s in shared] == [None, *[a.name for a in AGENTS[:place]]]
        assert sum(s.length for s in prompt.segments) == len(prompt.ids)
        parts = [prompt.ids[s.start : s.start + s.length] for s in shared]
        documents.append(parts[0])
        assert parts[1:] == [p.answer for p in first[:place]]
    assert len(set(documents)) == 1
    document = next(s for s in second[0].segments if s.slot == "document")
    assert second[0].ids[document.start : document.start + document.length] != documents[0]


def row(method: str, place: int, ttft: float, **more: Any) -> dict[str, Any]:
    base = {"kind": "call", "tokens": 512, "gap": None, "prompt": 100, "corrected": 0, "estimating": 0.0}
    return {**base, "method": method, "beside": "default", "place": place, "ttft": ttft, "reference": 0.0, **more}


def test_figures_by_hand() -> None:
    rows = [
        row("nonshared", 0, 4.0), row("nonshared", 1, 4.0), row("nonshared", 2, 6.0), row("nonshared", 3, 6.0),
        row("default", 0, 4.0), row("default", 1, 2.0, corrected=80), row("default", 2, 1.0, corrected=60),
        row("default", 3, 1.0, corrected=70, reference=0.5),
        {"kind": "quality", "method": "default", "tokens": 512, "checks": 3, "kl": 0.01, "agreement": 0.9},
    ]  # fmt: skip
    dense, ours = summarise(rows, ("nonshared", "default"))
    assert (dense["ttft"], dense["speedup"], dense["speedup_readers"], dense["kl"]) == (5.0, 1.0, 1.0, None)
    assert ours["ttft"] == 2.0
    assert ours["speedup"] == 2.5
    assert ours["speedup_readers"] == pytest.approx((16 / 3) / (4 / 3))
    assert ours["median_readers"] == 1.0
    assert ours["reuse"] == pytest.approx(0.7)
    assert ours["reference"] == pytest.approx(0.5 / 3)
    assert (ours["kl"], ours["agreement"], ours["checks"]) == (0.01, 0.9, 3)
    # A method is compared with the runs beside it, not with those of a slower hour.
    slow = [{**r, "beside": "kvcomm", "ttft": 3 * r["ttft"]} for r in rows[:4]]
    slow += [{**r, "method": "kvcomm", "beside": "kvcomm", "ttft": 3 * r["ttft"]} for r in rows[4:8]]
    dense, again, other = summarise([*rows, *slow], ("nonshared", "default", "kvcomm"))
    assert (dense["calls"], dense["ttft"]) == (8, 10.0)
    assert again["speedup"] == other["speedup"] == 2.5
    dense, ours = summarise(rows, ("nonshared", "default"))
    table = engine_table({"summary": [dense, ours]}).markdown()
    assert "| 512 | default | 2.00 | 1.00 | 1.00-2.00 | 2.50 | 4.00 | 0.70 | 0.0100 | 0.900 |" in table
