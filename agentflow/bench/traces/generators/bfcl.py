"""BFCL-like workflows: one assistant with the documentation of its APIs, function calls in a loop, a user's turns.

Turns, calls a turn, their lengths and the APIs offered are those of BFCL's multi-turn entries. The APIs run in
the process, so a tool takes as long as a coding agent's file editor. Assumed and named here: an API's answer has
the length of two calls, the assistant closes a turn with a text as long as the user's, and the user, who pauses
as the users of coding agents do, is back within ``PATIENCE`` seconds.
"""

from __future__ import annotations

import random

from agentflow.bench.traces.generators import measured as m
from agentflow.bench.traces.generators._build import Context, WorkflowBuilder
from agentflow.bench.traces.generators._draw import choose, count, draw
from agentflow.bench.traces.generators._plan import Plan, make
from agentflow.bench.traces.model import Span, Trace, TraceCall, TraceTool

__all__ = ["AGENTS", "bfcl"]

AGENTS = ("assistant",)

#: Assumed: the longest pause of a user between two turns, in seconds.
PATIENCE = 60.0


def bfcl(plan: Plan | None = None) -> Trace:
    """Function calling over several user turns: 9.2 calls a workflow on average.

    Workflows with the same set of APIs (20 sets) share their first 1,500 to 8,600 tokens. The pause before a new
    turn is the user's.
    """
    plan = plan or Plan()

    def one(rng: random.Random, flow: WorkflowBuilder) -> bool:
        context = Context()
        for api in choose(rng, m.BFCL_API_SETS):
            context.private(Span(f"bfcl.{api}", max(1, round(m.BFCL_API_TOKENS[api] * plan.scale))))
        last: TraceCall | None = None
        pause = 0.0
        for _ in range(choose(rng, m.BFCL_TURNS)):
            context.shared("user", flow.text(count(rng, m.BFCL_QUESTION_TOKENS, scale=plan.scale)))
            tools: tuple[TraceTool, ...] = ()
            calls = choose(rng, m.BFCL_CALLS_PER_TURN)
            for i in range(calls + 1):
                if flow.over(context):
                    return False
                lengths = m.BFCL_CALL_TOKENS if i < calls else m.BFCL_QUESTION_TOKENS
                last = flow.call(
                    "assistant",
                    context,
                    count(rng, lengths, scale=plan.scale),
                    after=() if last is None else (last,),
                    tools=tools,
                    pause=pause,
                )
                context.private(*last.output)
                pause, tools = 0.0, ()
                if i < calls:
                    context.private(flow.text(count(rng, m.BFCL_CALL_TOKENS, scale=2 * plan.scale)))
                    tools = (TraceTool(name="api", duration=draw(rng, m.EDITOR_SECONDS) * plan.tool_scale),)
            pause = min(PATIENCE, draw(rng, m.USER_SECONDS)) * plan.tool_scale
        return True

    return make("bfcl", plan, {"assistant": ("assistant",)}, one)
