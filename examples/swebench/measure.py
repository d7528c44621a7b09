"""``python -m examples.swebench.measure``: the agents with their real tools, the same work under several policies.

What the agents say is directed (a model that fits a CPU solves too few of the tasks), token by token on the real
engine; the graph, its tools and their durations are real. The pool is so small that the agents' contexts do not fit
into it together.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from agentflow.bench.directed import Directed
from agentflow.cli.output import Output
from agentflow.engine.base import Call, Completion, Engine
from agentflow.engine.scripted import ScriptedEngine, tool_call
from agentflow.errors import AgentflowError, EngineFailure, UsageError
from examples.swebench.instance import Instance, load_own
from examples.swebench.run import Limits, agents_solver, predict

__all__ = ["Figures", "compare", "main", "measure"]

POLICIES = ("lru", "ttl", "lifecycle+ttl")
#: Of the tokens that the workflows at once use at their ends, so many have room.
SHARE = 0.4
ACCEPT = '{"decision": "accept", "feedback": "good"}'
REVISE = '{"decision": "revise", "feedback": "the bug is still there"}'


@dataclass(slots=True)
class Figures:
    """One run: seconds from a task's first call to the end of its last, the share of prompts that was cached, seconds
    of the whole run, and tokens of the longest task."""

    completion: float
    hit_rate: float
    seconds: float
    longest: int


class Watched(Directed):
    """Notes when each workflow's calls began and ended, and what they found cached."""

    def __init__(self, engine: Engine, script: ScriptedEngine) -> None:
        super().__init__(engine, script)
        self.began: dict[str, float] = {}
        self.ended: dict[str, float] = {}
        self.tokens: Counter[str] = Counter()
        self.prompts = self.cached = 0

    async def agenerate(self, call: Call) -> Completion:
        self.began.setdefault(str(call.at.workflow), time.perf_counter())
        return await super().agenerate(call)

    def noted(self, call: Call, completion: Completion) -> None:
        workflow, usage = str(call.at.workflow), completion.usage
        self.ended[workflow] = time.perf_counter()
        self.prompts += usage.prompt_tokens
        self.cached += usage.cached
        self.tokens[workflow] += usage.prompt_tokens - usage.cached + usage.completion_tokens


def directions(tasks: Sequence[Instance]) -> ScriptedEngine:
    """What the agents say: the coder looks around and runs the tests, is sent back once, and then mends the bug."""
    fixes = {f"swebench-{t.instance_id}": t.source.parent / "fix.patch" for t in tasks if t.source is not None}
    turns: Counter[tuple[str | None, str | None]] = Counter()

    def coder(call: Call) -> Any:
        said = (
            tool_call("bash", command="ls -R"),
            tool_call("bash", command="head -n 60 */*.py"),
            tool_call("bash", command="python -m pytest -q"),
            "I looked at it.",
            tool_call("bash", command=f"git apply {fixes[str(call.at.workflow)]}"),
            tool_call("bash", command="python -m pytest -q"),
            "Mended.",
        )
        return said[_turn(call)]

    def _turn(call: Call) -> int:
        turns[call.at.workflow, call.at.agent] += 1
        return turns[call.at.workflow, call.at.agent] - 1

    return ScriptedEngine(
        {
            "planner": lambda call: "Read the tests, then mend the function that they name.",
            "coder": coder,
            "tester": lambda call: (REVISE, ACCEPT)[_turn(call)],
        }
    )


def measure(engine: Any, policies: Sequence[str], pool: int, tasks: Sequence[Instance], concurrency: int) -> Figures:
    """One run of all tasks on an empty cache with room for ``pool`` tokens. Raises EngineFailure when a task failed or
    the cache is not sound afterwards."""
    engine.flush()
    engine.control("configure", {"policies": list(policies), "reset": True, "device_tokens": pool})
    watched = Watched(engine, directions(tasks))
    begun = time.perf_counter()
    made = asyncio.run(predict(tasks, agents_solver(watched, Limits()), model="directed", concurrency=concurrency))
    seconds = time.perf_counter() - begun
    unsolved = [r["instance_id"] for r in made.batch.records if "+" not in r["model_patch"]]
    problems = [p for rank in engine.control("check") for p in rank["problems"]]
    if made.batch.errors or unsolved or problems:
        raise EngineFailure(f"the run is no good: {made.batch.errors or ''} {unsolved or ''} {problems or ''}")
    return Figures(
        completion=statistics.fmean(watched.ended[w] - watched.began[w] for w in watched.ended),
        hit_rate=watched.cached / watched.prompts,
        seconds=seconds,
        longest=max(watched.tokens.values()),
    )


def compare(
    engine: Any, most: int, *, policies: Sequence[str], concurrencies: Sequence[int], repetitions: int, say: Any
) -> list[dict[str, Any]]:
    """Every policy at every concurrency, ``repetitions`` times, in changing order; a row each with medians."""
    own = load_own()
    tasks = [replace(own[i % len(own)], instance_id=f"{own[i % len(own)].instance_id}-{i}") for i in range(most)]
    say("what one task uses")
    alone = measure(engine, ["lru"], engine.stats().device_total, tasks[: len(own)], 1)
    rows = []
    for concurrency in concurrencies:
        pool = round(max(1.2 * alone.longest, SHARE * concurrency * alone.longest))
        found: dict[str, list[Figures]] = {p: [] for p in policies}
        for repetition in range(repetitions):
            for name in (*policies[repetition % len(policies) :], *policies[: repetition % len(policies)]):
                say(f"{concurrency} at once, {name}, repetition {repetition + 1}")
                found[name].append(measure(engine, name.split("+"), pool, tasks, concurrency))
        for name, runs in found.items():
            rows.append(_row(name, concurrency, pool, runs, found[policies[0]]))
    return rows


def _row(name: str, concurrency: int, pool: int, runs: list[Figures], base: list[Figures]) -> dict[str, Any]:
    times = [r.completion for r in runs]
    ratios = [b.completion / r.completion for b, r in zip(base, runs, strict=True)]
    return {
        "concurrency": concurrency,
        "pool_tokens": pool,
        "policy": name,
        "repetitions": len(runs),
        "completion": statistics.median(times),
        "completion_range": [min(times), max(times)],
        "speed": statistics.median(ratios),
        "speed_range": [min(ratios), max(ratios)],
        "hit_rate": statistics.median(r.hit_rate for r in runs),
        "seconds": statistics.median(r.seconds for r in runs),
    }


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """A row per concurrency and policy."""
    out = Table(title="Mean completion of a task, medians", title_justify="left", pad_edge=False, box=SIMPLE_HEAD)
    for head in ("at once", "pool", "policy", "completion s", f"against {rows[0]['policy']}", "hit rate", "runs"):
        out.add_column(head)
    for r in rows:
        out.add_row(
            str(r["concurrency"]),
            str(r["pool_tokens"]),
            r["policy"],
            "{:.2f} ({:.2f}-{:.2f})".format(r["completion"], *r["completion_range"]),
            "{:.2f}x ({:.2f}-{:.2f})".format(r["speed"], *r["speed_range"]),
            f"{r['hit_rate']:.1%}",
            str(r["repetitions"]),
        )
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m examples.swebench.measure", description=__doc__)
    parser.add_argument(
        "--policy", action="append", metavar="NAMES", help="policies joined by +; the first is the base"
    )
    parser.add_argument("--concurrency", type=int, action="append", metavar="K", help="tasks at once (default: 3, 6)")
    parser.add_argument("--tasks", type=int, default=6, metavar="N", help="tasks of a run (default: 6)")
    parser.add_argument("--repetitions", type=int, default=5, metavar="N", help="runs of each (default: 5)")
    parser.add_argument("--layers", type=int, default=4, help="of the random model (default: 4)")
    parser.add_argument("--hidden-size", type=int, default=256, help="of the random model (default: 256)")
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of the table")
    args = parser.parse_args(argv)
    out = Output(as_json=args.json)
    try:
        if min(args.tasks, args.repetitions, *(args.concurrency or [1])) < 1:
            raise UsageError("--tasks, --repetitions and --concurrency must be at least 1")
        from agentflow.engine.embedded import EmbeddedEngine
        from agentflow.engine.models import random_model

        model = random_model(layers=args.layers, hidden_size=args.hidden_size)
        with EmbeddedEngine(model.path, max_total_tokens=60_000, host_ratio=0.0, max_running_requests=3) as engine:
            rows = compare(
                engine,
                args.tasks,
                policies=args.policy or POLICIES,
                concurrencies=args.concurrency or (3, 6),
                repetitions=args.repetitions,
                say=out.note,
            )
    except AgentflowError as error:
        out.error(error, " ".join(str(error).split()))
        return 2 if isinstance(error, UsageError) else 1
    out.show(table(rows))
    out.result({"rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
