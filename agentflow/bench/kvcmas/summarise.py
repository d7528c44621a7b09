"""The figures of the engine benchmark out of its rows, and their table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

from agentflow.bench.kvcmas.show import Shown

__all__ = ["engine_table", "summarise"]

Row = Mapping[str, Any]


def summarise(rows: Sequence[Row], methods: Sequence[str]) -> list[dict[str, Any]]:
    """One entry per load and method: TTFT of all calls, and of those that could reuse; reuse; quality.

    ``speedup`` is the first method's mean TTFT over this one's, over all four agents, in the runs that were made
    ``beside`` this one's; ``readers`` leaves out the first agent, which computes the document under every method.
    ``spread`` is the first and third quartile of TTFT of calls that could reuse.
    """
    calls = [r for r in rows if r["kind"] == "call"]
    quality = {(r["method"], r["tokens"]): r for r in rows if r["kind"] == "quality"}
    out = []
    for tokens, gap in dict.fromkeys((r["tokens"], r["gap"]) for r in calls):
        here = [r for r in calls if (r["tokens"], r["gap"]) == (tokens, gap)]
        for method in methods:
            mine = [r for r in here if r["method"] == method]
            base = [r for r in here if r["method"] == methods[0] and method in (methods[0], r["beside"])]
            readers = [r for r in mine if r["place"] > 0]
            if not readers:
                continue
            mean, reading = fmean(r["ttft"] for r in mine), fmean(r["ttft"] for r in readers)
            checked = quality.get((method, tokens))
            times = sorted(r["ttft"] for r in readers)
            out.append(
                {
                    "tokens": tokens,
                    "gap": gap,
                    "method": method,
                    "calls": len(mine),
                    "ttft": mean,
                    "ttft_readers": reading,
                    "median_readers": median(times),
                    "spread": [times[len(times) // 4], times[(3 * len(times)) // 4]],
                    "speedup": fmean(r["ttft"] for r in base) / mean,
                    "speedup_readers": fmean(r["ttft"] for r in base if r["place"] > 0) / reading,
                    "reuse": fmean(r["corrected"] / r["prompt"] for r in readers),
                    "estimating": fmean(r["estimating"] for r in readers),
                    "reference": fmean(r["reference"] for r in readers),
                    "kl": checked["kl"] if checked else None,
                    "agreement": checked["agreement"] if checked else None,
                    "checks": checked["checks"] if checked else 0,
                }
            )
    return out


def engine_table(data: Mapping[str, Any]) -> Shown:
    """The summary for a terminal or a page."""
    return Shown(
        "Time to first token, seconds: four agents over one document, all preparation counted",
        (
            "document, pace", "method", "mean", "readers: median", "quartiles", "speed-up", "readers'", "reuse", "KL",
            "agreement",
        ),
        [
            (
                f"{s['tokens']}" + (f", every {s['gap']:g} s" if s["gap"] else ""),
                s["method"],
                f"{s['ttft']:.2f}",
                f"{s['median_readers']:.2f}",
                f"{s['spread'][0]:.2f}-{s['spread'][1]:.2f}",
                f"{s['speedup']:.2f}",
                f"{s['speedup_readers']:.2f}",
                f"{s['reuse']:.2f}",
                "" if s["kl"] is None else f"{s['kl']:.4f}",
                "" if s["agreement"] is None else f"{s['agreement']:.3f}",
            )
            for s in data["summary"]
        ],
    )  # fmt: skip
