"""FinanceBench-like workflows: a static chain of agents over the pages of a filing.

Always the same steps: route -> retrieve -> extract -> calculate -> write. No public run of it is at hand; question
and worked answers have the lengths of GSM8K's, roles those of who-and-when's agents. Assumed and named here:
filings share their pages between the questions about them (FinanceBench asks 150 questions about some 80
filings), a filing is ``FILINGS`` different ones, ``PAGES`` pages of ``PAGE_TOKENS`` tokens are read.
"""

from __future__ import annotations

import itertools
import random

from agentflow.bench.traces.generators import measured as m
from agentflow.bench.traces.generators._build import Context, WorkflowBuilder
from agentflow.bench.traces.generators._draw import count, draw
from agentflow.bench.traces.generators._plan import Plan, make
from agentflow.bench.traces.model import Span, Trace, TraceTool

__all__ = ["AGENTS", "financebench", "financebench_pages_first"]

AGENTS = ("route", "retrieve", "extract", "calculate", "write")
_EDGES = {a: (b,) for a, b in itertools.pairwise(AGENTS)} | {"write": ()}

#: Assumed: filings asked about, pages read of one, tokens of a page of a 10-K.
FILINGS, PAGES, PAGE_TOKENS = 80, 4, 800


def financebench(plan: Plan | None = None) -> Trace:
    """A static chain of 5 calls a workflow: distances between agents are known in advance."""
    return _chain("financebench", plan or Plan(), pages_first=False)


def financebench_pages_first(plan: Plan | None = None) -> Trace:
    """The same chain with prompts as one writes them for a prefix cache: what all agents of a workflow read comes
    first, the pages (handed in with the question) and the question, then the work so far, and the agent's
    instructions last."""
    return _chain("financebench-pages-first", plan or Plan(), pages_first=True)


def _chain(name: str, plan: Plan, *, pages_first: bool) -> Trace:
    roles = random.Random("financebench roles")
    instructions = {
        a: Span(f"financebench.{a}", count(roles, m.ROLE_TOKENS, scale=plan.scale, least=16)) for a in AGENTS
    }
    page = max(1, round(PAGE_TOKENS * plan.scale))

    def one(rng: random.Random, flow: WorkflowBuilder) -> bool:
        question = flow.text(count(rng, m.SUM_QUESTION_TOKENS, scale=plan.scale))
        filing = rng.randrange(FILINGS)
        first = rng.randrange(50)
        pages = [Span(f"financebench.filing{filing}.{first + i}", page) for i in range(PAGES)]
        work: list[tuple[str, Span]] = []
        last = None
        for agent in AGENTS:
            context = Context()
            if not pages_first:
                context.private(instructions[agent])
            if pages_first or agent in ("extract", "calculate"):
                context.shared("pages", *pages)
            context.shared("question", question)
            for producer, span in work:
                context.shared("work", span, producer=producer)
            if pages_first:
                context.private(instructions[agent])
            if flow.over(context):
                return False
            tools: tuple[TraceTool, ...] = ()
            if agent == "extract" and not pages_first:
                tools = (TraceTool(name="search_filing", duration=draw(rng, m.SHELL_SECONDS) * plan.tool_scale),)
            answer = count(rng, m.SUM_ANSWER_TOKENS, scale=plan.scale)
            last = flow.call(agent, context, answer, after=() if last is None else (last,), tools=tools)
            work.append((agent, last.output[0]))
        return True

    return make(name, plan, _EDGES, one)
