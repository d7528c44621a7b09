"""The graph: plan -> query -> search -> note, looped up to the hop limit, -> verify.

The claim and the notes are what all agents read. They stand first in every prompt and only ever grow at their
end, so the engine finds nearly all of a prompt in its cache from an agent's second call on.
"""

from __future__ import annotations

import operator
from typing import Annotated, Any, Literal, TypedDict

from langchain_core.runnables import RunnableConfig, RunnableLambda
from pydantic import BaseModel, Field

from agentflow.engine.base import new_id
from agentflow.graph import Agent, AgentGraph, shared
from agentflow.tools import ToolExecutor, tool
from examples.hover.retrieval import Index

__all__ = ["HoverState", "Verdict", "build_graph", "clean_query"]

#: What the query agent writes when the notes are enough.
DONE = "DONE"


class HoverState(TypedDict, total=False):
    """The claim, and what was found out about it so far."""

    claim: str
    plan: str
    query: str
    passages: str
    notes: Annotated[list[str], operator.add]
    queries: Annotated[list[str], operator.add]
    found: Annotated[list[str], operator.add]
    verdict: Verdict


class Verdict(BaseModel):
    """Whether the notes support the claim."""

    label: Literal["SUPPORTED", "NOT_SUPPORTED"] = Field(description="SUPPORTED only if every part of the claim holds")


planner = Agent(
    "plan",
    "You plan how to check a claim against an encyclopedia. List the facts to look up, in order, one short line each.",
    sampling={"max_tokens": 48},
)
querier = Agent(
    "query",
    "You search an encyclopedia to check a claim. Read the notes, then write one search query of a few words for"
    f" the next missing fact. Write {DONE} if the notes are enough. Answer with the query alone.",
    sampling={"max_tokens": 16, "stop": ("\n",)},
)
noter = Agent(
    "note",
    "You read search results to check a claim. Write one short sentence with the fact in them that matters for the"
    " claim and is not yet in the notes.",
    sampling={"max_tokens": 32, "stop": ("\n",)},
)
verifier = Agent(
    "verify",
    "You decide whether a claim is true by the notes alone. Answer SUPPORTED if the notes confirm every part of it,"
    " else NOT_SUPPORTED.",
    output=Verdict,
    sampling={"max_tokens": 32},
)


def build_graph(index: Index, *, hops: int = 4, k: int = 3) -> AgentGraph:
    """The graph on a search index; at most ``hops`` searches per claim, ``k`` new passages each."""

    @tool(timeout=30, pure=True, response_format="content_and_artifact")
    def search_passages(query: str, skip: list[str]) -> tuple[str, list[str]]:
        """Search the encyclopedia and return the best passages, those titled as in ``skip`` left out."""
        found = [f for f in index.search(query, k=k + len(skip)) if f.passage.title not in skip][:k]
        text = "\n".join(f"{f.passage.title}: {f.passage.text}" for f in found)
        return text or "nothing found", [f.passage.title for f in found]

    executor = ToolExecutor([search_passages])

    def call_for(state: HoverState) -> list[Any]:
        args = {"query": state["query"], "skip": state.get("found", [])}
        return [{"name": search_passages.name, "args": args, "id": new_id("search"), "type": "tool_call"}]

    def found_by(state: HoverState, answer: Any) -> HoverState:
        return {"passages": str(answer.content), "found": answer.artifact or [], "queries": [state["query"]]}

    def search(state: HoverState, config: RunnableConfig) -> HoverState:
        return found_by(state, executor.run(call_for(state), config=config)[0])

    async def asearch(state: HoverState, config: RunnableConfig) -> HoverState:
        return found_by(state, (await executor.arun(call_for(state), config=config))[0])

    def after_query(state: HoverState) -> str:
        return "verify" if state["query"].upper().strip(" .") in ("", DONE) else "search"

    def after_note(state: HoverState) -> str:
        return "query" if len(state["queries"]) < hops else "verify"

    graph = AgentGraph(HoverState)
    graph.add_agent(planner, prompt=lambda s: [_claim(s), "\nWhich facts decide this claim?"], writes="plan")
    graph.add_agent(
        querier,
        prompt=lambda s: [_claim(s), shared("plan", f"\nPlan:\n{s['plan']}"), *_notes(s), "\nNext search query:"],
        writes=lambda answer: {"query": clean_query(answer.text)},
    )
    graph.add_node("search", RunnableLambda(search, afunc=asearch, name="search"))
    graph.add_agent(
        noter,
        prompt=lambda s: [_claim(s), *_notes(s), f"\nSearch results:\n{s['passages']}\nNew note:"],
        writes=lambda answer: {"notes": [" ".join(answer.text.split())]},
    )
    graph.add_agent(verifier, prompt=lambda s: [_claim(s), *_notes(s), "\nIs the claim supported?"], writes="verdict")
    graph.set_entry_point("plan")
    graph.add_edge("plan", "query")
    graph.add_conditional_edges("query", after_query, ["search", "verify"])
    graph.add_edge("search", "note")
    graph.add_conditional_edges("note", after_note, ["query", "verify"])
    graph.set_finish_point("verify")
    return graph


def clean_query(text: str) -> str:
    """What to search for: the first line that says something, without quotes or a label, at most 200 characters."""
    for line in text.splitlines():
        line = line.strip().strip("\"'`*- ").strip()
        head, colon, rest = line.partition(":")
        if colon and head.strip().lower() in ("query", "search query", "next search query", "search"):
            line = rest.strip().strip("\"'`* ").strip()
        if line:
            return line[:200]
    return ""


def _claim(state: HoverState) -> dict[str, Any]:
    return shared("claim", f"Claim: {state['claim']}\nNotes:")


def _notes(state: HoverState) -> list[dict[str, Any]]:
    """One part per note: a new note leaves the tokens of the earlier ones as they are."""
    return [shared("notes", f"\n- {note}", producer="note") for note in state.get("notes", [])]
