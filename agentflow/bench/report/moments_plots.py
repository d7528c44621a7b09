"""What happened in one run: workflows with hits, evictions, pins and prefetches, and memory by owner over time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from agentflow.bench.report.charts import image
from agentflow.bench.report.markup import Markup, el, joined
from agentflow.bench.report.scales import Scale, linear, number
from agentflow.bench.report.style import OWNER_COLOURS

__all__ = ["memory_legend", "memory_plot", "timeline_legend", "timeline_plot"]

_WIDE = 1_000
_LANE = 26
_MARKS = {
    "evict": "evict", "demote": "evict", "evict_host": "evict", "pin": "pin", "release": "pin", "prefetch": "prefetch",
}  # fmt: skip
_MEMORY = (340, 200)


def timeline_plot(run: Mapping[str, Any], end: float) -> Markup:
    """A lane for each workflow, from 0 to ``end`` seconds.

    Its calls are bars: waiting, then the prompt with its cached share, then the answer. Marks are what the cache
    decided about it.
    """
    lanes = run["workflows"]
    left, top, foot = 92, 8, 34
    height = top + _LANE * len(lanes) + foot
    x = linear(0.0, end, left, _WIDE - 12, count=8)
    x = Scale(0.0, end, left, _WIDE - 12, [t for t in x.ticks if t <= end])
    bottom = top + _LANE * len(lanes)
    parts: list[Markup] = []
    for tick in x.ticks:
        parts.append(el("line", x1=x(tick), x2=x(tick), y1=top, y2=bottom, class_="grid"))
        parts.append(el("text", number(tick), x=x(tick), y=bottom + 15, text_anchor="middle", class_="tick"))
    parts.append(el("text", "seconds", x=(left + _WIDE) / 2, y=height - 3, text_anchor="middle", class_="axis"))
    places = {lane["workflow"]: top + _LANE * i for i, lane in enumerate(lanes)}
    for lane in lanes:
        y = places[lane["workflow"]]
        told = el("title", f"{lane['workflow']}: {lane['started']:.1f} to {lane['ended']:.1f} s")
        width = max(1.0, x(lane["ended"]) - x(lane["started"]))
        parts.append(el("rect", told, x=x(lane["started"]), y=y + 6, width=width, height=12, class_="lane"))
        parts.append(el("text", _short(lane["workflow"]), x=left - 6, y=y + 16, text_anchor="end", class_="tick"))
    for call in run["calls"]:
        parts.append(_call(call, places[call["workflow"]], x))
    for decision in run["decisions"]:
        parts.append(_decision(decision, places[decision["workflow"]], x))
    calls = run["calls"]
    prompt = sum(c["prompt_tokens"] for c in calls) or 1
    counts = Counter(d["kind"] for d in run["decisions"])
    decided = ", ".join(f"{n} {kind}" for kind, n in counts.most_common()) or "nothing"
    told_all = (
        f"{len(lanes)} workflows with {len(calls)} calls over {end:.0f} seconds,"
        f" {sum(c['cached'] for c in calls) / prompt:.0%} of their prompts cached. Decisions shown: {decided}."
    )
    return image(_WIDE, height, f"Timeline of {run['policy']} on {run['load']}", told_all, *parts)


def _call(call: Mapping[str, Any], y: float, x: Scale) -> Markup:
    share = call["cached"] / call["prompt_tokens"] if call["prompt_tokens"] else 0.0
    told = el("title", f"{call['agent']}: {share:.0%} of {call['prompt_tokens']} tokens cached")
    parts: list[Markup] = [told]
    spans = (("arrived", "admitted", "wait"), ("first_token", "finished", "answer"))
    for begin, until, style in spans:
        width = x(call[until]) - x(call[begin])
        if width > 0.3:
            parts.append(el("rect", x=x(call[begin]), y=y + 6, width=width, height=12, class_=style))
    # The prompt: as high as its lane, its cached share from the bottom up.
    width = max(2.0, x(call["first_token"]) - x(call["admitted"]))
    begin_x = x(call["admitted"])
    parts.append(el("rect", x=begin_x, y=y + 3, width=width, height=18.0, class_="compute"))
    if share > 0:
        parts.append(el("rect", x=begin_x, y=y + 3 + 18 * (1 - share), width=width, height=18 * share, class_="hit"))
    return el("g", *parts)


def _decision(decision: Mapping[str, Any], y: float, x: Scale) -> Markup:
    at, style = x(decision["time"]), _MARKS[decision["kind"]]
    outcome = f", {decision['outcome']}" if decision.get("outcome") else ""
    told = el("title", f"{decision['kind']} of {decision['tokens']} tokens{outcome}: {decision['reason']}")
    if style == "evict":
        return el("line", told, x1=at, x2=at, y1=y + 1, y2=y + 23, class_=style, stroke_width=1.3)
    if style == "pin":
        points = f"{at - 3:.1f},{y:.1f} {at + 3:.1f},{y:.1f} {at:.1f},{y + 6:.1f}"
        filled = "none" if decision["kind"] == "release" else None
        return el("polygon", told, points=points, class_=style, style=f"fill:{filled}" if filled else None)
    return el("circle", told, cx=at, cy=y + 21, r=2.6, class_=style)


def timeline_legend() -> Markup:
    """What the bars and marks mean."""

    def item(name: str, *parts: Markup) -> Markup:
        return el("li", el("svg", *parts, viewBox="0 0 26 12", aria_hidden="true"), name)

    def box(style: str) -> Markup:
        return el("rect", x=0, y=1, width=26, height=10, class_=style)

    return el(
        "ul",
        item("prompt, cached share", box("hit")),
        item("prompt, computed share", box("compute")),
        item("answer", box("answer")),
        item("waiting", box("wait")),
        item("between calls", box("lane")),
        item("eviction", el("line", x1=13, x2=13, y1=0, y2=12, class_="evict", stroke_width=2)),
        item("pin (hollow: released)", el("polygon", points="9,2 17,2 13,10", class_="pin")),
        item("prefetch", el("circle", cx=13, cy=6, r=4, class_="prefetch")),
        class_="legend",
    )


def memory_plot(run: Mapping[str, Any]) -> Markup:
    """Tokens of the pool over time, stacked by the workflow that used them last."""
    width, height = _MEMORY
    left, right, top, foot = 48, 8, 8, 36
    memory = run["memory"]
    samples: Sequence[Mapping[str, Any]] = memory["samples"]
    title = f"Memory by owner, {run['policy']} on {run['load']}"
    if not samples:
        return image(width, height, title, "No samples were taken.")
    pool = run["pool_tokens"]
    end = max(samples[-1]["time"], 1e-9)
    x = Scale(0.0, end, left, width - right, [t for t in linear(0.0, end, 0, 1).ticks if t <= end])
    y = linear(0.0, pool, height - foot, top)
    y = Scale(0.0, pool, height - foot, top, [t for t in y.ticks if t <= pool])
    layers = [[s["owners"][i] for s in samples] for i in range(len(memory["owners"]))]
    layers += [[s["others"] for s in samples], [s["private"] for s in samples]]
    names = [*memory["owners"], "other workflows", "calls under way"]
    parts = [el("rect", x=left, y=top, width=width - left - right, height=height - foot - top, class_="free")]
    floor = [0.0] * len(samples)
    for i, layer in enumerate(layers):
        roof = [a + b for a, b in zip(floor, layer, strict=True)]
        up = [f"{x(s['time']):.1f},{y(v):.1f}" for s, v in zip(samples, roof, strict=True)]
        down = [f"{x(s['time']):.1f},{y(v):.1f}" for s, v in zip(samples, floor, strict=True)]
        style = _owner_class(i, len(memory["owners"]))
        parts.append(el("polygon", el("title", names[i]), points=" ".join([*up, *reversed(down)]), class_=style))
        floor = roof
    for tick in y.ticks:
        parts.append(el("text", number(tick), x=left - 5, y=y(tick) + 4, text_anchor="end", class_="tick"))
    for tick in x.ticks:
        parts.append(el("text", number(tick), x=x(tick), y=height - foot + 15, text_anchor="middle", class_="tick"))
    parts.append(el("text", "seconds", x=(left + width) / 2, y=height - 4, text_anchor="middle", class_="axis"))
    mean_free = sum(s["free"] for s in samples) / len(samples) / pool
    retired = sum(s["retired"] for s in samples) / len(samples) / pool
    told = (
        f"A pool of {pool} tokens over {end:.0f} seconds; on average {mean_free:.0%} free and {retired:.0%} held by"
        " what nobody will read again."
    )
    return image(width, height, title, told, *parts)


def _owner_class(place: int, owners: int) -> str:
    if place < owners:
        return f"o{place % (OWNER_COLOURS - 1)}"
    return f"o{OWNER_COLOURS - 1}" if place == owners else "wait"


def memory_legend(run: Mapping[str, Any]) -> Markup:
    """Which workflow has which colour."""
    owners = run["memory"]["owners"]
    names = [*(_short(o) for o in owners), "other workflows", "calls under way", "free"]
    styles = [*(_owner_class(i, len(owners)) for i in range(len(owners) + 2)), "free"]

    def item(name: str, style: str) -> Markup:
        box = el("rect", x=0, y=1, width=26, height=10, class_=style)
        return el("li", el("svg", box, viewBox="0 0 26 12", aria_hidden="true"), name)

    return el("ul", joined(item(n, s) for n, s in zip(names, styles, strict=True)), class_="legend")


def _short(name: str) -> str:
    return name if len(name) <= 11 else f"{name[:4]}…{name[-6:]}"
