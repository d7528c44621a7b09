"""A simulation's timeline cut down to what plots show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["moments"]

#: Workflows, decisions and owners that are kept.
WORKFLOWS = 16
DECISIONS = 1_500
OWNERS = 7
_SHOWN = ("evict", "demote", "evict_host", "pin", "release", "prefetch")


def moments(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """``workflows`` (the first so many), their ``calls`` and ``decisions``, and ``memory`` over time by ``owners``.

    A decision stands in the lane of the first workflow shown that it concerns; one that concerns none has no lane.
    ``left_out`` says how many workflows and decisions are not there.
    """
    started: dict[str, float] = {}
    ended: dict[str, float] = {}
    for row in rows:
        if row["kind"] == "workflow_started":
            started.setdefault(row["workflow"], row["time"])
        elif row["kind"] == "workflow_ended":
            ended[row["workflow"]] = row["time"]
    shown = list(started)[:WORKFLOWS]
    until = max((ended.get(w, 0.0) for w in shown), default=0.0)
    decisions = [_decision(r, shown) for r in rows if r["kind"] == "decision" and r["decision"]["kind"] in _SHOWN]
    laned = [d for d in decisions if d["workflow"] is not None]
    step = max(1, -(-len(laned) // DECISIONS))
    counted = Counter(d["kind"] for d in decisions)
    return {
        "workflows": [
            {"workflow": w, "started": started[w], "ended": ended.get(w, until), "lane": i} for i, w in enumerate(shown)
        ],
        "calls": [_call(r) for r in rows if r["kind"] == "call" and r["workflow"] in set(shown)],
        "decisions": laned[::step],
        "decided": dict(counted),
        "memory": _memory(rows),
        "left_out": {"workflows": len(started) - len(shown), "decisions": len(decisions) - len(laned[::step])},
    }


def _call(row: Mapping[str, Any]) -> dict[str, Any]:
    names = ("workflow", "agent", "arrived", "admitted", "first_token", "finished", "prompt_tokens")
    out = {n: _short(row[n]) for n in names}
    out["cached"] = row["cached_device"] + row["cached_host"]
    return out


def _decision(row: Mapping[str, Any], shown: Sequence[str]) -> dict[str, Any]:
    decision = row["decision"]
    found = next((w for w in decision.get("workflows", ()) if w in shown), None)
    return {
        "time": _short(row["time"]),
        "kind": decision["kind"],
        "tokens": decision.get("tokens", 0),
        "workflow": found,
        "reason": decision["reason"],
        "outcome": decision.get("outcome"),
    }


def _memory(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Samples with the tokens of the largest owners; the rest summed up as ``others``."""
    samples = [r for r in rows if r["kind"] == "memory" and r["engine"] == 0]
    totals: Counter[str] = Counter()
    for row in samples:
        totals.update(row["owners"])
    owners = [name for name, _ in totals.most_common(OWNERS) if name]
    out = []
    for row in samples:
        known = {name: row["owners"].get(name, 0) for name in owners}
        others = sum(row["owners"].values()) - sum(known.values())
        sample = {n: row[n] for n in ("free", "private", "locked", "live", "retired", "host")}
        out.append({"time": _short(row["time"]), **sample, "owners": list(known.values()), "others": others})
    return {"owners": owners, "samples": out}


def _short(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value
