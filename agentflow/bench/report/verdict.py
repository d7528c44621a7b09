"""Who won, and by how much."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Standing", "headline", "is_told", "standings", "winner"]

#: Differences below this share are none.
EVEN = 0.02


@dataclass(frozen=True, slots=True)
class Standing:
    """How a policy did against lru: the geometric mean of the ratios at all places, and the range of single runs.

    Above 1 is better, for times too.
    """

    policy: str
    mean: float
    low: float
    high: float
    places: int


def is_told(policy: str) -> bool:
    """Whether the policy is told the future, so that it shows what is possible and takes no part."""
    return policy.startswith("belady") or policy.endswith("-oracle")


def standings(rows: Sequence[Mapping[str, Any]], figure: str) -> list[Standing]:
    """All policies against lru by one figure, the best first. Rows with disturbed forecasts take no part."""
    found: dict[str, list[Sequence[float]]] = {}
    for row in rows:
        ratios = row.get("against_lru", {}).get(figure)
        if ratios is None or row.get("noise"):
            continue
        better = [r if figure in ("hit_rate", "throughput") else 1.0 / r for r in ratios if r > 0]
        if len(better) == 3:
            found.setdefault(row["policy"], []).append((better[0], min(better), max(better)))
    out = [
        Standing(
            policy=policy,
            mean=math.exp(sum(math.log(v[0]) for v in values) / len(values)),
            low=min(v[1] for v in values),
            high=max(v[2] for v in values),
            places=len(values),
        )
        for policy, values in found.items()
    ]
    return sorted(out, key=lambda s: (-s.mean, s.policy))


def winner(rows: Sequence[Mapping[str, Any]], figure: str) -> Standing | None:
    """The best of those who are not told the future; None where nothing is compared with lru."""
    return next((s for s in standings(rows, figure) if not is_told(s.policy)), None)


def headline(data: Mapping[str, Any]) -> tuple[str, list[str]]:
    """One sentence that says what came of it, and a few more."""
    claims = data["claims"]
    met = sum(bool(c["met"]) for c in claims)
    told = f"{met} of {len(claims)} claims met." if claims else ""
    if data["comparison"] == "parity":
        wrong = [c["name"] for c in claims if not c["met"]]
        first = (
            "The simulator agrees with the real engine" if not wrong else "The simulator differs from the real engine"
        )
        points = [c["measured"] for c in claims if c["name"].startswith("hit rate of") and c["measured"] is not None]
        if points:
            first += f": hit rates at most {max(points):.1f} points apart"
        return f"{first}.", [told, *([f"Missed: {'; '.join(wrong)}."] if wrong else [])]
    figure = "job_mean" if data["comparison"] == "ttl" else "e2e_mean"
    what = "workflows finish" if figure == "job_mean" else "calls finish"
    fastest, hits = winner(data["rows"], figure), winner(data["rows"], "hit_rate")
    if fastest is None or hits is None:
        return "There is no lru to compare with.", [told]
    if fastest.mean < 1 + EVEN:
        first = f"No policy beats lru by more than {EVEN:.0%} in time"
    else:
        first = f"{fastest.policy} wins: {what} {fastest.mean:.2f}x as fast as with lru"
    more = [
        f"Speed is the geometric mean over {fastest.places} places (load and memory); single runs of {fastest.policy}"
        f" are between {fastest.low:.2f}x and {fastest.high:.2f}x.",
        f"Most hits: {hits.policy}, {hits.mean:.2f}x lru's hit rate ({hits.low:.2f}x to {hits.high:.2f}x).",
    ]
    if bound := next((s for s in standings(data["rows"], "hit_rate") if s.policy == "belady"), None):
        more.append(f"Told the future (belady): {bound.mean:.2f}x.")
    return f"{first}.", [" ".join(more), told]
