"""InferCept (arXiv 2402.01869): keep, or discard, by which wastes less memory over time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from agentflow.cache.ledger import Ledger
from agentflow.cache.policy import Score, WaitingCall
from agentflow.cache.ttl.programs import Left, Program
from agentflow.cache.ttl.retention import Lifetime, Retention
from agentflow.cache.ttl.tools import ToolDurations, ToolKey
from agentflow.cache.ttl.utility import MissCost

__all__ = ["InferCept"]


class InferCept(Retention):
    """Its rule of least waste, as a time-to-live.

    Discarding wastes T_fwd(C) * (C + C_other) / 2 token-seconds, where T_fwd(C) is the time to compute the C
    tokens again and C_other what the other running calls hold; keeping wastes C for every second. Both are
    equal after T_fwd(C) * (C + C_other) / (2 * C) seconds, which is the time-to-live whatever the tool. Its third
    choice, to swap out, is what the engine's host tier does with what is not kept. ``prefill`` is seconds per
    token until the engine reports its own. Calls are served first come, first served, where returning ones keep
    the arrival of their program.
    """

    name = "infercept"

    def __init__(
        self,
        ledger: Ledger,
        clock: Callable[[], float],
        *,
        prefill: float = 2e-4,
        order_calls: bool = True,
    ) -> None:
        super().__init__(ledger, clock, durations=ToolDurations(), order_calls=order_calls)
        self.miss = MissCost(prefill=prefill)

    def lifetime(self, program: Program, left: Left, tools: Sequence[ToolKey], now: float) -> Lifetime:
        tokens = float(left.tokens)
        if not tokens:
            return Lifetime(0.0, "nothing to keep", {})
        others = self.active()[0]
        again = tokens * self.miss.prefill_rate
        discard = again * (tokens + others) / 2.0
        ttl = discard / tokens
        terms = {"forward": again, "tokens": tokens, "others": others, "discard_waste": discard, "tau": ttl}
        names = ", ".join(dict.fromkeys(k.tool for k in tools))
        return Lifetime(ttl, f"waits for {names}: discarding wastes as much as {ttl:.2g} s of keeping", terms)

    def score_call(self, call: WaitingCall) -> Score:
        score = super().score_call(call)
        # No rank for what is pinned: first come, first served by program, preempted first.
        return score and (min(score[0], 1.0), *score[1:])
