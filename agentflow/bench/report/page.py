"""The page: what won on top, then plots, what happened when, claims, tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentflow.bench.report.markup import Markup, el, joined
from agentflow.bench.report.moments_plots import memory_legend, memory_plot, timeline_legend, timeline_plot
from agentflow.bench.report.sections import (
    claims_table,
    gain_panels,
    hit_panels,
    latency_panels,
    noise_panels,
    rows_tables,
    shown_series,
)
from agentflow.bench.report.style import CSS
from agentflow.bench.report.verdict import headline

__all__ = ["page"]


def page(results: Sequence[Mapping[str, Any]]) -> str:
    """A whole HTML document that needs nothing from outside."""
    sections = [_comparison(data, f"r{i}") for i, data in enumerate(results)]
    names = [f"{d['comparison']} ({d['mode']})" for d in results]
    links = [el("li", el("a", name, href=f"#r{i}")) for i, name in enumerate(names)]
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("title", f"agentflow: {', '.join(names)}"),
        el("style", Markup(CSS)),
    )
    body = el(
        "body",
        el(
            "header",
            el("h1", "agentflow: cache policies compared"),
            *([el("nav", el("ul", *links), aria_label="Comparisons")] if len(results) > 1 else []),
        ),
        el("main", *sections),
    )
    return f"<!DOCTYPE html>\n{el('html', head, body, lang='en')}\n"


def _comparison(data: Mapping[str, Any], anchor: str) -> Markup:
    rows = data["rows"]
    figure = "job_mean" if data["comparison"] == "ttl" else "e2e_mean"
    colours = shown_series(rows, figure)
    first, more = headline(data)
    y_name = "completion of workflows, s" if figure == "job_mean" else "mean latency of calls, s"
    parts: list[Markup] = [
        el("h2", data["title"], id=f"{anchor}-title"),
        el("p", _facts(data), class_="soft"),
        el("div", el("p", first, class_="big"), *(el("p", m) for m in more if m), class_="won"),
    ]
    for title, content in (
        ("Against lru", gain_panels(rows)),
        ("Hit rate over memory and load", hit_panels(rows, colours)),
        ("Latency over load", latency_panels(rows, colours, figure, y_name)),
        ("How wrong forecasts may be", noise_panels(rows, colours)),
        ("What happened when", _moments(data.get("timelines", ()))),
    ):
        if content:
            parts += [el("h3", title), content]
    if data["claims"]:
        parts += [el("h3", "Claims"), claims_table(data["claims"])]
    parts += [
        el("h3", "All figures"),
        el(
            "p",
            "Medians (least and greatest of the repetitions); the most hits of each table in bold.",
            class_="soft",
        ),
        rows_tables(rows),
        el("h3", "What the columns mean"),
        el("dl", joined(joined([el("dt", k), el("dd", v)]) for k, v in data.get("columns", {}).items()), class_="soft"),
    ]
    return el("section", *parts, id=anchor, aria_labelledby=f"{anchor}-title")


def _facts(data: Mapping[str, Any]) -> str:
    machine = data.get("machine", {})
    where = {
        "simulated": f"simulated: {data.get('setting', {}).get('model', '')}",
        "engine": f"measured on the real engine: {data.get('setting', {}).get('model', '')}",
    }.get(data["mode"], data["mode"])
    facts = [where, f"size {data['size']}", f"{len(data['rows'])} rows in {data['seconds']:.0f} s"]
    if machine:
        facts.append(f"{machine.get('processor', '')}, {machine.get('cores', '?')} cores")
        facts += [f"{p} {machine[p]}" for p in ("agentflow", "sglang", "python") if p in machine]
    return " · ".join(facts)


def _moments(runs: Sequence[Mapping[str, Any]]) -> Markup:
    if not runs:
        return Markup("")
    parts: list[Markup] = [timeline_legend()]
    end = max((lane["ended"] for run in runs for lane in run["workflows"]), default=0.0) or 1.0
    for run in runs:
        name = f"{run['policy']} on {run['load']}, pressure {run['pressure']:g}"
        left_out = run.get("left_out", {})
        note = f"The first {len(run['workflows'])} workflows"
        if left_out.get("decisions"):
            note += f"; {left_out['decisions']} more decisions, about others or between those shown, are left out"
        decided = ", ".join(f"{n} {k}" for k, n in sorted(run.get("decided", {}).items()))
        parts += [
            el("p", el("strong", name)),
            el(
                "div",
                timeline_plot(run, end),
                class_="scroll wide",
                tabindex=0,
                role="region",
                aria_label=f"Timeline: {name}",
            ),
            el("p", f"{note}. In the whole run: {decided or 'no decisions'}.", class_="soft"),
        ]
    memory = [
        el(
            "figure",
            el("figcaption", f"Memory by owner, tokens: {run['policy']}"),
            memory_plot(run),
            memory_legend(run),
        )
        for run in runs
    ]
    return joined([*parts, el("div", *memory, class_="panels")])
