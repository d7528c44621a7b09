"""HoVer-like workflows: plan -> sub-queries -> searches -> notes, looped by hops and by what was found, -> verdict.

A claim needs 2, 3 or 4 hops (HoVer's shares). Each hop is a round: the query agent writes one or several
sub-queries at once (the fan-out of BFCL's turns), a reader reads the passages of each in a branch of its own and
writes a note. A round may bring nothing, more often after rounds that brought nothing (the progress that a
multi-agent orchestrator reported); after two such rounds in a row the planner is asked again. What none of the
data sets holds is assumed and named here: ``PASSAGES`` passages a search, ``PASSAGE_TOKENS`` each.
"""

from __future__ import annotations

import random

from agentflow.bench.traces.generators import measured as m
from agentflow.bench.traces.generators._build import Context, WorkflowBuilder
from agentflow.bench.traces.generators._draw import Quantiles, choose, count, draw, share
from agentflow.bench.traces.generators._plan import Plan, make
from agentflow.bench.traces.model import Span, Trace, TraceCall, TraceTool

__all__ = ["AGENTS", "hover"]

AGENTS = ("plan", "query", "read", "verify")
_EDGES = {"plan": ("query",), "query": ("read", "verify"), "read": ("query", "plan", "verify"), "verify": ()}

#: Assumed: passages a search returns, as in our own HoVer example.
PASSAGES = 3
#: Assumed: a passage of 100 words (the usual cut of Wikipedia in open-domain retrieval) at 1.3 tokens a word.
PASSAGE_TOKENS = 130
#: Assumed: rounds after which the claim is decided with what there is.
MAX_ROUNDS = 10


def hover(plan: Plan | None = None) -> Trace:
    """Multi-hop claim checks with data-dependent loops: 8.5 calls a workflow on average, in rounds of fan-out."""
    plan = plan or Plan()
    roles = random.Random("hover roles")  # instructions belong to the graph, not to a seed
    instructions = {a: Span(f"hover.{a}", count(roles, m.ROLE_TOKENS, scale=plan.scale, least=16)) for a in AGENTS}

    def one(rng: random.Random, flow: WorkflowBuilder) -> bool:
        claim = flow.text(count(rng, m.HOVER_CLAIM_TOKENS, scale=plan.scale))
        contexts = {a: Context().private(instructions[a]).shared("claim", claim) for a in AGENTS}
        hops = choose(rng, m.HOVER_HOPS)

        def ask(agent: str, answer: Quantiles, after: list[TraceCall]) -> TraceCall:
            return flow.call(agent, contexts[agent], count(rng, answer, scale=plan.scale), after=after)

        def tell(slot: str, producer: str, *spans: Span, to: tuple[str, ...]) -> None:
            for agent in to:
                contexts[agent].shared(slot, *spans, producer=producer)

        if flow.over(contexts["plan"]):
            return False
        last = [ask("plan", m.TEAM_ANSWER_TOKENS, [])]
        tell("plan", "plan", *last[0].output, to=("plan", "query"))
        found, rounds, progress = 0, 0, (True, True)
        while found < hops and rounds < MAX_ROUNDS:
            if flow.over(contexts["query"]):
                return False
            query = ask("query", m.BFCL_CALL_TOKENS, last)
            contexts["query"].private(*query.output)
            notes = []
            for branch in range(max(1, min(choose(rng, m.BFCL_CALLS_PER_TURN), hops - found))):
                passages = flow.text(max(1, round(PASSAGES * PASSAGE_TOKENS * plan.scale)))
                reading = contexts["read"].copy().private(passages)
                if flow.over(reading):
                    return False
                notes.append(
                    flow.call(
                        "read",
                        reading,
                        count(rng, m.SUM_ANSWER_TOKENS, scale=plan.scale),
                        after=[query],
                        tools=(TraceTool(name="search", duration=draw(rng, m.SHELL_SECONDS) * plan.tool_scale),),
                        branch=f"{rounds}.{branch}",
                        superseded=True,
                    )
                )
            tell("notes", "read", *(s for n in notes for s in n.output), to=AGENTS)
            stalled = share(rng, m.STALL[progress])
            progress = (progress[1], not stalled)
            found += 0 if stalled else len(notes)
            rounds += 1
            last = notes
            if progress == (False, False) and found < hops and rounds < MAX_ROUNDS:
                if flow.over(contexts["plan"]):
                    return False
                last = [ask("plan", m.TEAM_ANSWER_TOKENS, last)]
                tell("plan", "plan", *last[0].output, to=("plan", "query"))
                progress = (False, True)
        if flow.over(contexts["verify"]):
            return False
        ask("verify", m.SUM_ANSWER_TOKENS, last)
        return True

    return make("hover", plan, _EDGES, one)
