"""Runs the experiments: those with tools and the simulator by default, those on a real engine where asked."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from agentflow.bench.policies import framework, scheduler
from agentflow.bench.policies.model import Experiment, Finding
from agentflow.bench.replay import replay
from agentflow.bench.simulator import Arrivals
from agentflow.bench.simulator.result import SimResult
from agentflow.bench.traces.model import Trace
from agentflow.bench.traces.spans import SpanTokens
from agentflow.cache.policy import PolicySpec
from agentflow.errors import EngineFailure

__all__ = ["EXPERIMENTS", "run_experiments"]

EXPERIMENTS: tuple[Experiment, ...] = (*framework.EXPERIMENTS, *scheduler.EXPERIMENTS)
#: KV pool of the real engine, in tokens.
POOL = 12_000


def run_experiments(
    *,
    engine: bool = False,
    quick: bool = False,
    repetitions: int | None = None,
    only: Sequence[str] = (),
    say: Callable[[str], None] = lambda _: None,
    engine_factory: Callable[[int], Any] | None = None,
) -> list[Finding]:
    """Findings in order. ``engine`` runs those of the scheduler, and the adapters', on real engines."""
    times = repetitions or (1 if quick else 5)
    found: list[Finding] = []
    if not engine:
        for each in EXPERIMENTS:
            if not only or each.policy in only:
                say(f"{each.policy}: {each.title}")
                found.append(each.run(times, quick))
        return found
    with _opened(engine_factory) as opened:
        for each in scheduler.on_engine(_Serve(opened)):
            if not only or each.policy in only:
                say(f"{each.policy} on the engine: {each.title}")
                found.append(each.run(times, quick))
    if not only or "adapters" in only:
        from agentflow.bench.policies.adapters import adapters

        say("adapters on the engine: preloading")
        found.append(adapters(times, quick))
    return found


class _Serve:
    """Replays on one engine; fails when the cache's bookkeeping is not sound afterwards."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self._tokens: tuple[Trace, SpanTokens] | None = None

    def __call__(
        self, trace: Trace, policies: Sequence[PolicySpec], pool: int, arrivals: Arrivals, seed: int
    ) -> SimResult:
        self.engine.flush()
        self.engine.control("configure", {"policies": list(policies), "reset": True, "device_tokens": min(pool, POOL)})
        if self._tokens is None or self._tokens[0] is not trace:
            self._tokens = (trace, SpanTokens(trace, low=1_000, high=30_000))
        result = replay(trace, self.engine, arrivals=arrivals, seed=seed, tokens=self._tokens[1])
        problems = [p for rank in self.engine.control("check") for p in rank["problems"]]
        if problems:
            raise EngineFailure(f"after a replay the cache is not sound: {'; '.join(problems)}")
        return result


@contextlib.contextmanager
def _opened(factory: Callable[[int], Any] | None) -> Iterator[Any]:
    if factory is not None:
        with factory(POOL) as engine:
            yield engine
        return
    from agentflow.engine.embedded import EmbeddedEngine
    from agentflow.engine.models import random_model

    with EmbeddedEngine(random_model().path, max_total_tokens=POOL, host_ratio=0.0) as engine:
        yield engine
