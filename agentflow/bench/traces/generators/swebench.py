"""SWE-bench-like workflows: Planner, Coder and Tester in a loop whose next turn depends on the path.

Structure and constants are those of 400 coding-agent runs on SWE-bench: an agent's turn is a run of commands of
its kind (reading, editing, running tests), and who is next depends on who was before, on how many checks there
were and on whether the last one failed, with the measured frequencies. Each agent keeps a history of its own
behind its own instructions; it reads the task, and what the others wrote since its last turn, as shared text.
The instructions are the same text in all workflows.
"""

from __future__ import annotations

import random

from agentflow.bench.traces.generators import measured as m
from agentflow.bench.traces.generators._build import Context, WorkflowBuilder
from agentflow.bench.traces.generators._draw import choose, count, draw, share
from agentflow.bench.traces.generators._plan import Plan, make
from agentflow.bench.traces.model import Span, Trace, TraceCall, TraceTool

__all__ = ["AGENTS", "swebench"]

AGENTS = ("planner", "coder", "tester")
_TOOL = {"planner": "read", "coder": "edit", "tester": "run_tests"}
_EDGES = {
    "planner": ("planner", "coder", "tester"),
    "coder": ("coder", "planner", "tester"),
    "tester": ("tester", "planner", "coder"),
}


def swebench(plan: Plan | None = None) -> Trace:
    """Planner -> Coder -> Tester with retries: 37 calls a workflow on average (``max_calls`` cuts them).

    An agent's prompt begins with 1,300 tokens of instructions and grows by about 300 tokens of observation
    and 280 of answer a call.
    """
    plan = plan or Plan()
    instructions = {a: Span(f"swebench.{a}", _scaled(m.SWE_SYSTEM_TOKENS, plan)) for a in AGENTS}

    def one(rng: random.Random, flow: WorkflowBuilder) -> bool:
        task = flow.text(count(rng, m.SWE_TASK_TOKENS, scale=plan.scale))
        contexts = {a: Context().private(instructions[a]).shared("task", task) for a in AGENTS}
        unread: dict[str, list[tuple[str, Span]]] = {a: [] for a in AGENTS}
        agent, before, checks, failed = "planner", "start", 0, False
        last: TraceCall | None = None
        tools: tuple[TraceTool, ...] = ()
        while agent != "end":
            context = contexts[agent]
            for producer, span in unread[agent]:
                context.shared("work", span, producer=producer)
            unread[agent].clear()
            for _ in range(count(rng, m.SWE_PHASE_STEPS[agent])):
                if flow.over(context):
                    return False
                answer = count(rng, m.SWE_ANSWER_TOKENS[agent], scale=plan.scale)
                last = flow.call(agent, context, answer, after=() if last is None else (last,), tools=tools)
                context.private(*last.output, flow.text(count(rng, m.SWE_OBSERVATION_TOKENS[agent], scale=plan.scale)))
                seconds = draw(rng, m.SWE_TOOL_SECONDS[agent]) * plan.tool_scale
                failed = False
                tools = (TraceTool(name=_TOOL[agent], duration=seconds),)
            if agent == "tester":
                checks += 1
                failed = share(rng, m.SWE_CHECK_FAILS[min(checks, 3)])
                if failed:
                    tools = (TraceTool(name=_TOOL[agent], duration=tools[0].duration, outcome="error"),)
            assert last is not None
            for other in AGENTS:
                if other != agent:
                    unread[other].append((agent, last.output[0]))
            agent, before = _next(rng, before, agent, failed, checks), agent
        return True

    return make("swebench", plan, _EDGES, one)


def _next(rng: random.Random, before: str, agent: str, failed: bool, checks: int) -> str:
    path = (before, agent, failed, min(checks, 3))
    return choose(rng, m.SWE_NEXT_BY_PATH.get(path) or m.SWE_NEXT[before, agent])


def _scaled(tokens: float, plan: Plan) -> int:
    return max(1, round(tokens * plan.scale))
