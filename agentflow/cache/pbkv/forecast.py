"""What a predictor of agents is, whatever stands behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["END", "Hidden", "Predictor", "Steps", "agent_values", "check_steps"]

#: The name under which a forecast holds the probability that the workflow is over.
END = ""
#: ``steps[k]`` maps each agent (and :data:`END`) to the probability that step ``k + 1`` from now is it.
Steps = tuple[Mapping[str, float], ...]
#: A hidden state of the model, of its hidden size.
Hidden = npt.NDArray[np.float32]


class Predictor(Protocol):
    """Forecasts the next agents of a workflow from the agents so far.

    ``learn`` takes one transition as it happens; ``forecast`` gives, in one pass, ``horizon`` distributions, each
    summing to 1 over agents and :data:`END`. Once over, a workflow stays over: END never falls with k.
    """

    name: ClassVar[str]

    def learn(self, path: Sequence[str], following: str) -> None:
        """After the agents ``path`` came ``following``, which is :data:`END` when the workflow was over."""
        ...

    def prior(self, agent: str, following: Sequence[str]) -> None:
        """The graph lets the agents ``following`` come after ``agent``, as far as it is known before any run."""
        ...

    def sized(self, agent: str, prompt: int, output: int) -> None:
        """A call of the agent read ``prompt`` tokens and wrote ``output``."""
        ...

    def forecast(self, path: Sequence[str], horizon: int, *, workflow: str = "", hidden: Hidden | None = None) -> Steps:
        """Distributions of the next ``horizon`` steps of ``workflow``. ``hidden`` is the hidden state of the last
        prefilled token, where the engine gives one and the predictor wants it."""
        ...


def agent_values(steps: Steps, gamma: float) -> dict[str, float]:
    """Sum over k of gamma^(k-1) * p^(k)(agent): what a touch by each agent within the horizon is worth.

    With p^(k)(a) = s^(k) * P^(k)(a), survival times the probability given survival, as a predictor gives them.
    """
    values: dict[str, float] = {}
    weight = 1.0
    for step in steps:
        for agent, p in step.items():
            if agent != END:
                values[agent] = values.get(agent, 0.0) + weight * p
        weight *= gamma
    return values


def check_steps(steps: Steps, horizon: int) -> Steps:
    """The steps, if they are distributions; else raises :class:`ValueError`."""
    if len(steps) != horizon:
        raise ValueError(f"{len(steps)} steps forecast, {horizon} wanted")
    for step in steps:
        total = sum(step.values())
        if not (abs(total - 1.0) < 1e-3 and all(p >= 0.0 for p in step.values())):
            raise ValueError(f"a step's probabilities sum to {total}")
    return steps
