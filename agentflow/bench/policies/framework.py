"""Memoization, speculation, safety and hedging: real tools and graphs, a scripted model, real time."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any, TypedDict

from agentflow.bench.policies.model import Experiment, Finding, median_of
from agentflow.cache.policy import PolicySpec
from agentflow.engine.base import Call
from agentflow.engine.context import current_run
from agentflow.engine.scripted import Answer, ScriptedEngine
from agentflow.engine.workflow import WorkflowRun
from agentflow.graph import Agent, AgentGraph
from agentflow.tools import ToolExecutor, tool

__all__ = ["EXPERIMENTS"]


def _percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _asked(name: str, **arguments: Any) -> list[Any]:
    return [{"name": name, "args": arguments, "id": "1", "type": "tool_call"}]


# -- memo -------------------------------------------------------------------------------------------------


def memo(repetitions: int, quick: bool) -> Finding:
    """Workflows of three tenants search for what others searched for too (Zipf), in a world that changes."""
    seconds_to_live, latency = 0.5, 0.002
    calls = 400 if quick else 1_500

    async def once(policies: Sequence[PolicySpec], seed: int) -> dict[str, float]:
        rng = random.Random(seed)
        ran = 0

        @tool(pure=True)
        async def search(query: str) -> str:
            """Search; says when the world was looked at, and for whom."""
            nonlocal ran
            ran += 1
            seen = time.monotonic()
            await asyncio.sleep(latency)
            run = current_run.get()
            return f"{seen}|{run.tenant if run is not None else ''}|{query}"

        executor = ToolExecutor([search])
        engine = ScriptedEngine([], policies=list(policies))
        runs = [WorkflowRun(engine, f"w{i}", tenant=f"t{i % 3}") for i in range(12)]
        wrong = stale = 0
        began = time.monotonic()
        for i in range(calls):
            run = runs[i % len(runs)]
            token = current_run.set(run)
            query = f"q{int(rng.paretovariate(0.8)) % 200}"
            asked = time.monotonic()
            (answer,) = await executor.arun(_asked("search", query=query))
            current_run.reset(token)
            seen, tenant, what = str(answer.content).split("|")
            wrong += (tenant, what) != (run.tenant, query)
            stale += asked - float(seen) >= seconds_to_live
        return {
            "calls run": float(ran),
            "share saved": 1 - ran / calls,
            "seconds": time.monotonic() - began,
            "stale": float(stale),
            "wrong tenant or query": float(wrong),
        }

    with_memo: list[dict[str, float]] = []
    without: list[dict[str, float]] = []
    for seed in range(repetitions):
        with_memo.append(asyncio.run(once([{"name": "memo", "ttl": seconds_to_live}], seed)))
        without.append(asyncio.run(once([], seed)))
    mine, spread = median_of(with_memo)
    base, _ = median_of(without)
    clean = all(r["stale"] == 0 and r["wrong tenant or query"] == 0 for r in with_memo)
    return Finding(
        policy="memo",
        mode="tools",
        aim="calls saved, none stale, none another tenant's",
        met=clean and mine["share saved"] > 0.2,
        figures={n: (mine[n], base[n]) for n in mine},
        spread=spread,
        note=f"{calls} searches of 12 workflows and 3 tenants, time to live {seconds_to_live:g} s",
    )


# -- speculation ------------------------------------------------------------------------------------------


class _Board(TypedDict, total=False):
    task: str
    plan: str
    verdict: str
    report: str


def _pipeline(script: Any, policies: Sequence[PolicySpec]) -> tuple[Any, ScriptedEngine]:
    """A planner; a critic that reads the task only; a writer that reads the verdict; an editor that reads the plan."""
    graph = AgentGraph(_Board)
    graph.add_agent(Agent("planner"), prompt=lambda s: s["task"], writes="plan")
    graph.add_agent(Agent("critic"), prompt=lambda s: "judge " + s["task"], writes="verdict")
    graph.add_agent(Agent("writer"), prompt=lambda s: f"{s['verdict']}: {s['task']}", writes="report")
    graph.set_entry_point("planner")
    graph.add_edge("planner", "critic")
    graph.add_edge("critic", "writer")
    graph.set_finish_point("writer")
    engine = ScriptedEngine(script)
    return graph.compile(engine=engine, policies=list(policies)), engine


def speculation(repetitions: int, quick: bool) -> Finding:
    """Three agents in a row, 30 ms a call; the critic's verdict is mostly the same word."""
    workflows = 15 if quick else 40

    async def once(policies: Sequence[PolicySpec], seed: int) -> dict[str, float]:
        rng = random.Random(seed)
        verdicts = {f"task {i}": rng.choices(["fine", f"no, because {i}"], [0.8, 0.2])[0] for i in range(workflows)}

        def script(call: Call) -> Answer:
            agent = call.at.agent
            task = engine.prompt(call).split("task ")[1].split("<")[0].strip()
            text = verdicts[f"task {task}"] if agent == "critic" else f"{agent} on {task}"
            return Answer(text=text, delay=0.03)

        app, engine = _pipeline(script, policies)
        times = []
        for i in range(workflows):
            began = time.monotonic()
            result = await app.arun({"task": f"task {i}"})
            times.append(time.monotonic() - began)
            assert result.outcome == "done"
        found: dict[str, float] = {
            "workflow ms": 1000 * statistics.median(times),
            "model calls": float(len(engine.calls)),
        }
        if policies:
            stats = app.handler.binding.guards.stats()["policies"]["speculation"]
            found |= {
                n: float(stats.get(n, 0)) for n in ("started", "taken", "wasted", "seconds_saved", "seconds_wasted")
            }
        return found

    mine, spread = median_of([asyncio.run(once(["speculation"], s)) for s in range(repetitions)])
    base, _ = median_of([asyncio.run(once([], s)) for s in range(repetitions)])
    saved = 1 - mine["workflow ms"] / base["workflow ms"]
    return Finding(
        policy="speculation",
        mode="tools",
        aim="workflows end sooner, and the calls thrown away are counted",
        met=saved > 0.1,
        figures={"time saved": (saved, None), **{n: (mine[n], base.get(n)) for n in mine}},
        spread=spread,
        note=f"{workflows} workflows of three calls, a scripted model of 30 ms; one verdict in five is a surprise",
    )


# -- safety -----------------------------------------------------------------------------------------------


def safety(repetitions: int, quick: bool) -> Finding:
    """An agent that calls the same tool for ever."""
    calls = 0

    def once(policies: Sequence[PolicySpec]) -> dict[str, float]:
        nonlocal calls
        calls = 0
        graph = AgentGraph(_Board)
        graph.add_agent(Agent("coder"), prompt=lambda s: s["task"], writes="plan")
        graph.add_agent(Agent("tester"), prompt=lambda s: s["plan"], writes="verdict")
        graph.set_entry_point("coder")
        graph.add_edge("coder", "tester")
        graph.add_edge("tester", "coder")
        engine = ScriptedEngine(lambda call: "again")
        app = graph.compile(engine=engine, policies=list(policies), max_steps=200)
        began = time.monotonic()
        result = app.run({"task": "x"})
        return {
            "model calls": float(len(engine.calls)),
            "tokens": float(result.usage.prompt_tokens + result.usage.completion_tokens),
            "stopped as limit": float(result.outcome == "limit"),
            "state kept": float(result.state.get("plan") == "again"),
            "seconds": time.monotonic() - began,
        }

    policy: PolicySpec = {"name": "safety", "repeats": 5, "workflow": {"tokens": 10_000}}
    mine, spread = median_of([once([policy]) for _ in range(repetitions)])
    base, _ = median_of([once([]) for _ in range(repetitions)])
    return Finding(
        policy="safety",
        mode="tools",
        aim="a loop ends early, typed, with the state so far",
        met=mine["model calls"] <= 12 and mine["stopped as limit"] == mine["state kept"] == 1.0,
        figures={n: (mine[n], base[n]) for n in mine},
        spread=spread,
        note="two agents that send each other the same for ever; without the policy the bound of 200 steps ends it",
    )


# -- hedging ----------------------------------------------------------------------------------------------


def hedging(repetitions: int, quick: bool) -> Finding:
    """A tool of 4 ms whose calls take 150 ms three times in a hundred."""
    calls = 300 if quick else 1_000

    async def once(policies: Sequence[PolicySpec], seed: int) -> dict[str, float]:
        rng = random.Random(seed)
        made = 0

        @tool(pure=True)
        async def fetch(n: int) -> str:
            """Fetch."""
            nonlocal made
            made += 1
            await asyncio.sleep(0.15 if rng.random() < 0.03 else rng.uniform(0.003, 0.005))
            return str(n)

        executor = ToolExecutor([fetch])
        run = WorkflowRun(ScriptedEngine([], policies=list(policies)), "w")
        token = current_run.set(run)
        times = []
        for i in range(calls):
            began = time.monotonic()
            (answer,) = await executor.arun(_asked("fetch", n=i))
            times.append(time.monotonic() - began)
            assert answer.content == str(i)
        current_run.reset(token)
        return {
            "p50 ms": 1000 * _percentile(times, 0.5),
            "p99 ms": 1000 * _percentile(times, 0.99),
            "calls made per call": made / calls,
        }

    mine, spread = median_of([asyncio.run(once(["hedging"], s)) for s in range(repetitions)])
    base, _ = median_of([asyncio.run(once([], s)) for s in range(repetitions)])
    return Finding(
        policy="hedging",
        mode="tools",
        aim="p99 at most half, at most a tenth more calls",
        met=mine["p99 ms"] <= 0.5 * base["p99 ms"] and mine["calls made per call"] <= 1.1,
        figures={n: (mine[n], base[n]) for n in mine},
        spread=spread,
        note=f"{calls} calls one after another, 3 % of them slow",
    )


# -- all of them ------------------------------------------------------------------------------------------


def together(repetitions: int, quick: bool) -> Finding:
    """What a step costs under all four, when none of them has anything to do."""
    workflows = 40 if quick else 150

    def app_of(policies: Sequence[PolicySpec]) -> Any:
        graph = AgentGraph(_Board)
        graph.add_agent(Agent("planner"), prompt=lambda s: s["task"], writes="plan")
        graph.add_agent(Agent("writer"), prompt=lambda s: s["plan"], writes="report")
        graph.set_entry_point("planner")
        graph.add_edge("planner", "writer")
        graph.set_finish_point("writer")
        engine = ScriptedEngine(lambda call: f"about {hash(tuple(call.token_ids))}")
        return graph.compile(engine=engine, policies=list(policies))

    async def once() -> tuple[dict[str, float], dict[str, float]]:
        apps = [app_of(["safety", "memo", "speculation", "hedging"]), app_of([])]
        wall: list[list[float]] = [[], []]
        cpu: list[list[float]] = [[], []]
        for i in range(workflows):  # by turns, so that the machine's mood falls on both
            for which, app in enumerate(apps):
                began, worked = time.perf_counter(), time.process_time()
                await app.arun({"task": f"task {i} " + "word " * 200})
                wall[which].append((time.perf_counter() - began) / 2)
                cpu[which].append((time.process_time() - worked) / 2)
        mine, base = (
            {"step ms": 1000 * statistics.median(w), "step, processor ms": 1000 * statistics.median(c)}
            for w, c in zip(wall, cpu, strict=True)
        )
        mine["added ms"] = mine["step ms"] - base["step ms"]
        return mine, base

    pairs = [asyncio.run(once()) for _ in range(repetitions)]
    mine, spread = median_of([a for a, _ in pairs])
    base, _ = median_of([b for _, b in pairs])
    return Finding(
        policy="safety+memo+speculation+hedging",
        mode="tools",
        aim="less than 1 ms a step",
        met=mine["added ms"] < 1.0,
        figures={n: (mine[n], base.get(n)) for n in mine},
        spread=spread,
        note=f"median of {workflows} workflows of two steps on a scripted model that answers at once",
    )


EXPERIMENTS = (
    Experiment(policy="memo", mode="tools", title="tool results from memory", run=memo),
    Experiment(policy="speculation", mode="tools", title="the next agent's call made early", run=speculation),
    Experiment(policy="safety", mode="tools", title="a loop is ended", run=safety),
    Experiment(policy="hedging", mode="tools", title="a second try for slow calls", run=hedging),
    Experiment(policy="together", mode="tools", title="what a step costs under all of them", run=together),
)
