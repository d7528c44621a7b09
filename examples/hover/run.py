"""Checking many claims at once on an engine, and checking the scorer with gold answers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentflow.batch import BatchResult, run_batch
from agentflow.engine.base import Call, Engine
from agentflow.engine.scripted import ScriptedEngine
from agentflow.graph import AgentApp
from agentflow.report import AgentRow, agent_rows
from examples.hover.agents import DONE, build_graph
from examples.hover.data import Claim
from examples.hover.retrieval import Index
from examples.hover.scoring import score_claim

__all__ = ["check_claim", "check_claims", "oracle_engine", "rows_of"]


async def check_claims(
    claims: Sequence[Claim],
    engine: Engine,
    index: Index,
    *,
    hops: int = 4,
    k: int = 3,
    concurrency: int = 4,
    results: Path | None = None,
) -> BatchResult:
    """Check ``claims``, at most ``concurrency`` at once; one record each, as :func:`check_claim` makes them."""
    app = build_graph(index, hops=hops, k=k).compile(engine=engine, max_steps=3 * hops + 4, name="hover")
    return await run_batch(
        claims,
        lambda claim: check_claim(app, claim),
        key=lambda claim: claim.uid,
        concurrency=concurrency,
        results=results,
        title="claims",
        on_record=lambda record: f"{record['uid']}: {record['label']}",
    )


async def check_claim(app: AgentApp, claim: Claim) -> dict[str, Any]:
    """Check one claim: what was found, the label given, the scores, and what each agent used."""
    started = time.perf_counter()
    result = (await app.arun({"claim": claim.claim}, workflow_id=f"hover-{claim.uid}")).raise_for_outcome()
    state = result.state
    label = state["verdict"].label
    found = list(dict.fromkeys(state.get("found", ())))
    return {
        "uid": claim.uid,
        "num_hops": claim.num_hops,
        "label": label,
        "gold_label": claim.label,
        "found": found,
        "gold_titles": list(claim.titles),
        "queries": list(state.get("queries", ())),
        "notes": list(state.get("notes", ())),
        **score_claim(claim, found, label),
        "seconds": round(time.perf_counter() - started, 3),
        "agents": [row.to_json() for row in agent_rows([result.agents])],
    }


def rows_of(records: Sequence[dict[str, Any]]) -> list[AgentRow]:
    """The agents' sums over all records, those of earlier runs too."""
    rows: dict[str, AgentRow] = {}
    for record in records:
        for data in record["agents"]:
            rows.setdefault(data["agent"], AgentRow(data["agent"])).add(AgentRow(**data))
    return list(rows.values())


def oracle_engine(claims: Sequence[Claim]) -> ScriptedEngine:
    """An engine that answers as an agent would that knows the gold data: it searches for each gold title, then
    gives the gold label. With it every score must be perfect, which proves corpus, search, graph and scorer.
    """
    by_workflow = {f"hover-{claim.uid}": claim for claim in claims}
    asked: dict[str, int] = {}

    def plan(call: Call) -> str:
        return "\n".join(by_workflow[str(call.at.workflow)].titles)

    def query(call: Call) -> str:
        workflow = str(call.at.workflow)
        number = asked[workflow] = asked.get(workflow, 0) + 1
        titles = by_workflow[workflow].titles
        return titles[number - 1] if number <= len(titles) else DONE

    def note(call: Call) -> str:
        return f"Read about {by_workflow[str(call.at.workflow)].titles[asked[str(call.at.workflow)] - 1]}."

    def verify(call: Call) -> str:
        return f'{{"label": "{by_workflow[str(call.at.workflow)].label or "SUPPORTED"}"}}'

    return ScriptedEngine({"plan": plan, "query": query, "note": note, "verify": verify})
