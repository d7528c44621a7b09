"""Runs the experiments: those with tools and the simulator by default, those on a real engine where asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from agentflow.bench.comparisons.model import Options
from agentflow.bench.comparisons.real import COMPUTING, RealBench, open_bench
from agentflow.bench.policies import framework, scheduler
from agentflow.bench.policies.model import Experiment, Finding
from agentflow.bench.replay import replay
from agentflow.bench.simulator import Arrivals
from agentflow.bench.simulator.result import SimResult
from agentflow.bench.traces.model import Trace
from agentflow.cache.policy import PolicySpec
from agentflow.errors import UsageError

__all__ = ["EXPERIMENTS", "run_experiments"]

EXPERIMENTS: tuple[Experiment, ...] = (*framework.EXPERIMENTS, *scheduler.EXPERIMENTS)
POLICIES = tuple(dict.fromkeys(e.policy for e in EXPERIMENTS))
#: KV pool of the real engine in tokens, and the calls that it runs at once: so few that others wait.
POOL, RUNNING = 12_000, 2


def run_experiments(
    *,
    engine: bool = False,
    quick: bool = False,
    repetitions: int | None = None,
    only: Sequence[str] = (),
    say: Callable[[str], None] = lambda _: None,
) -> list[Finding]:
    """Findings in order. ``engine`` runs those of the scheduler, and the adapters', on real engines.

    Raises UsageError when ``only`` names a policy that has no experiment there.
    """
    times = repetitions or (1 if quick else 5)
    known = list(dict.fromkeys([e.policy for e in scheduler.EXPERIMENTS] + ["adapters"] if engine else POLICIES))
    if unknown := [name for name in only if name not in known]:
        raise UsageError(f"no experiment with {', '.join(unknown)} here; there are {', '.join(known)}")

    def run(experiments: Sequence[Experiment], where: str = "") -> list[Finding]:
        found = []
        for each in experiments:
            if not only or each.policy in only:
                say(f"{each.policy}{where}: {each.title}")
                found.append(each.run(times, quick))
        return found

    if not engine:
        return run(EXPERIMENTS)
    found: list[Finding] = []
    if not only or set(only) - {"adapters"}:
        with open_bench(Options(mode="engine", say=say), POOL, max_running=RUNNING, model=COMPUTING) as bench:
            found += run(scheduler.on_engine(_served(bench)), " on the engine")
    if not only or "adapters" in only:
        from agentflow.bench.policies.adapters import adapters

        say("adapters on the engine: preloading")
        found.append(adapters(times, quick))
    return found


def _served(bench: RealBench) -> scheduler.Serve:
    def serve(trace: Trace, policies: Sequence[PolicySpec], pool: int, arrivals: Arrivals, seed: int) -> SimResult:
        bench.configure(policies, min(pool, POOL))
        result = replay(trace, bench.engine, arrivals=arrivals, seed=seed, tokens=bench.tokens(trace))
        bench.check(policies)
        return result

    return serve
