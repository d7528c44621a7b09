"""`agentflow bench` and `agentflow report`: what they print and write, and how they answer mistakes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from agentflow.bench import comparisons
from agentflow.bench.comparisons import Options, Results, run_comparison
from agentflow.cli import main
from agentflow.cli.bench import show_results
from agentflow.cli.output import Output


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return run_comparison("ttl", Options(size="tiny")).to_json()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> list[Options]:
    """Comparisons run at the size of tests, whatever size is asked for; what was asked is kept."""
    asked: list[Options] = []

    def run(name: str, options: Options) -> Results:
        asked.append(options)
        return run_comparison(name, Options(mode=options.mode, size="tiny", say=options.say))

    monkeypatch.setattr(comparisons, "run_comparison", run)
    return asked


def test_list_tells_every_comparison(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--list"]) == 0
    shown = capsys.readouterr().out
    assert main(["bench", "--list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["comparisons"]
    assert [c["name"] for c in listed] == [*comparisons.comparison_names(), "kvcmas", "policies"]
    assert all(c["name"] in shown and c["title"] in shown for c in listed)


def test_bench_prints_tables_and_writes_what_report_reads(
    small: list[Options], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "ttl.json"
    assert main(["bench", "ttl", "--quick", "--out", str(out)]) == 0
    shown = capsys.readouterr()
    assert shown.err == "", "progress is for people who watch"
    assert "continuum-preview" in shown.out
    assert "Claims" in shown.out
    assert small[0].size == "quick"
    page = tmp_path / "page.html"
    assert main(["report", str(out), "--out", str(page), "--json"]) == 0
    files = json.loads(capsys.readouterr().out)["files"]
    assert files == [str(page), str(tmp_path / "page.csv"), str(tmp_path / "page.json")]
    assert page.read_text().startswith("<!DOCTYPE html>")


def test_bench_as_json(small: list[Options], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "ttl", "--simulated", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["comparison"] == "ttl"
    assert data["rows"][0]["policy"] == "lru"
    assert small[0].size == "standard"
    assert small[0].mode == "simulated"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["bench"], "which comparison?"),
        (["bench", "speed"], "no comparison 'speed'"),
        (["bench", "ttl", "--only", "memo"], "--only is an option of kvcmas and policies, not of ttl"),
        (["bench", "kvcmas", "--only", "default"], "--only chooses methods of kvcmas --engine"),
        (["bench", "kvcmas", "--engine", "--only", "magic"], "no method magic; there are nonshared, fullshared"),
        (["bench", "policies", "--items", "4"], "--items is an option of kvcmas, not of policies"),
        (["bench", "policies", "--only", "lru"], "no experiment with lru here; there are memo"),
        (["bench", "parity", "--simulated"], "mode engine only"),
        (["bench", "ttl", "--engine", "--simulated"], "not allowed with"),
        (["bench", "ttl", "--repetitions", "0"], "at least 1"),
        (["bench", "ttl", "--out", "no/such/folder/x.json"], "no such folder"),
        (["bench", "ttl", "--out", "."], "it is a folder"),
        (["report"], "RESULTS.json"),
        (["report", "absent.json"], "cannot read absent.json"),
        (["report", "other.json"], "holds no results"),
        (["report", "other.json", "--out", "page.txt"], ".html"),
    ],
)
def test_mistakes_are_told_in_one_line(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("other.json").write_text('{"rows": 1}')
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""


def test_the_table_shows_spread_only_where_there_is_one(
    results: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    row = {**results["rows"][0], "hit_rate": 0.5, "policy": "mine"}
    row["spread"] = {**row["spread"], "hit_rate": [0.4, 0.6]}
    show_results({**results, "rows": [row]}, Output())
    shown = capsys.readouterr().out
    assert "50.0 [40.0-60.0]" in shown
    claims = [{"name": "it holds", "target": "1", "measured": None, "met": False, "note": "because"}]
    show_results({**results, "rows": [row], "claims": claims}, Output())
    shown = capsys.readouterr().out
    assert "not measured" in shown
    assert "missed" in shown


def test_a_report_that_cannot_be_written_is_told(
    results: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data.json"
    data.write_text(json.dumps(results))
    (tmp_path / "page.html").mkdir()
    assert main(["report", str(data), "--out", str(tmp_path / "page.html")]) == 2
    assert "cannot write" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "page.html")
    assert main(["report", str(data), "--out", str(tmp_path / "page.html")]) == 0
