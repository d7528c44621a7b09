"""What the demo's and the examples' agents find cached on the real engine, by SGLang's own report."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from itertools import takewhile

from agentflow.bench.directed import Directed
from agentflow.cli._demo_graph import TASKS
from agentflow.cli._demo_graph import build_graph as demo_graph
from agentflow.engine.base import Call, Completion
from agentflow.engine.embedded import EmbeddedEngine
from agentflow.engine.scripted import ScriptedEngine, tool_call
from examples.hover.data import load_claims, load_passages
from examples.hover.retrieval import Index
from examples.hover.run import check_claims, oracle_engine
from examples.swebench.instance import load_own
from examples.swebench.run import Limits, agents_solver, predict


class Watched(Directed):
    """Keeps the calls by workflow and agent."""

    def __init__(self, engine: EmbeddedEngine, script: ScriptedEngine) -> None:
        super().__init__(engine, script)
        self.made: dict[tuple[str | None, str | None], list[tuple[Call, Completion]]] = defaultdict(list)

    def noted(self, call: Call, completion: Completion) -> None:
        self.made[call.at.workflow, call.at.agent].append((call, completion))

    def shares(self) -> dict[str, tuple[int, list[float]]]:
        """Per agent: how many calls it made, and for each from its second in a workflow on, how much of what it had
        in common with the agent's earlier calls was cached."""
        out: dict[str, tuple[int, list[float]]] = {}
        for (_, agent), calls in self.made.items():
            number, found = out.setdefault(agent or "", (0, []))
            earlier: list[tuple[int, ...]] = []
            for call, completion in calls:
                prompt = tuple(call.token_ids)
                unchanged = max((common(prompt, e) for e in earlier), default=0)
                if unchanged:
                    assert completion.usage.prompt_tokens == len(prompt)
                    found.append(completion.usage.cached / min(unchanged, len(prompt) - 1))
                earlier.append((*prompt, *completion.token_ids))
            out[agent or ""] = (number + len(calls), found)
        return out


def common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def check(directed: Watched, *agents: str) -> None:
    shares = directed.shares()
    assert set(agents) <= set(shares)
    for agent in agents:
        calls, found = shares[agent]
        assert calls > len(found) > 0
        assert min(found) >= 0.95, f"{agent}: {found}"


def test_the_demos_agents(engine: EmbeddedEngine) -> None:
    wrong = iter(["x - y", "x * y", "x / y", "x + y"])
    script = ScriptedEngine(
        {
            "planner": lambda call: "Add them.",
            "coder": lambda call: next(wrong),
            "tester": lambda call: "Another operator is needed.",
        }
    )
    directed = Watched(engine, script)
    task = TASKS[0]
    app = demo_graph().compile(engine=directed, name="demo")
    given = {"task": task.text, "cases": [list(case) for case in task.cases]}
    assert asyncio.run(app.arun(given)).outcome == "done"
    check(directed, "coder", "tester")


def test_the_hover_agents(engine: EmbeddedEngine) -> None:
    claims = [c for c in load_claims() if len(c.titles) >= 3][:2]
    directed = Watched(engine, oracle_engine(claims))
    made = asyncio.run(check_claims(claims, directed, Index(load_passages()), concurrency=1))
    assert not made.errors
    check(directed, "query", "note")


def test_the_swebench_agents(engine: EmbeddedEngine) -> None:
    task = next(t for t in load_own() if t.instance_id == "smallrepos__spans-8")
    script = ScriptedEngine(
        {
            "planner": ["Sort the spans."],
            "coder": [
                tool_call("bash", command="ls"),
                tool_call("bash", command="ls spans"),
                "Looked.",
                "Looked again.",
            ],
            "tester": ['{"decision": "revise", "feedback": "sort them"}', '{"decision": "accept", "feedback": "good"}'],
        }
    )
    directed = Watched(engine, script)
    made = asyncio.run(predict([task], agents_solver(directed, Limits()), model="directed"))
    assert made.batch.errors == {}
    check(directed, "coder", "tester")
