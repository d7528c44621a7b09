"""Policies as they take part in comparisons: a label, and what the engine is told for a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from agentflow.bench.simulator.informed import informed
from agentflow.bench.traces.model import Trace
from agentflow.cache.policy import PolicySpec, policy_names

__all__ = ["Contender", "named", "pbkv_oracle", "with_options"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """``specs`` makes the policies for a trace. ``noise`` is an axis of rows; those with ``simulated_only`` are
    told things that cannot travel to an engine."""

    label: str
    specs: Callable[[Trace], list[PolicySpec]]
    noise: float | None = None
    simulated_only: bool = False

    @property
    def axes(self) -> dict[str, Any]:
        """What rows tell it by, beside its label."""
        return {} if self.noise is None else {"noise": self.noise}


def named(labels: Iterable[str]) -> list[Contender]:
    """Policies by name, ``a+b`` for the order (a, b); names that this version does not have are left out."""
    known = set(policy_names())
    return [
        Contender(label=label, specs=_informed(label.split("+")), simulated_only="belady" in label)
        for label in labels
        if known.issuperset(label.split("+"))
    ]


def with_options(label: str, policy: str, *, noise: float | None = None, **options: Any) -> Contender:
    """A policy with options; ``noise`` is one of them and an axis too."""
    if noise is not None:
        options["noise"] = noise
    spec: PolicySpec = {"name": policy, **options}
    return Contender(label=label, specs=lambda trace: informed([spec], trace), noise=noise)


def pbkv_oracle(label: str = "pbkv-oracle", policy: str = "pbkv") -> Contender:
    """PBKV told the true agents: what its rule reaches with perfect forecasts."""

    def specs(trace: Trace) -> list[PolicySpec]:
        futures = {w.id: [c.agent for c in w.calls] for w in trace.workflows}

        def future(workflow: str, calls: int) -> list[str]:
            return futures.get(workflow, [])[calls:]

        return [{"name": policy, "backbone": "oracle", "predictor": {"future": future}, "trust": False}]

    return Contender(label=label, specs=specs, simulated_only=True)


def _informed(names: list[str]) -> Callable[[Trace], list[PolicySpec]]:
    return lambda trace: informed(names, trace)
