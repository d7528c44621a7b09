"""How fast the simulator is: ``python -m agentflow.bench.simulator.speed``.

Simulates workflows whose two agents share a task and read their own growing history, under a pool that holds
about a third of what the live workflows could use, on one core.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import sys
import time
from collections.abc import Sequence

from agentflow.bench.simulator.config import Arrivals, EngineSpec
from agentflow.bench.simulator.cost import RooflineCost
from agentflow.bench.simulator.run import simulate
from agentflow.bench.traces.model import Span, Trace, TraceCall, TraceTool, TraceWorkflow

__all__ = ["load", "main"]


def load(workflows: int, calls: int, seed: int = 0) -> Trace:
    """Workflows of ``calls`` calls each by two agents in turns, with a tool before each call but the first."""
    rng = random.Random(seed)
    out = []
    for w in range(workflows):
        task = Span(f"{w}/task", rng.randint(200, 800))
        history: dict[str, tuple[Span, ...]] = {"planner": (), "coder": ()}
        made = []
        for c in range(calls):
            agent = "coder" if c % 4 else "planner"
            read = Span(f"{w}/{c}/read", rng.randint(50, 600))
            wrote = Span(f"{w}/{c}/wrote", rng.randint(20, 300))
            wait = rng.expovariate(0.5) if c else 0.0
            made.append(
                TraceCall(
                    id=str(c),
                    agent=agent,
                    prompt=(Span(agent, 600), task, *history[agent], read),
                    output=(wrote,),
                    wait_for=(str(c - 1),) if c else (),
                    delay=wait,
                    tools=(TraceTool(name="bash", duration=wait),) if c else (),
                )
            )
            history[agent] += (read, wrote)
        out.append(TraceWorkflow(id=str(w), calls=tuple(made)))
    return Trace(name="speed", workflows=tuple(out), edges={"planner": ("coder",), "coder": ("coder", "planner")})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 1 when ``--within`` seconds were not enough."""
    parser = argparse.ArgumentParser(prog="python -m agentflow.bench.simulator.speed", description=__doc__)
    parser.add_argument("--workflows", type=int, default=10_000)
    parser.add_argument("--calls", type=int, default=20, help="calls of each workflow")
    parser.add_argument("--policies", default="lru,lifecycle")
    parser.add_argument("--pool", type=int, default=120_000, help="device pool in tokens")
    parser.add_argument("--host", type=int, default=0, help="host tier in tokens")
    parser.add_argument("--concurrency", type=int, default=40, help="workflows at once")
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--within", type=float, help="fail when a policy needs more seconds than this")
    options = parser.parse_args(arguments)
    trace = load(options.workflows, options.calls)
    spec = EngineSpec(pool_tokens=options.pool, host_tokens=options.host)
    cost = RooflineCost.of("qwen3-14b", "h100")
    slowest = 0.0
    for policy in options.policies.split(","):
        began = time.process_time()
        result = simulate(
            trace,
            spec,
            cost,
            [policy],
            arrivals=Arrivals(kind="closed", concurrency=options.concurrency),
            engines=options.engines,
        )
        seconds = time.process_time() - began
        slowest = max(slowest, seconds)
        row = {
            "policy": policy,
            "workflows": len(result.workflows),
            "calls": len(result.calls),
            "cpu_seconds": round(seconds, 2),
            "calls_per_second": round(len(result.calls) / seconds),
            "simulated_seconds": round(result.seconds, 1),
            "hit_rate": round(result.hit_rate, 4),
            "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        }
        sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()
    return int(options.within is not None and slowest > options.within)


if __name__ == "__main__":
    sys.exit(main())
