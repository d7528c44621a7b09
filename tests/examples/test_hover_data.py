"""The HoVer example's data, search and scores."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest

from agentflow.errors import UsageError
from examples.hover.data import OWN_PASSAGES, Claim, Passage, load_claims, load_passages, open_wiki
from examples.hover.retrieval import Index
from examples.hover.scoring import score_claim, summarise

HOVER_FILE = Path(__file__).parents[3] / "shared" / "data" / "hover" / "hover_dev_first2000.json"


@pytest.fixture(scope="module")
def index() -> Index:
    return Index(load_passages())


def test_every_fact_that_an_own_claim_needs_is_in_the_corpus() -> None:
    rows = [json.loads(line) for line in OWN_PASSAGES.read_text(encoding="utf-8").splitlines()]
    sentences = {row["title"]: row["sentences"] for row in rows}
    assert len(sentences) == len(rows) >= 60
    claims = load_claims()
    for claim in claims:
        assert claim.num_hops == len(claim.titles), claim.uid
        for title, number in claim.supporting_facts:
            assert number < len(sentences[title]), (claim.uid, title)
    assert len({c.uid for c in claims}) == len(claims) >= 15
    assert {c.label for c in claims} == {"SUPPORTED", "NOT_SUPPORTED"}
    assert {c.num_hops for c in claims} == {2, 3, 4}


def test_a_search_ranks_the_article_itself_first(index: Index) -> None:
    assert index.search("Vistula river")[0].passage.title == "Vistula"
    assert index.search("Dvorak symphony")[0].passage.title == "Symphony No. 9 (Dvořák)"
    scores = [found.score for found in index.search("river in Germany", k=5)]
    assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize("query", ["", "   ", "zzzz qqqq", "the of and"])
def test_a_query_without_a_known_word_finds_nothing(index: Index, query: str) -> None:
    assert index.search(query) == []


def test_asking_for_more_than_there_is_gives_what_there_is() -> None:
    small = Index([Passage("A", "red apples"), Passage("B", "green apples")])
    assert {f.passage.title for f in small.search("apples", k=50)} == {"A", "B"}
    with pytest.raises(UsageError, match="at least one passage"):
        Index([])


def test_scores_of_one_claim() -> None:
    claim = Claim("x", "c", (("Toruń", 0), ("Vistula", 1), ("Vistula", 0)), "SUPPORTED", 2)
    assert score_claim(claim, ["vistula", "Torun\u0301", "other"], "SUPPORTED") == {
        "all_found": True,
        "recall": 1.0,
        "label_right": True,
    }
    assert score_claim(claim, ["Vistula"], "NOT_SUPPORTED") == {"all_found": False, "recall": 0.5, "label_right": False}
    assert score_claim(claim, [], None) == {"all_found": False, "recall": 0.0, "label_right": False}


def test_what_a_claim_does_not_say_is_not_scored() -> None:
    bare = Claim("x", "c", (), None, 2)
    assert score_claim(bare, ["A"], "SUPPORTED") == {"all_found": None, "recall": None, "label_right": None}
    total = summarise([bare], {})["all"]
    assert (total["claims"], total["with_facts"], total["labelled"]) == (1, 0, 0)
    assert total["recall"] is None
    assert total["label_accuracy"] is None


def test_claims_that_failed_stay_in_the_denominator() -> None:
    claims = load_claims(limit=4)
    right = {claims[0].uid: score_claim(claims[0], claims[0].titles, claims[0].label)}
    total = summarise(claims, right)
    assert total["all"]["claims"] == total["all"]["labelled"] == 4
    assert total["all"]["all_found"] == total["all"]["label_right"] == 1
    assert total["all"]["recall"] == total["all"]["label_accuracy"] == 0.25
    assert sum(group["claims"] for name, group in total.items() if name != "all") == 4


def test_a_wiki_database_is_read(tmp_path: Path) -> None:
    path = tmp_path / "wiki.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE documents (id TEXT PRIMARY KEY, text TEXT)")
        connection.executemany("INSERT INTO documents VALUES (?, ?)", [("A", "One.[SENT]Two."), ("B", "Three.")])
    connection.close()
    assert list(open_wiki(path)) == [Passage("A", "One. Two."), Passage("B", "Three.")]


def test_wrong_files_are_refused_with_a_reason(tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    for read in (load_claims, load_passages, lambda p: list(open_wiki(p))):
        with pytest.raises(UsageError, match="absent"):
            read(absent)
    other = tmp_path / "other"
    other.write_text("[{]")
    for read in (load_claims, load_passages, lambda p: list(open_wiki(p))):
        with pytest.raises(UsageError, match="other"):
            read(other)
    other.write_text('[{"uid": "a", "claim": "b", "label": "MAYBE"}]')
    with pytest.raises(UsageError, match=r"claim 0.*MAYBE"):
        load_claims(other)


@pytest.mark.skipif(not HOVER_FILE.exists(), reason="no HoVer file beside the repository (../shared/data/hover)")
def test_public_claims_are_read() -> None:
    claims = load_claims(HOVER_FILE)
    assert len(claims) == 2000
    assert {c.label for c in claims} == {"SUPPORTED", "NOT_SUPPORTED"}
    assert {c.num_hops for c in claims} == {2, 3, 4}
    oracle = {c.uid: score_claim(c, c.titles, c.label) for c in claims}
    assert summarise(claims, oracle)["all"]["all_found_share"] == 1.0
