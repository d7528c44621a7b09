"""Runs on the real engine: one engine for a whole comparison, memory and policies changed between replays."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from agentflow.bench.comparisons.contenders import Contender
from agentflow.bench.comparisons.loads import Load
from agentflow.bench.comparisons.measure import Run, measured
from agentflow.bench.comparisons.model import Options
from agentflow.bench.replay import replay
from agentflow.bench.simulator.result import SimResult
from agentflow.bench.traces.model import Trace
from agentflow.bench.traces.spans import SpanTokens
from agentflow.engine.base import Engine
from agentflow.errors import EngineFailure, UsageError

__all__ = ["COMPUTING", "TINY", "BenchModel", "RealBench", "open_bench", "rotated", "sweep_real"]


class BenchModel(NamedTuple):
    """A random model to measure on; ``first_id`` and ``end_id`` bound the ids of made-up text."""

    layers: int
    hidden_size: int
    vocab_size: int | None
    first_id: int
    end_id: int

    def __str__(self) -> str:
        return f"random Llama of {self.layers} layers of {self.hidden_size} on the CPU"


#: Passes cost next to nothing but SGLang's own work for them: where hit rates are asked for.
TINY = BenchModel(2, 64, None, 1_000, 30_000)
#: Prompts take time, as they do on large models, and its small vocabulary leaves little to the head: where latency is
#: asked for.
COMPUTING = BenchModel(6, 384, 4_096, 100, 4_000)
#: A host tier of so many tokens is none.
NO_HOST = 1


@contextlib.contextmanager
def open_bench(
    options: Options,
    pool_tokens: int,
    host_ratio: float = 0.0,
    *,
    max_running: int | None = None,
    model: BenchModel = TINY,
) -> Iterator[RealBench]:
    """An engine on a random model with room for ``pool_tokens``, closed at the end.

    It runs ``max_running`` calls at once, None for as many as SGLang wants. ``options.engine_factory`` makes another
    one.
    """
    options.say("starting the engine")
    if options.engine_factory is not None:
        opened = options.engine_factory(pool_tokens, host_ratio)
    else:
        from agentflow.engine.embedded import EmbeddedEngine
        from agentflow.engine.models import random_model

        bound: dict[str, Any] = {} if max_running is None else {"max_running_requests": max_running}
        folder = random_model(layers=model.layers, hidden_size=model.hidden_size, vocab_size=model.vocab_size)
        opened = EmbeddedEngine(folder.path, max_total_tokens=pool_tokens, host_ratio=host_ratio, **bound)
    with opened as engine:
        yield RealBench(engine=engine, has_host=host_ratio > 0, say=options.say, model=model)


@dataclass(slots=True)
class RealBench:
    """Replays on one engine. Made-up token ids are kept, so that all policies see the same ones."""

    engine: Engine
    has_host: bool
    say: Any
    model: BenchModel = TINY
    _tokens: dict[int, tuple[Trace, SpanTokens]] = field(default_factory=dict)

    def control(self, action: str, data: Mapping[str, Any]) -> Any:
        """A control request to the engine's scheduler."""
        return cast(Any, self.engine).control(action, dict(data))

    def configure(self, policies: Sequence[Any], pool_tokens: int, host_tokens: int = 0) -> None:
        """Empty the cache, and give it these policies and this memory."""
        self.engine.flush()
        settings: dict[str, Any] = {"policies": list(policies), "reset": True, "device_tokens": pool_tokens}
        if self.has_host:
            settings["host_tokens"] = host_tokens or NO_HOST
        elif host_tokens:
            raise UsageError("this engine was started without a host tier")
        self.control("configure", settings)

    def run(
        self, trace: Trace, load: Load, contender: Contender, pool_tokens: int, host_tokens: int = 0, seed: int = 0
    ) -> SimResult:
        """Replay a trace. Raises EngineFailure when the cache's bookkeeping is not sound afterwards."""
        self.configure(contender.specs(trace), pool_tokens, host_tokens)
        result = replay(
            trace,
            self.engine,
            arrivals=load.arrivals(),
            seed=seed,
            tokens=self.tokens(trace),
            policy=contender.label,
        )
        self.check(contender.label)
        return result

    def check(self, policies: Any) -> None:
        """Raises EngineFailure when the cache's bookkeeping is not sound after a replay under ``policies``."""
        problems = [p for rank in self.control("check", {}) for p in rank["problems"]]
        if problems:
            raise EngineFailure(f"after a replay with {policies} the cache is not sound: {'; '.join(problems)}")

    def tokens(self, trace: Trace) -> SpanTokens:
        """Token ids of the trace's spans."""
        known = self._tokens.get(id(trace))
        if known is None:
            known = self._tokens[id(trace)] = (
                trace,
                SpanTokens(trace, low=self.model.first_id, high=self.model.end_id),
            )
        return known[1]


def rotated(contenders: Sequence[Contender], by: int) -> list[Contender]:
    """The contenders, beginning elsewhere, so that no one always runs first."""
    by %= max(1, len(contenders))
    return [*contenders[by:], *contenders[:by]]


def sweep_real(
    options: Options,
    bench: RealBench,
    load: Load,
    contenders: Sequence[Contender],
    pool_tokens: int,
    pressure: float,
    *,
    repetitions: int,
    host_tokens: int = 0,
    axes: Mapping[str, Any] | None = None,
) -> list[Run]:
    """Every contender on the same memory and the same calls, ``repetitions`` times, in changing order."""
    trace = load.trace(0)
    taking_part = [c for c in contenders if not c.simulated_only]
    order = {c.label: i for i, c in enumerate(taking_part)}
    runs = []
    for repetition in range(repetitions):
        for contender in rotated(taking_part, repetition):
            options.say(f"{load.name}, pressure {pressure:g}, {contender.label}, repetition {repetition + 1}")
            result = bench.run(trace, load, contender, pool_tokens, host_tokens, seed=repetition)
            runs.append(
                measured(
                    trace,
                    result,
                    load=load.name,
                    policy=contender.label,
                    pressure=pressure,
                    repetition=repetition,
                    pool_tokens=pool_tokens,
                    host_tokens=host_tokens,
                    mode="engine",
                    axes={**(axes or {}), **contender.axes},
                )
            )
    return sorted(runs, key=lambda r: (r.repetition, order[r.policy]))
