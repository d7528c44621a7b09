"""The parts of the page that show one comparison."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentflow.bench.report.charts import Bar, Point, Series, bars, legend, lines
from agentflow.bench.report.markup import Markup, el, joined
from agentflow.bench.report.style import emphasised, ordered
from agentflow.bench.report.verdict import is_told, standings, winner

__all__ = ["claims_table", "gain_panels", "latency_panels", "hit_panels", "noise_panels", "rows_tables", "shown_series"]

Row = Mapping[str, Any]


def _panels(figures: Sequence[Markup], key: Markup) -> Markup:
    return joined([key, el("div", *figures, class_="panels")])


def _figure(caption: str, picture: Markup) -> Markup:
    return el("figure", el("figcaption", caption), picture)


def shown_series(rows: Sequence[Row], figure: str = "e2e_mean") -> dict[str, int]:
    """The colour of each policy that has one; the same on all plots of a comparison."""
    best = winner(rows, figure)
    return {p: i for i, p in enumerate(ordered(emphasised((r["policy"] for r in rows), best.policy if best else None)))}


def gain_panels(rows: Sequence[Row]) -> Markup:
    """Every policy against lru: speed and hits, with the range of single runs."""
    figures = []
    for figure, caption in (
        ("e2e_mean", "Speed of calls, over lru's"),
        ("job_mean", "Speed of workflows, over lru's"),
        ("hit_rate", "Hit rate, over lru's"),
    ):
        found = standings(rows, figure)
        best = next((s.policy for s in found if not is_told(s.policy)), None)
        if len(found) > 1:
            row = [Bar(s.policy, s.mean, s.low, s.high, s.policy == best) for s in found]
            figures.append(_figure(caption, bars(caption, row)))
    return el("div", *figures, class_="panels") if figures else Markup("")


def hit_panels(rows: Sequence[Row], colours: Mapping[str, int]) -> Markup:
    """Hit rate over memory pressure, or over the load where that varies and pressure does not."""
    calm = [r for r in rows if not r.get("noise")]
    return _over(calm, colours, *_axis(calm, "pressure"), "hit_rate", "hit rate, %", percent=True)


def latency_panels(rows: Sequence[Row], colours: Mapping[str, int], figure: str, name: str) -> Markup:
    """Latency over the load's intensity, or over memory pressure where the load does not vary."""
    calm = [r for r in rows if not r.get("noise")]
    return _over(calm, colours, *_axis(calm, "intensity"), figure, name)


def _axis(rows: Sequence[Row], preferred: str) -> tuple[str, str]:
    """What plots have on their x axis, and its label: the preferred of pressure and intensity, if it varies."""
    at_once = all(r["mode"] == "engine" for r in rows)
    labels = {
        "pressure": "pressure (could use / pool)",
        "intensity": "workflows at once" if at_once else "load (arriving / most served)",
    }
    other = "pressure" if preferred == "intensity" else "intensity"

    def varies(axis: str) -> bool:
        places: dict[tuple[str, bool], set[float]] = {}
        for row in rows:
            if row.get(axis) is not None:
                places.setdefault((row["load"], row["host_tokens"] > 0), set()).add(row[axis])
        return any(len(found) > 1 for found in places.values())

    axis = next((a for a in (preferred, other) if varies(a)), "pressure")
    return axis, labels[axis]


def _over(
    rows: Sequence[Row],
    colours: Mapping[str, int],
    axis: str,
    x_label: str,
    figure: str,
    y_label: str,
    *,
    percent: bool = False,
) -> Markup:
    """A panel for each load and tier setting that has at least two places on the axis; bars where none has."""
    groups: dict[tuple[str, bool], list[Row]] = {}
    for row in rows:
        if row.get(axis) is not None:
            groups.setdefault((row["load"], row["host_tokens"] > 0), []).append(row)
    hosts = {host for _, host in groups}
    figures, key = [], Markup("")
    for (load, host), found in groups.items():
        caption = f"{load}, {'with a host tier' if host else 'no host tier'}" if len(hosts) > 1 else load
        if len({r[axis] for r in found}) < 2:
            if axis == "pressure":
                figures.append(_figure(caption, _one_place(found, figure, y_label, percent)))
            continue
        series = _series(found, colours, lambda r: float(r[axis]), figure)
        key = max(key, legend(series), key=len)  # that of the panel with most policies
        title = f"{y_label.split(',')[0]} on {caption}"
        figures.append(_figure(caption, lines(title, x_label, y_label, series, percent=percent)))
    return _panels(figures, key) if figures else Markup("")


def _one_place(rows: Sequence[Row], figure: str, y_label: str, percent: bool) -> Markup:
    times, unit = (100.0, " %") if percent else (1.0, " s")
    found = sorted(rows, key=lambda r: r[figure], reverse=percent)
    several = len({r["mode"] for r in rows}) > 1
    best = next((r["policy"] for r in found if not is_told(r["policy"])), None)
    drawn = [
        Bar(
            f"{r['policy']} ({r['mode'][:3]})" if several else r["policy"],
            times * r[figure],
            times * r["spread"][figure][0],
            times * r["spread"][figure][1],
            r["policy"] == best,
        )
        for r in found
    ]
    return bars(f"{y_label} at pressure {rows[0]['pressure']:g}", drawn, base=None, unit=unit)


def _series(rows: Sequence[Row], colours: Mapping[str, int], x: Callable[[Row], float], figure: str) -> list[Series]:
    several = len({r["mode"] for r in rows}) > 1
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["policy"], row["mode"]), []).append(row)
    return [
        Series(
            f"{policy} ({mode})" if several else policy,
            colours.get(policy),
            [Point(x(r), r[figure], *r["spread"][figure]) for r in found],
            dashed=(several and mode == "simulated") or is_told(policy),
        )
        for (policy, mode), found in groups.items()
    ]


def noise_panels(rows: Sequence[Row], colours: Mapping[str, int]) -> Markup:
    """Hit rate over the noise in forecasts, beside what does not forecast."""
    noisy = [r for r in rows if r.get("noise") is not None]
    figures, key = [], Markup("")
    shown = dict.fromkeys([*(r["policy"] for r in noisy), "lru", "lifecycle"])
    left = (i for i in range(6) if i not in {colours[p] for p in shown if p in colours})
    colours = {p: colours[p] if p in colours else next(left, 0) for p in shown}
    for load in dict.fromkeys(r["load"] for r in noisy):
        found = [r for r in noisy if r["load"] == load]
        if len({r["noise"] for r in found}) < 2:
            continue
        series = _series(found, colours, lambda r: float(r["noise"]), "hit_rate")
        ends = (min(r["noise"] for r in found), max(r["noise"] for r in found))
        for policy in ("lru", "lifecycle"):
            flat = [
                r
                for r in rows
                if (r["policy"], r["load"], r["pressure"]) == (policy, load, found[0]["pressure"])
                and r["host_tokens"] == found[0]["host_tokens"]
            ]
            if flat:
                points = [Point(x, flat[0]["hit_rate"], *flat[0]["spread"]["hit_rate"]) for x in ends]
                series.append(Series(policy, colours.get(policy), points, dashed=True))
        key = legend(series)
        title = f"Hit rate under noise on {load}"
        x_label = "share of forecasts that is chance"
        figures.append(
            _figure(load, lines(title, x_label, "hit rate, %", series, percent=True, log=False, from_zero=False))
        )
    note = el("p", "The scale of hit rates does not begin at 0 here.", class_="soft")
    return joined([_panels(figures, key), note]) if figures else Markup("")


def claims_table(claims: Sequence[Mapping[str, Any]]) -> Markup:
    """Every claim with its target, what was measured, and whether it was met."""
    head = ("claim", "target", "measured", "result", "note")
    body = []
    for claim in claims:
        measured = "not measured" if claim["measured"] is None else f"{claim['measured']:.3g}"
        word = "met" if claim["met"] else "missed"
        result = el("span", f"{'✓' if claim['met'] else '✗'} {word}", class_=word)
        cells = ((claim["target"], "t wrap"), (measured, None), (result, "t"), (claim["note"], "t wrap"))
        body.append(
            el(
                "tr",
                el("th", claim["name"], scope="row", class_="t wrap"),
                *(el("td", c, class_=k, data_name=n) for (c, k), n in zip(cells, head[1:], strict=True) if c != ""),
            )
        )
    return _table("Claims", head, body, text=(0, 1, 3, 4), style="stack")


def rows_tables(rows: Sequence[Row]) -> Markup:
    """All rows, a table for each load and place on the axes, the best of each in bold."""
    out = []
    places: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        places.setdefault((row["load"], row["pressure"], row["host_tokens"] > 0, row.get("intensity")), []).append(row)
    several = len({r["mode"] for r in rows}) > 1
    noisy = any(r.get("noise") is not None for r in rows)
    head = [
        "policy", *(["mode"] if several else []), *(["noise"] if noisy else []), "hit rate %", "of oracle %",
        "TTFT p50 s", "e2e mean s", "job mean s", "hits vs lru", "e2e vs lru", "runs",
    ]  # fmt: skip
    for (load, pressure, host, intensity), found in places.items():
        best = max((r for r in found if not is_told(r["policy"])), key=lambda r: r["hit_rate"], default=None)
        caption = f"{load}, pressure {pressure:g}"
        caption += "" if intensity is None else f", intensity {intensity:g}"
        caption += f": pool of {found[0]['pool_tokens']:,} tokens"
        caption += f", host tier of {found[0]['host_tokens']:,}" if host else ""
        body = [_row(r, several, noisy, r is best) for r in found]
        out.append(_table(caption, head, body, text=(0,)))
    return joined(out)


def _row(row: Row, several: bool, noisy: bool, best: bool) -> Markup:
    spread, against = row["spread"], row["against_lru"]
    cells = [*([row["mode"]] if several else [])]
    if noisy:
        cells.append("" if row.get("noise") is None else f"{row['noise']:g}")
    cells += [
        _spread(row["hit_rate"], spread["hit_rate"], 100.0, ".1f"),
        _spread(row["share_of_oracle"], spread["share_of_oracle"], 100.0, ".1f"),
        *(_spread(row[n], spread[n], 1.0, ".3g") for n in ("ttft_p50", "e2e_mean", "job_mean")),
        *(f"{against[n][0]:.2f}x" if n in against else "" for n in ("hit_rate", "e2e_mean")),
        row["repetitions"],
    ]
    return el(
        "tr",
        el("th", row["policy"], scope="row", class_="t"),
        *(el("td", c) for c in cells),
        class_="best" if best else None,
    )


def _spread(value: float, spread: Sequence[float], times: float, form: str) -> str:
    text = f"{times * value:{form}}"
    if spread[0] == spread[1]:
        return text
    return f"{text} ({times * spread[0]:{form}}\N{EN DASH}{times * spread[1]:{form}})"


def _table(
    caption: str, head: Sequence[str], body: Sequence[Markup], *, text: Sequence[int], style: str | None = None
) -> Markup:
    columns = [el("th", name, scope="col", class_="t" if i in text else None) for i, name in enumerate(head)]
    table = el("table", el("caption", caption), el("thead", el("tr", *columns)), el("tbody", *body), class_=style)
    return el("div", table, class_="scroll", tabindex=0, role="region", aria_label=caption, style="margin:.8rem 0")
