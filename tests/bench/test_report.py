"""The report: well-formed, self-contained, escaped, labelled, and right at a phone's width in a real browser."""

from __future__ import annotations

import copy
import csv
import io
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from agentflow.bench.comparisons import Options, run_comparison
from agentflow.bench.report import headline, page, rows_csv, write_report
from agentflow.bench.report.charts import Point, Series, lines
from agentflow.bench.report.markup import el, text
from agentflow.bench.report.scales import linear, logarithmic, number
from agentflow.bench.report.verdict import is_told, standings, winner

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
EVIL = '<script>alert("x")</script>&\'"'


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return [run_comparison(name, Options(size="tiny")).to_json() for name in ("pbkv", "ttl")]


@pytest.fixture(scope="module")
def html(results: list[dict[str, Any]]) -> str:
    return page(results)


class Reader(HTMLParser):
    """Checks that tags nest, and collects them."""

    VOID = frozenset({"meta", "br", "link", "img", "input", "hr"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        assert len(dict(attrs)) == len(attrs), f"an attribute stands twice in {tag}"
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag


def read(html: str) -> Reader:
    reader = Reader()
    reader.feed(html)
    reader.close()
    assert reader.open == []
    return reader


# ---------------------------------------------------------------------- the page


def test_the_page_is_well_formed_as_html_and_as_xml(html: str) -> None:
    read(html)
    ElementTree.fromstring(html.removeprefix("<!DOCTYPE html>"))


def test_the_page_needs_nothing_from_outside(html: str) -> None:
    reader = read(html)
    assert not {tag for tag, _ in reader.seen} & {"script", "link", "img", "iframe", "object", "base"}
    for _, attributes in reader.seen:
        assert "src" not in attributes
        assert not any(name.startswith("on") for name in attributes)
        if "href" in attributes:
            assert str(attributes["href"]).startswith("#")
    for outside in ("@import", "url(", "http://", "https://"):
        assert outside not in html.replace("http://www.w3.org/2000/svg", "")


def test_all_text_is_escaped(results: list[dict[str, Any]]) -> None:
    data = copy.deepcopy(results[0])
    data["title"] = data["size"] = data["comparison"] = EVIL
    for row in data["rows"]:
        row["policy"] += EVIL
        row["load"] = EVIL
    data["claims"] = [dict.fromkeys(("name", "target", "note"), EVIL) | {"measured": 1.0, "met": True}]
    data["machine"] = {"processor": EVIL, "cores": EVIL}
    data["setting"] = {"model": EVIL}
    data["columns"] = {EVIL: EVIL}
    for run in data["timelines"]:
        run["policy"] = run["load"] = EVIL
        for decision in run["decisions"]:
            decision["reason"] = EVIL
        for call in run["calls"]:
            call["agent"] = EVIL
    written = page([data])
    assert "<script" not in written
    assert "&lt;script&gt;alert(&quot;x&quot;)&lt;/script&gt;" in written
    read(written)


def test_plots_and_tables_are_labelled(html: str) -> None:
    root = ElementTree.fromstring(html.removeprefix("<!DOCTYPE html>"))
    svg = "{http://www.w3.org/2000/svg}"
    images = [e for e in root.iter(f"{svg}svg") if e.get("role") == "img"]
    assert len(images) > 10
    for image in images:
        assert image.findtext(f"{svg}title")
        assert len(image.findtext(f"{svg}desc") or "") > 20
        assert image.get("aria-label")
    tables = list(root.iter("table"))
    assert tables
    for table in tables:
        assert table.findtext("caption")
        heads = [e.get("scope") for e in table.iter("th")]
        assert set(heads) == {"col", "row"}
    regions = [e for e in root.iter("div") if "scroll" in (e.get("class") or "")]
    assert len(regions) >= len(tables)
    for region in regions:
        assert (region.get("tabindex"), region.get("role")) == ("0", "region")
        assert region.get("aria-label")
    decorative = [e for e in root.iter() if e.tag.endswith("svg") and e.get("role") != "img"]
    assert all(e.get("aria-hidden") == "true" for e in decorative)
    assert root.get("lang") == "en"


def test_colours_follow_the_reader_and_print(html: str) -> None:
    assert "prefers-color-scheme:dark" in html
    assert "@media print" in html
    assert 'name="viewport"' in html


def test_the_page_shows_what_happened_and_how_wrong_forecasts_may_be(html: str) -> None:
    for title in ("Against lru", "Hit rate over memory", "How wrong forecasts may be", "What happened when", "Claims"):
        assert f"<h3>{title}" in html
    assert "Timeline of pbkv-queue on swebench" in html
    assert "Memory by owner, lru on swebench" in html
    assert 'class="evict"' in html


# ---------------------------------------------------------------------- who won


def row(policy: str, hits: float, e2e: float, **more: Any) -> dict[str, Any]:
    against = {"hit_rate": [hits, hits * 0.9, hits * 1.1], "e2e_mean": [e2e, e2e * 0.9, e2e * 1.1]}
    return {"policy": policy, "against_lru": against, "load": "x", **more}


def test_the_winner_is_the_fastest_that_is_not_told_the_future() -> None:
    rows = [row("lru", 1, 1), row("belady", 3, 0.2), row("mine", 2, 0.5), row("mine", 2, 0.125), row("other", 1.5, 0.8)]
    best = winner(rows, "e2e_mean")
    assert best is not None
    assert (best.policy, best.places) == ("mine", 2)
    assert best.mean == pytest.approx(4.0)
    assert best.low == pytest.approx(1 / 0.55)
    assert best.high == pytest.approx(1 / 0.1125)
    assert [s.policy for s in standings(rows, "hit_rate")] == ["belady", "mine", "other", "lru"]
    data = {"comparison": "baselines", "rows": rows, "claims": [{"met": True}, {"met": False}]}
    first, more = headline(data)
    assert first == "mine wins: calls finish 4.00x as fast as with lru."
    assert "between 1.82x and 8.89x" in more[0]
    assert more[1] == "1 of 2 claims met."


def test_no_winner_is_named_where_there_is_none() -> None:
    even = {"comparison": "baselines", "rows": [row("lru", 1, 1), row("mine", 1, 0.995)], "claims": []}
    assert headline(even)[0] == "No policy beats lru by more than 2% in time."
    assert "no lru" in headline({"comparison": "baselines", "rows": [], "claims": []})[0]
    disturbed = [row("lru", 1, 1), row("mine", 2, 0.5, noise=0.5)]
    assert [s.policy for s in standings(disturbed, "e2e_mean")] == ["lru"]
    assert is_told("kvflow-oracle")
    assert not is_told("kvflow")


def test_the_headline_of_parity_tells_agreement() -> None:
    claims = [
        {"name": "hit rate of lru in the simulator", "measured": 1.26, "met": True},
        {"name": "ranking of policies", "measured": 0.0, "met": True},
    ]
    data = {"comparison": "parity", "rows": [], "claims": claims}
    assert headline(data)[0] == "The simulator agrees with the real engine: hit rates at most 1.3 points apart."
    claims[1]["met"] = False
    first, more = headline(data)
    assert first.startswith("The simulator differs")
    assert more[1] == "Missed: ranking of policies."


# ---------------------------------------------------------------------- pieces


def test_markup_escapes_values_and_attributes() -> None:
    assert el("p", "<b>", title='"') == '<p title="&quot;">&lt;b&gt;</p>'
    assert el("p", el("b", 1), class_="x", aria_label=None) == '<p class="x"><b>1</b></p>'
    assert text(text("<")) == "&lt;"
    assert el("line", x1=1.23456) == '<line x1="1.23"/>'


def test_scales() -> None:
    scale = linear(0.0, 0.83, 100, 0)
    assert list(scale.ticks) == pytest.approx([0, 0.25, 0.5, 0.75, 1.0])
    assert (scale(0.0), scale(0.5), scale(1.0), scale(9.0)) == (100, 50, 0, 0)
    powers = logarithmic([8.0, 2.0, 4.0], 0, 100)
    assert (powers(2.0), powers(4.0), powers(8.0)) == pytest.approx((0, 50, 100))
    assert logarithmic([3.0], 0, 100)(3.0) == 0
    assert [number(v) for v in (0, 0.12345, 5120, 25_000)] == ["0", "0.123", "5.12k", "25k"]


def test_a_plot_says_in_words_what_it_shows() -> None:
    points = [Point(1.0, 0.5, 0.4, 0.6), Point(2.0, 0.25, 0.25, 0.25)]
    drawn = lines("Hits", "pressure", "hit rate, %", [Series("mine", 1, points)], percent=True)
    assert "Over pressure: mine 50.0 % at 1, 25.0 % at 2." in drawn
    assert drawn.count('class="err k1"') == 1, "only where there is a spread"


def test_csv_and_json_stand_beside_the_page(results: list[dict[str, Any]], tmp_path: Path) -> None:
    files = write_report(results, tmp_path / "r.html")
    assert [f.name for f in files] == ["r.html", "r.csv", "r.json"]
    assert json.loads(files[2].read_text())["results"][1]["rows"] == results[1]["rows"]
    rows = list(csv.DictReader(io.StringIO(files[1].read_text())))
    assert len(rows) == sum(len(d["rows"]) for d in results)
    assert float(rows[0]["hit_rate"]) == results[0]["rows"][0]["hit_rate"]
    assert float(rows[0]["hit_rate_least"]) <= float(rows[0]["hit_rate"]) <= float(rows[0]["hit_rate_greatest"])
    assert rows_csv(results).count("\r\n") == len(rows) + 1


# ---------------------------------------------------------------------- in a browser

MEASURE = """<script>addEventListener("load",()=>{const d=document.documentElement;
d.dataset.width=d.scrollWidth;d.dataset.view=d.clientWidth;
d.dataset.small=[...document.querySelectorAll("figure svg text")].filter(t=>t.getBoundingClientRect().height<9).length;
const s=document.querySelector(".scroll");s.focus();d.dataset.focus=document.activeElement===s})</script>"""


def browser() -> str:
    found = next((p for p in map(shutil.which, BROWSERS) if p), None)
    if found is None:
        pytest.skip(f"no browser: install one of {', '.join(BROWSERS)}")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
def test_in_a_browser_nothing_overflows_and_nothing_is_complained_about(html: str, width: int, tmp_path: Path) -> None:
    # A window of Chromium has a least width of 500, so that a phone's is made by a frame.
    (tmp_path / "page.html").write_text(html.replace("</body>", f"{MEASURE}</body>"))
    frame = tmp_path / "frame.html"
    frame.write_text(
        f'<!DOCTYPE html><iframe id="f" src="page.html" style="width:{width}px;height:900px;border:0"></iframe><script>'
        'addEventListener("load",()=>{const d=document.getElementById("f").contentDocument.documentElement.dataset;'
        "document.title=JSON.stringify(d)})</script>"
    )
    done = subprocess.run(
        [
            browser(), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync",
            "--disable-background-networking", "--disable-component-update", "--allow-file-access-from-files",
            "--enable-logging=stderr", "--hide-scrollbars", f"--user-data-dir={tmp_path / 'profile'}",
            "--window-size=1400,1000", "--virtual-time-budget=5000", "--dump-dom", frame.as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert "CONSOLE" not in done.stderr, done.stderr
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    assert title is not None, done.stdout[:500]
    seen = json.loads(title[1].replace("&quot;", '"'))
    assert int(seen["view"]) == width
    assert int(seen["width"]) <= width
    assert seen["small"] == "0"
    assert seen["focus"] == "true"
