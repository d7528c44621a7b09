"""CacheTTL: keep what a turn left behind for as long as waiting for its tool pays."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from agentflow.cache.ledger import Ledger, Thread
from agentflow.cache.policy import Effect, Note
from agentflow.cache.ttl.durations import Distribution, product
from agentflow.cache.ttl.programs import Left, Pin, Program
from agentflow.cache.ttl.retention import Lifetime, Retention
from agentflow.cache.ttl.solver import tau_star
from agentflow.cache.ttl.tools import Source, ToolDurations, ToolKey
from agentflow.cache.ttl.utility import Memorability, MissCost

__all__ = ["CostBenefit", "TTL"]

_RANK: Mapping[Source, float] = {"prior": 0.0, "global": 1.0, "tool": 2.0, "variant": 3.0}


class CostBenefit(Retention):
    """tau* = argmax P(tau) * benefit - cost(tau) (arXiv 2511.02230), all terms as measured on this engine.

    Benefit is the time to get the KV back by prefill or from the host, plus T * eta: the mean queueing delay
    of requests whose KV had been evicted, times memorability. With ``normalise`` cost is tau times the KV's
    size over the mean size of active requests, else tau; ``cost="held"`` counts E[min(duration, tau)] in the
    place of tau. Several tools at once count by the product of their
    distributions. ``enough`` and ``enough_each`` are the thresholds of the cold-start chain, ``censored`` whether
    tools still running and stopped ones count (Kaplan-Meier) or are left out. ``prefill`` and ``reload`` are
    seconds per token until the engine reports its own. Deciding is O(window).
    """

    def __init__(
        self,
        ledger: Ledger,
        clock: Callable[[], float],
        *,
        prior_mean: float = 1.0,
        enough: int = 20,
        enough_each: int = 20,
        window: int = 256,
        censored: bool = True,
        normalise: bool = True,
        cost: Literal["tau", "held"] = "tau",
        prefill: float = 2e-4,
        reload: float = 2e-5,
        budget: float = 1.0,
        order_calls: bool = True,
        patience: float = math.inf,
        timeouts: str = "censored",
    ) -> None:
        durations = ToolDurations(
            prior_mean=prior_mean, enough=enough, enough_each=enough_each, window=window, censored=censored
        )
        super().__init__(
            ledger,
            clock,
            durations=durations,
            budget=budget,
            order_calls=order_calls,
            patience=patience,
            timeouts=timeouts,
        )
        if cost not in ("tau", "held"):
            raise ValueError("cost must be 'tau' or 'held'")
        self.normalise = normalise
        self._held = cost == "held"
        self.miss = MissCost(prefill=prefill, reload=reload)
        self.memorability = Memorability(window, enough=min(enough, 10))

    def lifetime(self, program: Program, left: Left, tools: Sequence[ToolKey], now: float) -> Lifetime:
        if len(tools) == 1:
            distribution, source = self.durations.distribution(tools[0], now)
            return self.solve(left, distribution, f"waits for {tools[0].tool}", source)
        found = [self.durations.distribution(key, now) for key in tools]
        names = ", ".join(dict.fromkeys(k.tool for k in tools))
        source = min((s for _, s in found), key=lambda s: _RANK[s])
        return self.solve(left, product([d for d, _ in found]), f"waits for {names}", source)

    def solve(self, left: Left, distribution: Distribution, why: str, source: Source) -> Lifetime:
        """The lifetime that pays for what was left, given when its next request comes."""
        miss = self.miss.seconds(left.tokens)
        delay = self.delay.mean()
        eta = 1.0 if source == "prior" else max(0.0, self.memorability.eta())
        benefit = miss + delay * eta
        cost = 1.0
        if self.normalise:
            tokens, active = self.active()
            if active and tokens:
                cost = left.tokens * active / tokens
        solution = tau_star(distribution, benefit, cost, held=self._held)
        terms = {
            "tau": solution.tau,
            "p": solution.probability,
            "gain": solution.gain,
            "benefit": benefit,
            "miss": miss,
            "queueing_delay": delay,
            "eta": eta,
            "cost_per_second": cost,
            "tokens": float(left.tokens),
            "known": _RANK[source],
        }
        if solution.tau > 0.0:
            return Lifetime(solution.tau, f"{why}: back in time with {solution.probability:.0%}", terms)
        return Lifetime(0.0, f"{why}: keeping it costs more than it saves", terms)


class TTL(CostBenefit):
    """agentflow's own: the paper's rule, with what it leaves open decided.

    A second costs a second (``normalise`` is off, as in the preprint): to let long contexts go first, which are the
    dearest to compute again, made every load slower or no faster in simulations.

    Beyond :class:`CostBenefit`: a budget of pins, and an end to patience; a pin lasts at least ``grace`` seconds
    beyond the return of its tools, since the request is about to come; turns that end without a tool (hand-overs
    between agents, clients that send no events) are kept by the time until the same agent's next turn, learned
    per graph and agent (``gaps``; what never came back counts as infinite). ``hold_waiting`` keeps KV for every
    request that waits, pinned before or not, which made things worse in simulations of full engines.
    ``seed`` is what :meth:`ToolDurations.to_json` wrote, ``seed_durations`` lists (tool, seconds);
    ``path`` is a file to load it from and to save it to every ``save_every`` seconds.
    """

    name = "ttl"

    def __init__(
        self,
        ledger: Ledger,
        clock: Callable[[], float],
        *,
        budget: float = 0.8,
        patience: float = 1_800.0,
        hold_waiting: bool = False,
        grace: float = 1.0,
        gaps: bool = True,
        seed: Mapping[str, Any] | None = None,
        seed_durations: Sequence[Sequence[Any]] = (),
        path: str | None = None,
        save_every: float = 60.0,
        normalise: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(ledger, clock, budget=budget, patience=patience, normalise=normalise, **options)
        if not 0.0 <= grace < math.inf or not save_every > 0.0:
            raise ValueError("grace must be at least 0 and finite, save_every above 0")
        self.hold_waiting = hold_waiting
        self.grace = grace
        self.gaps: ToolDurations | None = (
            ToolDurations(enough=self.durations.enough_each, enough_each=self.durations.enough_each) if gaps else None
        )
        self._path = path
        self._save_every = save_every
        self._saved_at = clock()
        self._saved_with = 0
        if seed is not None:
            self.durations.load_json(seed)
        self.durations.seed((str(tool), float(seconds)) for tool, seconds in seed_durations)
        if path is not None:
            self.durations.load(path)

    # -- turns without tools ---------------------------------------------------------------------------

    def after_call(self, program: Program, thread: Thread, left: Left, now: float) -> Lifetime | None:
        if self.gaps is None:
            return None
        distribution, source = self.gaps.distribution(_gap_key(thread), now)
        if source != "tool":
            return None
        return self.solve(left, distribution, f"waits for the next turn of {thread.agent}", source)

    def returned(self, program: Program, thread: Thread, left: Left, now: float) -> None:
        if not left.had_tools:
            if self.gaps is not None:
                self.gaps.add(_gap_key(thread), now - left.at)
        else:
            for call_id, key in left.tools.items():
                if call_id.startswith("answer:"):  # no event will tell: the gap is the best that is known
                    self.durations.add(key, now - left.at)
        if self.hold_waiting and thread not in self._pins:
            self._pin(Pin(program, thread, left, since=now, ttl=0.0, reason="its request waits", tokens=0))

    def tools_done(self, program: Program, thread: Thread, left: Left, now: float) -> Lifetime | None:
        pin = self._pins.get(thread)
        if pin is None or not pin.live(now) or pin.deadline - now >= self.grace:
            return None
        return Lifetime(self.grace, "its tools have returned: its next request is about to come", left.terms)

    def _dropped(self, program: Program) -> None:
        if self.gaps is not None:
            for thread, left in program.left.items():
                if not left.had_tools and thread not in program.busy:
                    self.gaps.add(_gap_key(thread), math.inf)
        super()._dropped(program)

    # -- kept between runs -----------------------------------------------------------------------------

    def act(self) -> Sequence[Effect | Note]:
        if self._path is not None:
            self._save(self.clock())
        return super().act()

    def _save(self, now: float) -> None:
        seen = self.durations.seen
        if seen == self._saved_with or 0.0 <= now - self._saved_at < self._save_every or self._path is None:
            return
        self._saved_at, self._saved_with = now, seen
        try:
            self.durations.save(self._path)
            self.counts["saved"] += 1
        except OSError:
            self.counts["save_failed"] += 1


def _gap_key(thread: Thread) -> ToolKey:
    return ToolKey(f"{thread.workflow.graph or ''}/{thread.agent or ''}")
