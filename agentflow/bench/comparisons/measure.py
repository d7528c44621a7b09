"""From single runs to rows: medians, spread, and ratios against lru within a repetition."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentflow.bench.comparisons.bound import best_hit_rate
from agentflow.bench.comparisons.model import Mode, Row
from agentflow.bench.simulator.result import SimResult
from agentflow.bench.traces.model import Trace

__all__ = ["FIGURES", "REFERENCE", "Run", "measured", "rows_of", "select", "value"]

#: The policy that all others are compared with.
REFERENCE = "lru"
#: Figures of a run that rows hold, as they are called in a summary.
FIGURES: Mapping[str, str] = {
    "ttft_p50": "ttft_p50",
    "e2e_mean": "e2e_mean",
    "job_mean": "job_mean",
    "throughput": "workflows_per_second",
}
_EXTRA = (
    "ttft_mean", "ttft_p99", "e2e_p99", "job_p99", "queued_mean", "hit_rate_device", "hit_rate_host", "evicted_tokens",
    "evicted_regretted_tokens", "prefetches", "prefetch_used_tokens", "prefetch_wasted_tokens", "retractions",
    "calls_rejected", "calls_aborted", "policy_errors",
)  # fmt: skip


@dataclass(slots=True, kw_only=True)
class Run:
    """One measured run: where it belongs (``axes`` beside load, policy and pressure), and its figures."""

    load: str
    policy: str
    pressure: float
    repetition: int
    pool_tokens: int
    host_tokens: int
    mode: Mode
    figures: dict[str, float]
    axes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def place(self) -> tuple[Any, ...]:
        """What it is compared within: all but the policy and the repetition."""
        axes = tuple(sorted((k, v) for k, v in self.axes.items() if k != "noise"))
        return (self.load, round(self.pressure, 6), self.host_tokens > 0, self.mode, axes)


def measured(
    trace: Trace,
    result: SimResult,
    *,
    load: str,
    policy: str,
    pressure: float,
    repetition: int,
    pool_tokens: int,
    host_tokens: int = 0,
    mode: Mode = "simulated",
    axes: Mapping[str, Any] | None = None,
    best: float | None = None,
) -> Run:
    """A run's figures. ``best`` is the hit rate that was possible; it is found here when not given."""
    summary = result.summary()
    if best is None:
        best = best_hit_rate(trace, result, pool_tokens + host_tokens)
    figures = {"hit_rate": summary["hit_rate"], "share_of_oracle": summary["hit_rate"] / best if best else 1.0}
    figures |= {name: summary[key] for name, key in FIGURES.items()}
    figures |= {name: float(summary[name]) for name in _EXTRA}
    return Run(
        load=load,
        policy=policy,
        pressure=pressure,
        repetition=repetition,
        pool_tokens=pool_tokens,
        host_tokens=host_tokens,
        mode=mode,
        figures=figures,
        axes=dict(axes or {}),
    )


def rows_of(runs: Iterable[Run]) -> list[Row]:
    """A row for each policy at each place, in the order in which they first appear."""
    groups: dict[tuple[Any, ...], list[Run]] = {}
    reference: dict[tuple[Any, ...], Run] = {}
    for run in runs:
        key = (*run.place, run.policy, run.axes.get("noise"))
        groups.setdefault(key, []).append(run)
        if run.policy == REFERENCE:
            reference[*run.place, run.repetition] = run
    return [_row(group, reference) for group in groups.values()]


def _row(runs: Sequence[Run], reference: Mapping[tuple[Any, ...], Run]) -> Row:
    first = runs[0]
    figures = {name: [r.figures[name] for r in runs] for name in first.figures}
    medians = {name: statistics.median(values) for name, values in figures.items()}
    against = {}
    for name in ("hit_rate", *FIGURES):
        ratios = []
        for run in runs:
            base = reference.get((*run.place, run.repetition))
            if base is not None and base.figures[name] > 0:
                ratios.append(run.figures[name] / base.figures[name])
        if ratios:
            against[name] = [statistics.median(ratios), min(ratios), max(ratios)]
    shown = ("hit_rate", "share_of_oracle", *FIGURES)
    return Row(
        load=first.load,
        policy=first.policy,
        pressure=round(statistics.median(r.pressure for r in runs), 3),
        repetitions=len(runs),
        mode=first.mode,
        pool_tokens=round(statistics.median(r.pool_tokens for r in runs)),
        host_tokens=round(statistics.median(r.host_tokens for r in runs)),
        spread={name: [min(figures[name]), max(figures[name])] for name in shown},
        against_lru=against,
        more={**first.axes, **{name: medians[name] for name in _EXTRA}},
        **{name: medians[name] for name in shown},
    )


def select(rows: Iterable[Row], **wanted: Any) -> list[Row]:
    """Rows whose fields and axes have these values; a callable value is asked."""
    return [
        row
        for row in rows
        if all(
            (want(value(row, name)) if callable(want) else value(row, name) == want) for name, want in wanted.items()
        )
    ]


def value(row: Row, name: str) -> Any:
    """A field of a row, or what ``more`` holds under the name; None where there is neither."""
    return row.more.get(name) if name in row.more or not hasattr(row, name) else getattr(row, name)
