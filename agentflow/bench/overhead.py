"""What agentflow adds to an agent's step of plain LangGraph, measured side by side with a fake model.

``python -m agentflow.bench.overhead`` prints JSON with milliseconds per step: ``plain`` (LangGraph's ``StateGraph``
with a function that calls the model), ``attached`` (the same graph, followed by :func:`~agentflow.graph.attach`),
``agent_graph`` (an :class:`~agentflow.graph.AgentGraph` that does the same), each the median over the rounds, and
the medians of the differences within a round.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypedDict

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langgraph.graph import END, START, StateGraph

from agentflow.engine.scripted import ScriptedEngine
from agentflow.graph import Agent, AgentGraph, attach, shared

__all__ = ["Overhead", "main", "measure"]


@dataclass(frozen=True, slots=True)
class Overhead:
    """Milliseconds per agent step, medians over the rounds."""

    plain_ms: float
    attached_ms: float
    agent_graph_ms: float
    attached_overhead_ms: float
    agent_graph_overhead_ms: float
    steps: int
    rounds: int
    mode: str


class _FakeModel(BaseChatModel):
    """Answers at once."""

    @property
    def _llm_type(self) -> str:
        return "fake"

    def _generate(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> ChatResult:
        return ChatResult(generations=[ChatGeneration(message=AIMessage("an answer"))])

    async def _agenerate(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> ChatResult:
        return self._generate(messages)


class _State(TypedDict, total=False):
    question: str
    answer: str
    steps: int


def measure(*, steps: int = 40, rounds: int = 15, is_async: bool = False) -> Overhead:
    """Run the three graphs in turn, ``rounds`` times ``steps`` steps each, after one round to warm up."""
    runs = _graphs(steps, is_async)
    for run in runs:
        run()
    seconds: list[list[float]] = [[] for _ in runs]
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for took, run in zip(seconds, runs, strict=True):
                began = time.perf_counter()
                run()
                took.append(time.perf_counter() - began)
    finally:
        gc.enable()
    plain, attached, agents = ([1000 * s / steps for s in took] for took in seconds)
    return Overhead(
        plain_ms=statistics.median(plain),
        attached_ms=statistics.median(attached),
        agent_graph_ms=statistics.median(agents),
        attached_overhead_ms=statistics.median(a - p for a, p in zip(attached, plain, strict=True)),
        agent_graph_overhead_ms=statistics.median(a - p for a, p in zip(agents, plain, strict=True)),
        steps=steps,
        rounds=rounds,
        mode="async" if is_async else "sync",
    )


def _graphs(steps: int, is_async: bool) -> list[Callable[[], Any]]:
    model = _FakeModel()
    instructions = "You answer questions."

    def prompt(state: Any) -> list[BaseMessage]:
        return [SystemMessage(instructions), HumanMessage("Question: " + state["question"])]

    def sync_node(state: Any) -> Any:
        return {"answer": str(model.invoke(prompt(state)).text), "steps": state["steps"] + 1}

    async def async_node(state: Any) -> Any:
        return {"answer": str((await model.ainvoke(prompt(state))).text), "steps": state["steps"] + 1}

    def again(state: Any) -> str:
        return END if state["steps"] >= steps else "agent"

    plain: Any = StateGraph(_State)
    plain.add_node("agent", async_node if is_async else sync_node)
    agents = AgentGraph(_State)
    agents.add_agent(
        Agent("agent", instructions),
        prompt=lambda state: ["Question: ", shared("question", state["question"])],
        writes=lambda answer, state: {"answer": answer.text, "steps": state["steps"] + 1},
    )
    for graph in (plain, agents):
        graph.add_edge(START, "agent")
        graph.add_conditional_edges("agent", again, [END, "agent"])
    compiled = plain.compile()
    apps = [
        compiled.with_config(recursion_limit=steps + 1),
        attach(compiled, ScriptedEngine([]), max_steps=steps + 1),
        agents.compile(engine=model, max_steps=steps + 1),
    ]
    given = {"question": "How long does a step take?", "steps": 0}
    if is_async:
        return [lambda app=app: asyncio.run(app.ainvoke(given)) for app in apps]  # type: ignore[misc]
    return [lambda app=app: app.invoke(given) for app in apps]  # type: ignore[misc]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure sync and async, and print both as JSON."""
    parser = argparse.ArgumentParser(prog="python -m agentflow.bench.overhead", description=__doc__)
    parser.add_argument("--steps", type=int, default=40, help="agent steps of a run (default 40)")
    parser.add_argument("--rounds", type=int, default=15, help="runs of each graph (default 15)")
    options = parser.parse_args(argv)
    found = [measure(steps=options.steps, rounds=options.rounds, is_async=mode) for mode in (False, True)]
    rounded = [{k: round(v, 4) if isinstance(v, float) else v for k, v in asdict(f).items()} for f in found]
    sys.stdout.write(json.dumps(rounded, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
