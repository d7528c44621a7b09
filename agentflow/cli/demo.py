"""Run a planner, a coder and a tester on an embedded engine, several workflows at once.

The agents write small formulas; a tool checks them. The KV pool is too small for all the workflows, so the cache must
decide what to drop. At the end a table per agent shows how many prompt tokens came from the cache, and another one
what was dropped and why. The built-in model is tiny and gets most formulas wrong: what is shown is the road, with
true results. The first run makes the model's folder, which takes half a minute.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import TYPE_CHECKING, Any

from agentflow.cli._command import Command
from agentflow.cli.engine_options import add_engine_options, open_engine
from agentflow.cli.output import Output
from agentflow.errors import UsageError

if TYPE_CHECKING:
    from agentflow.engine.base import Engine
    from agentflow.graph import AgentApp, RunResult

__all__ = ["COMMAND", "run_demo"]

#: KV pool in tokens: room for the calls that run at once, not for all that the workflows have computed.
POOL_TOKENS = 1024


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this command's options."""
    parser.add_argument("--workflows", type=int, default=6, metavar="N", help="workflows in all (default: 6)")
    parser.add_argument("--concurrency", type=int, default=3, metavar="K", help="workflows at once (default: 3)")
    add_engine_options(parser)


def run(args: argparse.Namespace, out: Output) -> int:
    """Run the demo and show what came of it."""
    for name in ("workflows", "concurrency"):
        if getattr(args, name) < 1:
            raise UsageError(f"--{name} must be at least 1, got {getattr(args, name)}")
    started = time.perf_counter()
    with open_engine(args, pool_tokens=POOL_TOKENS) as engine:
        ready = time.perf_counter()
        result = asyncio.run(run_demo(engine, workflows=args.workflows, concurrency=args.concurrency, out=out))
    result["seconds"] = {"start": round(ready - started, 1), "work": round(time.perf_counter() - ready, 1)}
    _show(result, out)
    out.result(result)
    return 1 if result["errors"] else 0


async def run_demo(engine: Engine, *, workflows: int = 6, concurrency: int = 3, out: Output) -> dict[str, Any]:
    """Run ``workflows`` tasks on ``engine``; returns results, agents' sums and the cache's decisions, JSON-ready."""
    from agentflow.cli._demo_graph import TASKS, Task, build_graph
    from agentflow.cli._live import Watch
    from agentflow.report import agent_rows, decision_rows

    app = build_graph().compile(engine=engine, name="demo")
    slots = asyncio.Semaphore(concurrency)
    tasks = [(f"{TASKS[i % len(TASKS)].name}-{i + 1}", TASKS[i % len(TASKS)]) for i in range(workflows)]
    with Watch(out.side, enabled=out.live) as watch:

        async def one(workflow: str, task: Task) -> RunResult:
            async with slots:
                with watch.following(workflow, task.text) as handler:
                    return await _solve(app, workflow, task, handler)

        results = await asyncio.gather(*(one(workflow, task) for workflow, task in tasks))
    await engine.aflush()
    decisions = await asyncio.to_thread(engine.decisions)
    stats = await engine.astats()
    return {
        "model": engine.model,
        "tasks": [_outcome(w, task, r) for (w, task), r in zip(tasks, results, strict=True)],
        "solved": sum(bool(r.state.get("solved")) for r in results),
        "errors": {w: _first_line(r.error) for (w, _), r in zip(tasks, results, strict=True) if r.error is not None},
        "agents": [row.to_json() for row in agent_rows([r.agents for r in results])],
        "cache": {
            "policy": stats.policy,
            "pool_tokens": stats.device_total,
            "host_tokens": stats.host_total,
            "decisions_by_reason": decision_rows(decisions),
        },
        "decisions": [d.to_json() for d in decisions],
    }


async def _solve(app: AgentApp, workflow: str, task: Any, handler: Any) -> RunResult:
    given = {"task": task.text, "cases": [list(case) for case in task.cases]}
    return await app.arun(given, {"callbacks": [handler]}, workflow_id=workflow)


def _outcome(workflow: str, task: Any, result: RunResult) -> dict[str, Any]:
    state = result.state
    return {
        "workflow": workflow,
        "task": task.text,
        "formula": state.get("formula"),
        "attempts": len(state.get("attempts", ())),
        "solved": bool(state.get("solved")),
        "outcome": result.outcome,
    }


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _show(result: dict[str, Any], out: Output) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from agentflow.report import AgentRow, agent_table, decision_table

    tasks = Table(title="Workflows", title_justify="left", pad_edge=False, box=SIMPLE_HEAD)
    for name in ("workflow", "task", "formula", "tries", "result"):
        tasks.add_column(name)
    for t in result["tasks"]:
        came_of = "right" if t["solved"] else "wrong" if t["outcome"] == "done" else t["outcome"]
        tasks.add_row(t["workflow"], t["task"], t["formula"] or "", str(t["attempts"]), came_of)
    cache = result["cache"]
    out.show(tasks, agent_table([AgentRow(**row) for row in result["agents"]]))
    if cache["decisions_by_reason"]:
        out.show(decision_table(cache["decisions_by_reason"]))
    else:
        out.show("The cache had nothing to decide.")
    out.show(
        f"{result['solved']} of {len(result['tasks'])} formulas are right ({result['model']});"
        f" KV pool {cache['pool_tokens']} tokens, host tier {cache['host_tokens']};"
        f" start {result['seconds']['start']:.0f} s, work {result['seconds']['work']:.0f} s"
    )
    for workflow, message in result["errors"].items():
        out.show(f"{workflow} failed: {message}")


COMMAND = Command(
    name="demo",
    help="see a team of agents run on an embedded engine",
    description=__doc__ or "",
    configure=configure,
    run=run,
)
