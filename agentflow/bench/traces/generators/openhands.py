"""OpenHands-like workflows: a coding agent with a long history that it condenses, and sub-agents beside it.

Lengths, steps, condensations and sub-agents are those of 61 recorded coding-agent sessions; the tools take as long
as those of 400 runs of a coding agent that asks nobody for approval. Sub-agents run at the same time, each in a
branch and with a history of its own behind the same instructions; what they report is read by the main agent.
"""

from __future__ import annotations

import random

from agentflow.bench.traces.generators import measured as m
from agentflow.bench.traces.generators._build import Context, WorkflowBuilder
from agentflow.bench.traces.generators._draw import Quantiles, choose, count, draw, share
from agentflow.bench.traces.generators._plan import Plan, make
from agentflow.bench.traces.model import Span, Trace, TraceCall, TraceTool

__all__ = ["AGENTS", "openhands"]

AGENTS = ("main", "explore")
_EDGES = {"main": ("main", "explore"), "explore": ("explore", "main")}
_TOOL = {"planner": "read", "coder": "edit", "tester": "run_tests"}


def openhands(plan: Plan | None = None) -> Trace:
    """One agent of many steps, long prompts, and sometimes sub-agents in parallel: 105 calls a workflow on average.

    All workflows share 15,000 tokens of instructions; ``max_calls`` and ``max_prompt`` keep the rest in bounds.
    """
    plan = plan or Plan()
    typical = {"main": m.CODING_SYSTEM_TOKENS[3], "explore": m.SUB_AGENT_SYSTEM_TOKENS[3]}
    instructions = {a: Span(f"openhands.{a}", max(1, round(typical[a] * plan.scale))) for a in AGENTS}

    def one(rng: random.Random, flow: WorkflowBuilder) -> bool:
        return _Session(rng, flow, plan, instructions).run()

    return make("openhands", plan, _EDGES, one)


class _Session:
    def __init__(self, rng: random.Random, flow: WorkflowBuilder, plan: Plan, instructions: dict[str, Span]) -> None:
        self.rng, self.flow, self.plan, self.instructions = rng, flow, plan, instructions

    def run(self) -> bool:
        """The main agent to its end; False where a limit came first."""
        task = self._text(m.CODING_TASK_TOKENS)
        context = Context().private(self.instructions["main"]).shared("task", task)
        fixed = context.spans
        steps = count(self.rng, m.CODING_STEPS)
        waves = count(self.rng, m.SUB_AGENT_WAVES) if share(self.rng, m.SUB_AGENT_SESSIONS) else 0
        starts = {self.rng.randrange(steps) for _ in range(waves)}
        after: list[TraceCall] = []
        tools: tuple[TraceTool, ...] = ()
        for step in range(steps):
            if self.flow.over(context):
                return False
            call = self._call("main", context, after, tools)
            after, tools = [call], ()
            context.private(*call.output)
            if step in starts:
                after = self._wave(call, step)
                if not after:
                    return False
                for report in after:
                    context.shared("report", *report.output, producer="explore")
            else:
                context.private(self._text(m.CODING_OBSERVATION_TOKENS))
                tools = self._tools()
            full = context.tokens > m.CODING_LARGEST_PROMPT[4] * self.plan.scale
            if (full or share(self.rng, m.CODING_CONDENSE)) and step + 1 < steps:
                left = context.tokens * draw(self.rng, m.CODING_CONDENSED_TO)
                self.flow.supersede(call)
                context.keep(fixed)
                context.private(self.flow.text(max(1, round(left - context.tokens))))
        return True

    def _wave(self, parent: TraceCall, step: int) -> list[TraceCall]:
        """Sub-agents at the same time: the last call of each, none where a limit came first."""
        last = []
        for branch in range(choose(self.rng, m.SUB_AGENT_FAN_OUT)):
            context = Context().private(self.instructions["explore"])
            context.shared("order", *parent.output, producer="main")
            after = parent
            tools: tuple[TraceTool, ...] = ()
            for _ in range(count(self.rng, m.SUB_AGENT_STEPS)):
                if self.flow.over(context):
                    return []
                after = self._call("explore", context, [after], tools, branch=f"{step}.{branch}")
                context.private(*after.output, self._text(m.SUB_AGENT_OBSERVATION_TOKENS))
                tools = self._tools()
            self.flow.supersede(after)
            last.append(after)
        return last

    def _call(
        self,
        agent: str,
        context: Context,
        after: list[TraceCall],
        tools: tuple[TraceTool, ...],
        branch: str | None = None,
    ) -> TraceCall:
        answer = count(self.rng, m.CODING_ANSWER_TOKENS, scale=self.plan.scale)
        return self.flow.call(agent, context, answer, after=after, tools=tools, branch=branch)

    def _text(self, lengths: Quantiles) -> Span:
        return self.flow.text(count(self.rng, lengths, scale=self.plan.scale))

    def _tools(self) -> tuple[TraceTool, ...]:
        kind = choose(self.rng, m.SWE_KINDS)
        seconds = draw(self.rng, m.SWE_TOOL_SECONDS[kind]) * self.plan.tool_scale
        return (TraceTool(name=_TOOL[kind], duration=seconds),)
