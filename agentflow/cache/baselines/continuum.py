"""Continuum (arXiv 2511.02230): time-to-live pins over tool calls, as released and as in the paper."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from agentflow.cache.ledger import Ledger
from agentflow.cache.ttl.policy import CostBenefit
from agentflow.cache.ttl.programs import Left, Program
from agentflow.cache.ttl.retention import Lifetime, Retention
from agentflow.cache.ttl.tools import ToolDurations, ToolKey

__all__ = ["Continuum", "ContinuumPreview"]


class ContinuumPreview(Retention):
    """The released preview: a pin of ``pin_seconds`` unless the tool's mean duration exceeds that, then none.

    An unknown tool counts as 0 s, so it is pinned. Of several tools at once the slowest counts. Calls of programs
    with a pin come first, then program-level FCFS; preempted ones have no rank of their own. A turn without a
    tool is the last and is not pinned. There, pins are locks that are broken when nothing runs; here they are
    scores, broken in the same order, the latest-arrived program first. Durations come from the tools' events
    where there are some, not from the time between requests.
    """

    name = "continuum-preview"
    preempted_first = False

    def __init__(
        self,
        ledger: Ledger,
        clock: Callable[[], float],
        *,
        pin_seconds: float = 2.0,
        order_calls: bool = True,
    ) -> None:
        durations = ToolDurations(censored=False)
        super().__init__(ledger, clock, durations=durations, order_calls=order_calls, timeouts="returned")
        if not pin_seconds > 0:
            raise ValueError("pin_seconds must be above 0")
        self.pin_seconds = pin_seconds

    def lifetime(self, program: Program, left: Left, tools: Sequence[ToolKey], now: float) -> Lifetime:
        mean = max((self.durations.mean(k.tool) for k in tools), default=0.0)
        names = ", ".join(dict.fromkeys(k.tool for k in tools))
        terms = {"mean": mean, "tokens": float(left.tokens)}
        if mean > self.pin_seconds:
            return Lifetime(0.0, f"waits for {names}: {mean:.2g} s on average, too slow", terms)
        return Lifetime(self.pin_seconds, f"waits for {names}: fast enough", terms)


class Continuum(CostBenefit):
    """The paper: tau* from the empirical CDF, cost tau, benefit T * eta plus prefill or reload time.

    Cold start as in the preprint: under ``enough`` = 100 observations in all an exponential prior of mean 1 s
    with eta 1, under 100 of the tool the CDF over all tools. What is censored is left out and a time-out counts
    as a return, since the paper's gaps end with the next request whatever the tool did.
    """

    name = "continuum"

    def __init__(
        self,
        ledger: Ledger,
        clock: Callable[[], float],
        *,
        enough: int = 100,
        prior_mean: float = 1.0,
        window: int = 1_024,
        normalise: bool = False,
        prefill: float = 2e-4,
        reload: float = 2e-5,
        order_calls: bool = True,
    ) -> None:
        super().__init__(
            ledger,
            clock,
            prior_mean=prior_mean,
            enough=enough,
            enough_each=enough,
            window=window,
            censored=False,
            normalise=normalise,
            prefill=prefill,
            reload=reload,
            budget=1.0,
            order_calls=order_calls,
            patience=math.inf,
            timeouts="returned",
        )
