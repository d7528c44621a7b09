"""Plots as inline SVG: lines with spread, bars with spread. Each is an image with a title and a description."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentflow.bench.report.markup import Markup, el, joined
from agentflow.bench.report.scales import Scale, linear, logarithmic, number
from agentflow.bench.report.style import mark_of

__all__ = ["Bar", "Point", "Series", "bars", "image", "legend", "lines"]

WIDTH, HEIGHT = 340, 225
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 10, 10, 38


@dataclass(frozen=True, slots=True)
class Point:
    """A value with its spread."""

    x: float
    y: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one policy. ``colour`` is its place among the coloured ones, None for the pale rest."""

    name: str
    colour: int | None
    points: Sequence[Point]
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Bar:
    """A value of one policy with its spread."""

    name: str
    value: float
    low: float
    high: float
    strong: bool = False


def image(width: float, height: float, title: str, description: str, *parts: object) -> Markup:
    """An SVG that screen readers tell as an image with this title and description."""
    return el(
        "svg",
        el("title", title),
        el("desc", description),
        *parts,
        viewBox=f"0 0 {width:g} {height:g}",
        role="img",
        aria_label=f"{title}. {description}",
        xmlns="http://www.w3.org/2000/svg",
    )


def lines(
    title: str,
    x_label: str,
    y_label: str,
    series: Sequence[Series],
    *,
    percent: bool = False,
    log: bool = True,
    from_zero: bool = True,
) -> Markup:
    """A line for each series, with a bar for the spread of each point. ``from_zero`` False lets the values fill the
    plot."""
    xs = sorted({p.x for s in series for p in s.points})
    top = max((p.high for s in series for p in s.points), default=1.0)
    x = logarithmic(xs, _LEFT, WIDTH - _RIGHT - 6) if log else _spaced(xs)
    low = 0.0 if from_zero else min((p.low for s in series for p in s.points), default=0.0)
    y = linear(low, min(top, 1.0) if percent else top, HEIGHT - _BOTTOM, _TOP)
    parts: list[Markup] = [_axes(x, y, x_label, y_label, percent)]
    for one in sorted(series, key=lambda s: (s.colour is not None, -(s.colour or 0))):
        parts.append(_line(one, x, y, percent))
    return image(WIDTH, HEIGHT, title, _told(series, x_label, percent), *parts)


def _spaced(xs: Sequence[float]) -> Scale:
    found = sorted(set(xs)) or [0.0]
    high = found[-1] if found[-1] > found[0] else found[0] + 1.0
    return Scale(found[0], high, _LEFT, WIDTH - _RIGHT - 6, found)


def _axes(x: Scale, y: Scale, x_label: str, y_label: str, percent: bool) -> Markup:
    bottom = HEIGHT - _BOTTOM
    parts = []
    for tick in y.ticks:
        at = y(tick)
        parts.append(el("line", x1=_LEFT, x2=WIDTH - _RIGHT, y1=at, y2=at, class_="grid"))
        shown = f"{100 * tick:g}" if percent else number(tick)
        parts.append(el("text", shown, x=_LEFT - 6, y=at + 4, text_anchor="end", class_="tick"))
    last = -100.0
    for tick in x.ticks:
        at = x(tick)
        parts.append(el("line", x1=at, x2=at, y1=bottom, y2=bottom + 4, class_="base"))
        if at - last >= 24:
            parts.append(el("text", number(tick), x=at, y=bottom + 16, text_anchor="middle", class_="tick"))
            last = at
    parts.append(el("line", x1=_LEFT, x2=WIDTH - _RIGHT, y1=bottom, y2=bottom, class_="base"))
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    parts.append(el("text", x_label, x=middle, y=HEIGHT - 5, text_anchor="middle", class_="axis"))
    turn = f"rotate(-90 11 {(_TOP + bottom) / 2:g})"
    parts.append(el("text", y_label, x=11, y=(_TOP + bottom) / 2, text_anchor="middle", class_="axis", transform=turn))
    return joined(parts)


def _line(series: Series, x: Scale, y: Scale, percent: bool) -> Markup:
    points = sorted(series.points, key=lambda p: p.x)
    stroke = "rest" if series.colour is None else f"s k{series.colour}"
    fill = "frest" if series.colour is None else f"f{series.colour}"
    drawn = " ".join(f"{x(p.x):.1f},{y(p.y):.1f}" for p in points)
    parts = [el("polyline", points=drawn, class_=f"{stroke} dash" if series.dashed else stroke)]
    for p in points:
        at = x(p.x)
        if series.colour is not None and p.high > p.low:
            parts.append(el("line", x1=at, x2=at, y1=y(p.low), y2=y(p.high), class_=f"err k{series.colour}"))
        told = f"{series.name}: {_shown(p.y, percent)}"
        if p.high > p.low:
            told += f" ({_shown(p.low, percent)} to {_shown(p.high, percent)})"
        size = 2.0 if series.colour is None else 3.6
        parts.append(_mark(at, y(p.y), size, mark_of(series.colour or 0), fill, f"{told} at {number(p.x)}"))
    return el("g", *parts)


def _mark(x: float, y: float, r: float, kind: str, fill: str, told: str) -> Markup:
    title = el("title", told) if told else Markup("")
    if kind == "square":
        return el("rect", title, x=x - r, y=y - r, width=2 * r, height=2 * r, class_=fill)
    shapes = {
        "diamond": ((0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0)),
        "triangle": ((0, -1.3), (1.2, 1), (-1.2, 1)),
        "cross": (
            (-0.4, -1.2), (0.4, -1.2), (0.4, -0.4), (1.2, -0.4), (1.2, 0.4), (0.4, 0.4), (0.4, 1.2), (-0.4, 1.2),
            (-0.4, 0.4), (-1.2, 0.4), (-1.2, -0.4), (-0.4, -0.4),
        ),
    }  # fmt: skip
    if kind in shapes:
        corners = " ".join(f"{x + r * dx:.1f},{y + r * dy:.1f}" for dx, dy in shapes[kind])
        return el("polygon", title, points=corners, class_=fill)
    return el("circle", title, cx=x, cy=y, r=r, class_=fill)


def _told(series: Sequence[Series], x_label: str, percent: bool) -> str:
    """What a plot shows, in words: each coloured line from its first point to its last."""
    parts = []
    for one in series:
        points = sorted(one.points, key=lambda p: p.x)
        if points and one.colour is not None:
            first, last = points[0], points[-1]
            words = f"{one.name} {_shown(first.y, percent)} at {number(first.x)}"
            if len(points) > 1:
                words += f", {_shown(last.y, percent)} at {number(last.x)}"
            parts.append(words)
    return f"Over {x_label}: {'; '.join(parts)}."


def _shown(value: float, percent: bool) -> str:
    return f"{100 * value:.1f} %" if percent else f"{value:.3g}"


def legend(series: Sequence[Series]) -> Markup:
    """The coloured series by name, and how many pale ones there are."""
    items = []
    for one in series:
        if one.colour is None:
            continue
        line = el("line", x1=0, x2=26, y1=6, y2=6, class_=f"s k{one.colour}{' dash' if one.dashed else ''}")
        mark = _mark(13, 6, 3.6, mark_of(one.colour), f"f{one.colour}", "")
        items.append(el("li", el("svg", line, mark, viewBox="0 0 26 12", aria_hidden="true"), one.name))
    pale = [s.name for s in series if s.colour is None]
    if pale:
        line = el("line", x1=0, x2=26, y1=6, y2=6, class_="rest")
        items.append(el("li", el("svg", line, viewBox="0 0 26 12", aria_hidden="true"), ", ".join(pale)))
    return el("ul", *items, class_="legend")


def bars(title: str, rows: Sequence[Bar], *, base: float | None = 1.0, unit: str = "x") -> Markup:
    """Horizontal bars from ``base`` (a line, mostly 1: no difference) with whiskers for the spread; None is from 0."""
    step, left, right, top = 21, 142, 58, 6
    height = top + step * len(rows) + 20
    low = min([*(r.low for r in rows), *(r.value for r in rows), 0.0 if base is None else base])
    high = max([*(r.high for r in rows), *(r.value for r in rows), 0.0 if base is None else base])
    x = linear(low, high, left, WIDTH - right, count=3)
    zero = x(0.0 if base is None else base)
    parts = []
    for tick in x.ticks:
        parts.append(el("line", x1=x(tick), x2=x(tick), y1=top, y2=height - 18, class_="grid"))
        parts.append(el("text", f"{number(tick)}{unit}", x=x(tick), y=height - 4, text_anchor="middle", class_="tick"))
    for i, row in enumerate(rows):
        y = top + step * i
        at = x(row.value)
        told = el("title", f"{row.name}: {row.value:.3g}{unit} ({row.low:.3g}{unit} to {row.high:.3g}{unit})")
        weight = "700" if row.strong else None
        parts.append(el("text", row.name, x=left - 8, y=y + 14, text_anchor="end", font_weight=weight))
        fill = "f1" if row.strong else "frest"
        parts.append(
            el("rect", told, x=min(zero, at), y=y + 4, width=max(1.0, abs(at - zero)), height=step - 8, class_=fill)
        )
        middle = y + step / 2
        parts.append(el("line", x1=x(row.low), x2=x(row.high), y1=middle, y2=middle, class_="err k0"))
        shown = f"{row.value:.2f}{unit}"
        parts.append(el("text", shown, x=WIDTH - 2, y=y + 14, text_anchor="end", font_weight=weight))
    parts.append(el("line", x1=zero, x2=zero, y1=top, y2=height - 18, class_="k0"))
    told_all = "; ".join(f"{r.name} {r.value:.2f}{unit}" for r in rows)
    return image(WIDTH, height, title, f"{told_all}.", *parts)
