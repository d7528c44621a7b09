"""What a comparison is given, and what it gives: rows, claims, and what is needed to read them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from agentflow.errors import UsageError

__all__ = ["COLUMNS", "FORMAT", "Claim", "Comparison", "Mode", "Options", "Results", "Row", "Size", "read_results"]

FORMAT = "agentflow-bench"
VERSION = 1

Mode = Literal["simulated", "engine"]
#: ``standard`` is what is published, ``quick`` a first look, ``tiny`` for tests.
Size = Literal["tiny", "quick", "standard"]

#: What the columns of a row mean.
COLUMNS: Mapping[str, str] = {
    "load": "the work: which kind of workflows, and how they arrive",
    "policy": "the policies that decided, strongest first",
    "pressure": "tokens that the workflows under way could use, over the tokens of the KV pool; 1 means that all fits",
    "repetitions": "how often it was measured; figures are medians, spread is the least and the greatest",
    "hit_rate": "share of all prompt tokens that were in the cache, on any tier",
    "share_of_oracle": "hit_rate over the most hits that any policy could have had serving the same calls in the same"
    " order one after another in as much memory (device and host together), which is what the Belady oracle reaches",
    "ttft_p50": "median seconds from a call's arrival to its first token",
    "e2e_mean": "mean seconds from a call's arrival to its last token",
    "job_mean": "mean seconds from a workflow's arrival to its end, tools included",
    "throughput": "workflows ended per second",
    "intensity": "workflows arriving per second, over those per second that are served where all KV is kept",
    "noise": "share of every forecast that was replaced by chance",
    "pool_tokens": "tokens of the KV pool",
    "host_tokens": "tokens of the host tier; 0: none",
    "against_lru": "the figure over that of lru in the same repetition: median, least and greatest",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to run a comparison. ``say`` hears what is under way; ``engine_factory`` makes the engine of engine mode.

    ``repetitions`` is None for what the comparison and its size ask for.
    """

    mode: Mode = "simulated"
    size: Size = "standard"
    repetitions: int | None = None
    say: Callable[[str], None] = lambda _: None
    engine_factory: Callable[[int, float], Any] | None = None

    def __post_init__(self) -> None:
        if self.repetitions is not None and self.repetitions < 1:
            raise UsageError(f"repetitions must be at least 1, got {self.repetitions}")

    def pick(self, *, tiny: Any, quick: Any, standard: Any) -> Any:
        """The value for the size."""
        return {"tiny": tiny, "quick": quick, "standard": standard}[self.size]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One policy on one load under one pressure; :data:`COLUMNS` says what the fields mean.

    By figure, ``spread`` holds ``[least, greatest]`` and ``against_lru`` ``[median, least, greatest]``; ``more`` holds
    axes and figures that only some comparisons have.
    """

    load: str
    policy: str
    pressure: float
    repetitions: int
    hit_rate: float
    share_of_oracle: float
    ttft_p50: float
    e2e_mean: float
    job_mean: float
    throughput: float
    mode: Mode
    pool_tokens: int
    host_tokens: int = 0
    spread: Mapping[str, Sequence[float]] = field(default_factory=dict)
    against_lru: Mapping[str, Sequence[float]] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """A flat JSON-ready dict: what is in ``more`` stands beside the rest."""
        data = asdict(self)
        data |= data.pop("more")
        return {k: _short(v) for k, v in data.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Something that was promised. ``measured`` is None where it could not be measured; ``note`` says why, or how."""

    name: str
    target: str
    measured: float | None
    met: bool
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict."""
        return {k: _short(v) for k, v in asdict(self).items()}


@dataclass(slots=True, kw_only=True)
class Results:
    """What a comparison found. ``timelines`` hold what happened in single runs, for plots."""

    comparison: str
    mode: Mode
    size: Size
    title: str
    seconds: float
    rows: list[Row]
    claims: list[Claim]
    machine: Mapping[str, Any] = field(default_factory=dict)
    setting: Mapping[str, Any] = field(default_factory=dict)
    timelines: list[dict[str, Any]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """What ``agentflow bench --json`` prints and ``agentflow report`` reads."""
        rows = [r.to_json() for r in self.rows]
        shown = {k for row in rows for k in row}
        return {
            "format": FORMAT,
            "version": VERSION,
            "comparison": self.comparison,
            "title": self.title,
            "mode": self.mode,
            "size": self.size,
            "seconds": round(self.seconds, 1),
            "machine": dict(self.machine),
            "setting": dict(self.setting),
            "columns": {k: v for k, v in COLUMNS.items() if k in shown},
            "rows": rows,
            "claims": [c.to_json() for c in self.claims],
            "timelines": self.timelines,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A comparison: its name, one line on what it asks, its modes (the first is the default), its code."""

    name: str
    title: str
    modes: tuple[Mode, ...]
    run: Callable[[Options], Results]


def read_results(path: str | Path) -> dict[str, Any]:
    """A file that ``agentflow bench --json`` or ``--out`` wrote.

    Raises :class:`~agentflow.errors.UsageError` for a file that cannot be read or holds something else.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT or not isinstance(data.get("rows"), list):
        raise UsageError(f"{path} holds no results of `agentflow bench`")
    if data.get("version", 0) > VERSION:
        raise UsageError(
            f"{path} was written by a newer agentflow (version {data['version']}, this one reads {VERSION})"
        )
    return data


def _short(value: Any) -> Any:
    """Floats with six significant digits: no more were measured."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {k: _short(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_short(v) for v in value]
    return value
