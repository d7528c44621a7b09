"""What an experiment with a policy is, and what it finds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

__all__ = ["Experiment", "Finding", "Mode", "median_of"]

Mode = Literal["tools", "simulated", "engine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One policy against its control. ``figures`` maps a figure's name to (with, without), each the median of the
    repetitions; ``spread`` to the least and greatest with the policy. ``met`` says whether the aim was reached."""

    policy: str
    mode: Mode
    aim: str
    met: bool
    figures: Mapping[str, tuple[float, float | None]]
    spread: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """``run(repetitions, quick)`` makes the finding."""

    policy: str
    mode: Mode
    title: str
    run: Callable[[int, bool], Finding]


def median_of(runs: Sequence[Mapping[str, float]]) -> tuple[dict[str, float], dict[str, tuple[float, float]]]:
    """Medians over repetitions by figure, and the least and greatest."""
    names = runs[0].keys()
    values = {n: [r[n] for r in runs] for n in names}
    return (
        {n: statistics.median(v) for n, v in values.items()},
        {n: (min(v), max(v)) for n, v in values.items()},
    )
