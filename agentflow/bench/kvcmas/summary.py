"""Tables and claims out of the experiment's rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from agentflow.bench.kvcmas.measures import Interval, interval, rank_correlation

__all__ = ["claims", "tables"]

Row = Mapping[str, Any]
_ERRORS = ("keys/C", "values/C", "keys/delta", "values/delta")
#: The method that the library takes by default, and what it is compared with.
_OURS, _PLAIN, _UNCHANGED = "token-kernel + first 20 %", "token-kernel", "FullShared"
#: The default, and less and more of it recomputed.
_RECOMPUTED = ("token-kernel + first 15 %", _OURS, "token-kernel + first 30 %")


def tables(rows: Mapping[str, Sequence[Row]]) -> dict[str, list[dict[str, Any]]]:
    """Each table as a list of rows: ``methods``, ``repeats``, ``chain``, ``signals``.

    Errors are medians over segments; drift and agreement are means. Those of a method that ran on part of the items
    only are over that part, ``segments`` says how many; ``kl_ratio`` compares it with FullShared on the same ones.
    """
    return {
        "methods": _methods(rows["methods"]),
        "repeats": [{"anchor": kind} | _errors(found) for kind, found in _by(rows["repeats"], "anchor").items()],
        "chain": [
            {"hops": hops, "source": kind} | _errors(found)
            for hops, here in _by(rows["chain"], "hops").items()
            for kind, found in _by(here, "source").items()
        ],
        "signals": _signals(rows["methods"]),
    }


def _methods(rows: Sequence[Row]) -> list[dict[str, Any]]:
    unchanged = {_key(r): r["kl"] for r in rows if r["method"] == _UNCHANGED}
    out = []
    for name, found in _by(rows, "method").items():
        line: dict[str, Any] = {"method": name, "segments": len(found)} | _errors(found)
        line["kl"] = _of(found, lambda r: r["kl"], fmean)
        line["agreement"] = _of(found, lambda r: r["agreement"], fmean)
        line["first"] = _of(found, lambda r: r["first"], fmean)
        line["kl_ratio"] = fmean(r["kl"] for r in found) / max(1e-12, fmean(unchanged[_key(r)] for r in found))
        line["better"] = _of(found, lambda r: float(r["kl"] < unchanged[_key(r)]), fmean)
        line["recomputed"] = sum(r["recomputed"] for r in found) / sum(r["tokens"] for r in found)
        line["runs"] = fmean(r["runs"] for r in found)
        out.append(line)
    return out


def _signals(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Spearman correlation of what is known beforehand with what turns out."""
    by_method = _by(rows, "method")
    found, paper = by_method.get(_PLAIN, []), {_key(r): r for r in by_method.get("segment (paper)", [])}
    out = []
    for name, value in (
        ("distance to the nearest anchors", lambda r: r["distance"]),
        ("entropy of the matching weights", lambda r: paper[_key(r)]["entropy"] if _key(r) in paper else r["entropy"]),
        ("error on the first 8 tokens", lambda r: r["head"]),
        ("its length", lambda r: float(r["tokens"])),
    ):
        line: dict[str, Any] = {"signal": name}
        for target in ("values/C", "values/delta", "kl"):
            line[target] = rank_correlation([value(r) for r in found], [r[target] for r in found])
        out.append(line)
    return out


def claims(rows: Mapping[str, Sequence[Row]], costs: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """What was promised, beside what was measured."""
    by_method, by_anchor = _by(rows["methods"], "method"), _by(rows["repeats"], "anchor")
    out = []
    for kind, most in (("exact repeat", (0.25, 0.33)), ("near duplicate", (0.55, 0.65)), ("unrelated", (0.90, 0.95))):
        for part, limit in zip(("keys", "values"), most, strict=True):
            found = median(r[f"{part}/delta"] for r in by_anchor[kind])
            out.append(_claim(f"{kind}, {part}: error / delta", limit, found, f"median of {len(by_anchor[kind])}"))
    unchanged = {_key(r): r for r in by_method[_UNCHANGED]}
    for name in (_PLAIN, _OURS):
        better = fmean(float(r["kl"] < unchanged[_key(r)]["kl"]) for r in by_method[name])
        out.append(_claim(f"{name}: share of segments with KL below FullShared", 0.75, better, "", least=True))
    for name in _RECOMPUTED:
        if found := by_method.get(name):
            ratio = fmean(r["kl"] for r in found) / fmean(unchanged[_key(r)]["kl"] for r in found)
            out.append(_claim(f"{name}: mean KL against FullShared", 1 / 3, ratio, f"{len(found)} segments"))
    for chained, free in (("token-kernel", "token-kernel, context-free"), ("segment (paper)", "segment, context-free")):
        other = {_key(r): r for r in by_method.get(free, [])}
        if other:
            pairs = [(r["values/C"], other[_key(r)]["values/C"]) for r in by_method[chained] if _key(r) in other]
            ratio = median(a for a, _ in pairs) / median(b for _, b in pairs)
            out.append(_claim(f"{chained}: chained against context-free error", 0.6, ratio, f"values, {len(pairs)}"))
    if costs is not None:
        size = costs["anchor_bytes"]
        ratio = size["full"] / size["low_rank"]
        out.append(_claim("bytes of an anchor in full dimension / low rank", 3.7, ratio, "2048 tokens", least=True))
    return out


def _claim(name: str, target: float, measured: float, note: str, *, least: bool = False) -> dict[str, Any]:
    met = measured >= target if least else measured <= target
    words = f"at {'least' if least else 'most'} {target:.3g}"
    return {"name": name, "target": words, "measured": measured, "met": met, "note": note}


def _key(row: Row) -> tuple[str, str]:
    return row["item"], row["slot"]


def _by(rows: Sequence[Row], name: str) -> dict[Any, list[Row]]:
    out: dict[Any, list[Row]] = {}
    for row in rows:
        out.setdefault(row[name], []).append(row)
    return out


def _errors(rows: Sequence[Row]) -> dict[str, Interval]:
    return {name: _of(rows, lambda r, name=name: r[name], median) for name in _ERRORS}  # type: ignore[misc]


def _of(rows: Sequence[Row], value: Callable[[Row], float], what: Callable[[Any], float]) -> Interval:
    groups: dict[str, list[float]] = {}
    for row in rows:
        groups.setdefault(row["item"], []).append(value(row))
    return interval(groups, what)
