"""The HoVer example's graph and program: real retrieval, scripted answers."""

from __future__ import annotations

import json
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import pytest

from agentflow.engine.base import Call
from agentflow.engine.scripted import ScriptedEngine
from agentflow.events import AgentStarted, ToolEnded, WorkflowEnded
from agentflow.graph import AgentApp
from examples.hover.__main__ import main
from examples.hover.agents import build_graph, clean_query
from examples.hover.data import Claim, load_claims, load_passages
from examples.hover.retrieval import Index
from examples.hover.run import check_claim, check_claims, oracle_engine, rows_of
from examples.hover.scoring import summarise


@pytest.fixture(scope="module")
def index() -> Index:
    return Index(load_passages())


@pytest.fixture(scope="module")
def claim() -> Claim:
    return next(c for c in load_claims() if c.uid == "own-05")  # Má vlast -> Vltava -> Elbe


def _app(index: Index, engine: ScriptedEngine, hops: int = 4) -> AgentApp:
    return build_graph(index, hops=hops).compile(engine=engine, max_steps=3 * hops + 4, name="hover")


def _script(queries: list[str], notes: list[str], label: str) -> dict[str, list[str]]:
    return {"plan": ["Look up the cycle."], "query": queries, "note": notes, "verify": [f'{{"label": "{label}"}}']}


async def test_agents_search_and_note_until_the_notes_are_enough(index: Index, claim: Claim) -> None:
    script = _script(
        ["Má vlast second piece", "Vltava", "Elbe river", "DONE"],
        ["It follows the Vltava.", "The Vltava joins the Elbe.", "The Elbe passes Hamburg."],
        "SUPPORTED",
    )
    with ScriptedEngine(script) as engine:
        record = await check_claim(_app(index, engine), claim)
        agents = [e.agent for e in engine.events if isinstance(e, AgentStarted)]
        assert agents == ["plan", *["query", "note"] * 3, "query", "verify"]
        tools = [e for e in engine.events if isinstance(e, ToolEnded)]
        assert [(e.tool, e.agent, e.outcome) for e in tools] == [("search_passages", "query", "ok")] * 3
        assert all(e.duration > 0 for e in tools)
        assert isinstance(engine.events[-1], WorkflowEnded)
        assert "Elbe" in engine.prompt(engine.calls_of("note")[2])
    assert record["queries"] == ["Má vlast second piece", "Vltava", "Elbe river"]
    assert (record["all_found"], record["recall"], record["label_right"]) == (True, 1.0, True)
    assert len(record["found"]) == len(set(record["found"])) == 9
    query = next(row for row in record["agents"] if row["agent"] == "query")
    assert (query["calls"], query["tool_calls"]) == (4, 3)
    assert query["tool_seconds"] > 0


async def test_the_search_stops_at_the_hop_limit(index: Index, claim: Claim) -> None:
    with ScriptedEngine(_script(["Vltava"] * 2, ["A note."] * 2, "NOT_SUPPORTED")) as engine:
        record = await check_claim(_app(index, engine, hops=2), claim)
    assert record["queries"] == ["Vltava", "Vltava"]
    assert len(record["found"]) == len(set(record["found"])), "a search leaves out what was found before"
    assert record["label_right"] is False


def _shared_tokens(engine: ScriptedEngine, call: Call) -> list[tuple[str, str]]:
    return [
        (s.slot or "", engine.tokenizer.decode(call.token_ids[s.start : s.start + s.length]))
        for s in call.segments
        if s.kind == "shared"
    ]


async def test_claim_and_notes_are_shared_and_only_grow(index: Index, claim: Claim) -> None:
    script = _script(["Vltava", "Elbe", "Hamburg", "DONE"], ["First fact.", "Second fact.", "Third fact."], "SUPPORTED")
    with ScriptedEngine(script) as engine:
        await check_claim(_app(index, engine), claim)
        queries = engine.calls_of("query")
        parts = [_shared_tokens(engine, c) for c in queries]
        verify = engine.calls_of("verify")[0]
        slots = [slot for slot, _ in _shared_tokens(engine, verify)]
    assert [[slot for slot, _ in p] for p in parts] == [["claim", "plan", *["notes"] * n] for n in range(4)]
    for earlier, later in pairwise(parts):
        assert later[: len(earlier)] == earlier
    assert slots == ["claim", "notes", "notes", "notes"]
    for earlier_call, later_call in pairwise(queries):
        end = max(s.start + s.length for s in earlier_call.segments if s.kind == "shared")
        pairs = zip(earlier_call.token_ids, later_call.token_ids, strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        assert same >= end, "the next prompt must begin with all of the last one's shared text"


async def test_the_label_is_held_by_a_grammar(index: Index, claim: Claim) -> None:
    with ScriptedEngine(_script(["DONE"], [], "NOT_SUPPORTED")) as engine:
        record = await check_claim(_app(index, engine), claim)
        schema = engine.calls_of("verify")[0].sampling.json_schema
    assert schema is not None
    assert schema["properties"]["label"]["enum"] == ["SUPPORTED", "NOT_SUPPORTED"]
    assert record["label"] == "NOT_SUPPORTED"
    assert record["found"] == []


@pytest.mark.parametrize(
    ("text", "query"),
    [
        ("Vltava river", "Vltava river"),
        ('\n "Vltava river"\nmore', "Vltava river"),
        ("Search query: `Elbe`", "Elbe"),
        ("- Elbe", "Elbe"),
        ("Frankenstein: a novel", "Frankenstein: a novel"),
        ("  \n ", ""),
        ("a" * 500, "a" * 200),
    ],
)
def test_queries_are_cleaned(text: str, query: str) -> None:
    assert clean_query(text) == query


async def test_gold_answers_score_perfectly(index: Index) -> None:
    claims = load_claims()
    with oracle_engine(claims) as engine:
        batch = await check_claims(claims, engine, index, concurrency=7)
    total = summarise(claims, {r["uid"]: r for r in batch.records})
    assert batch.errors == {}
    assert {name: (s["all_found_share"], s["recall"], s["label_accuracy"]) for name, s in total.items()} == {
        name: (1.0, 1.0, 1.0) for name in ("all", "2 hops", "3 hops", "4 hops")
    }
    rows = {row.agent: row for row in rows_of(batch.records)}
    assert rows["plan"].calls == rows["verify"].calls == len(claims)
    assert rows["query"].tool_calls == rows["note"].calls == sum(len(c.titles) for c in claims)


async def test_a_claim_that_fails_counts_as_wrong_and_is_tried_again(index: Index, tmp_path: Path) -> None:
    claims = load_claims(limit=3)
    path = tmp_path / "results.jsonl"
    gold = oracle_engine(claims)

    def broken(call: Call) -> str:
        return "not json" if call.at.workflow == "hover-own-02" else '{"label": "SUPPORTED"}'

    answers: dict[str, Any] = {"plan": lambda c: "p", "query": lambda c: "DONE", "note": lambda c: "n"}
    with ScriptedEngine({**answers, "verify": broken}) as engine:
        first = await check_claims(claims, engine, index, results=path)
    assert list(first.errors) == ["own-02"]
    assert "Output" in first.errors["own-02"]
    total = summarise(claims, {r["uid"]: r for r in first.records})["all"]
    assert (total["claims"], total["labelled"], total["label_right"]) == (3, 3, 2)
    with gold:
        second = await check_claims(claims, gold, index, results=path)
    assert second.errors == {}
    assert second.resumed == 2
    assert [r["uid"] for r in second.records] == ["own-01", "own-02", "own-03"]


def test_the_program_proves_its_scorer(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    arguments = ["--oracle", "--claims", "3", "--concurrency", "2", "--json", "--results", str(path)]
    assert main(arguments) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["scores"]["all"]["label_right"] == shown["scores"]["all"]["all_found"] == 3
    assert [c["uid"] for c in shown["claims"]] == ["own-01", "own-02", "own-03"]
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["resumed"] == 3


def test_tables_on_a_pipe_have_no_colours_and_no_progress(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--oracle", "--claims", "2"]) == 0
    shown = capsys.readouterr()
    assert "2 of 2" in shown.out
    assert "\x1b" not in shown.out
    assert shown.err == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--claims", "0"], "--claims must be at least 1"),
        (["--claims-file", "absent.json"], "absent.json"),
        (["--wiki", "absent.db"], "absent.db"),
        (["--engine-url", "http://x", "--model", "y"], "--model cannot go with --engine-url"),
        (["--engine-url", "localhost"], "http://"),
    ],
)
def test_mistakes_are_told_in_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1
