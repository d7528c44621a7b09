"""``python -m examples.swebench``: fix bugs in small repositories, score the patches."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from agentflow.cli.engine_options import add_engine_options, open_engine
from agentflow.cli.output import Output
from agentflow.errors import AgentflowError, UsageError
from agentflow.report import AgentRow, agent_table
from examples.swebench.instance import Instance, load_file, load_own
from examples.swebench.run import Limits, Predictions, Solver, agents_solver, no_patch, oracle, predict, score
from examples.swebench.scoring import summarise

SOLVERS = ("agents", "oracle", "none")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.swebench",
        description="A planner, a coder and a tester fix bugs in small repositories, scored by SWE-bench's rule.",
        epilog="The coder's tools run real commands with your rights, in a throw-away folder: see README.md beside this"
        " file. Without --instances the tasks that come with the example are used.",
    )
    parser.add_argument("--tasks", type=int, metavar="N", help="the first N tasks (default: all)")
    parser.add_argument(
        "--instances", type=Path, metavar="FILE", help="tasks as JSON or JSON Lines in SWE-bench's format"
    )
    parser.add_argument(
        "--repos", type=Path, metavar="DIR", help="folder of git clones named owner__name, for --instances"
    )
    parser.add_argument("--solver", choices=SOLVERS, default="agents", help="who solves (default: agents)")
    parser.add_argument("--concurrency", type=int, default=3, metavar="K", help="tasks at once (default: 3)")
    parser.add_argument(
        "--attempts", type=int, default=2, metavar="A", help="the coder's attempts per task (default: 2)"
    )
    parser.add_argument("--rounds", type=int, default=8, metavar="R", help="rounds of tools per attempt (default: 8)")
    parser.add_argument("--task-seconds", type=int, default=900, metavar="S", help="time limit per task (default: 900)")
    parser.add_argument(
        "--predictions",
        type=Path,
        metavar="FILE",
        help="keep predictions in FILE (JSON Lines); a second run goes on there",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of tables")
    add_engine_options(parser)
    return parser


async def solve(args: argparse.Namespace) -> dict[str, Any]:
    """Solve and score the tasks that ``args`` ask for; the whole result, JSON-ready."""
    for name in ("tasks", "concurrency", "attempts", "rounds", "task_seconds"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if args.record is not None and args.solver != "agents":
        raise UsageError(f"--record records what an engine does; --solver {args.solver} runs none")
    instances = (load_file(args.instances) if args.instances else load_own())[: args.tasks]
    if not instances:
        raise UsageError("there is no task to solve")
    with contextlib.ExitStack() as stack:
        solver: Solver = oracle if args.solver == "oracle" else no_patch
        model = args.solver
        if args.solver == "agents":
            engine = stack.enter_context(open_engine(args))
            limits = Limits(attempts=args.attempts, rounds=args.rounds, task_seconds=args.task_seconds)
            solver, model = agents_solver(engine, limits, repos=args.repos), engine.model
        made = await predict(instances, solver, model=model, file=args.predictions, concurrency=args.concurrency)
    return await _scored(instances, made, model, args.concurrency)


async def _scored(instances: Sequence[Instance], made: Predictions, model: str, concurrency: int) -> dict[str, Any]:
    scorable = [i for i in instances if i.scorable]
    patches = {r["instance_id"]: r["model_patch"] or "" for r in made.batch.records}
    scores, errors = await score(scorable, patches, concurrency=concurrency)
    by_id = {s["instance_id"]: s for s in scores}
    rows = _sums(row for done in made.solved.values() for row in done.rows)
    return {
        "model": model,
        "scores": summarise(scores, total=len(scorable)),
        "not_scored": len(instances) - len(scorable),
        "agents": [row.to_json() for row in rows],
        "resumed": made.batch.resumed,
        "errors": {**made.batch.errors, **errors},
        "instances": [_row(i, made, by_id.get(i.instance_id), patches) for i in instances],
    }


def _row(
    instance: Instance, made: Predictions, scored: dict[str, Any] | None, patches: dict[str, str]
) -> dict[str, Any]:
    done = made.solved.get(instance.instance_id)
    return {
        "instance_id": instance.instance_id,
        "resolved": scored["resolved"] if scored else None,
        "why": scored["why"] if scored else "not scored here: use SWE-bench's own harness on the predictions",
        "attempts": done.attempts if done else 0,
        "stopped": done.stopped if done else "",
        "patch_lines": patches.get(instance.instance_id, "").count("\n"),
    }


def _sums(rows: Iterable[AgentRow]) -> list[AgentRow]:
    out: dict[str, AgentRow] = {}
    for row in rows:
        out.setdefault(row.agent, AgentRow(row.agent)).add(row)
    return list(out.values())


def task_table(result: dict[str, Any]) -> Table:
    """A row per task."""
    scores = result["scores"]
    title = f"Resolved {scores['resolved']} of {scores['tasks']} tasks (model: {result['model']})"
    table = Table(title=title, title_justify="left", pad_edge=False, box=SIMPLE_HEAD)
    for name in ("task", "resolved", "why", "attempts", "patch lines", "ended early"):
        table.add_column(name)
    for row in result["instances"]:
        resolved = {True: "yes", False: "no", None: "-"}[row["resolved"]]
        stopped = row["stopped"][:80]
        table.add_row(row["instance_id"], resolved, row["why"], str(row["attempts"]), str(row["patch_lines"]), stopped)
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit code. Tasks that ended in an error make it 1, unresolved ones do not."""
    args = build_parser().parse_args(argv)
    out = Output(as_json=args.json)
    try:
        result = asyncio.run(solve(args))
    except AgentflowError as error:
        kept = f" (finished tasks are kept in {args.predictions})" if args.predictions else ""
        out.error(error, " ".join(str(error).split()) + kept)
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        return 130
    out.show(task_table(result))
    if result["agents"]:
        out.show(agent_table([AgentRow(**row) for row in result["agents"]]))
    for name, message in result["errors"].items():
        out.show(f"{name} failed: {message}")
    out.result(result)
    return 1 if result["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
