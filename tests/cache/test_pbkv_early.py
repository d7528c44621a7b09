"""Calls that are made before their agent is reached, as PBKV counts them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from agentflow.cache.ledger import EARLY
from agentflow.cache.policy import Prefilled
from agentflow.events import AgentStarted, StateSuperseded

Make = Callable[..., Any]


@pytest.fixture
def driven(drive: Make) -> Any:
    return drive({"name": "pbkv-he", "trust": False})


def begin(driven: Any, workflow: str, agent: str) -> None:
    driven.event(AgentStarted(workflow=workflow, agent=agent))


def give_up(driven: Any, workflow: str, agent: str) -> None:
    driven.event(StateSuperseded(workflow=workflow, agent=agent, branch=EARLY))


def learned(driven: Any, agent: str) -> Any:
    return driven.policy.predictor.forecast([agent], 1)[0]


def test_a_call_that_is_given_up_is_no_step(driven: Any) -> None:
    for i in range(5):
        w = f"w{i}"
        begin(driven, w, "a")
        for agent in ("a", "b") if i % 2 else ("b", "a"):  # it may even come before the first call of all
            driven.run(w, agent, branch=EARLY if agent == "b" else None)
        give_up(driven, w, "b")
        begin(driven, w, "c")
        driven.run(w, "c")
        driven.end(w)
    assert learned(driven, "a") == {"c": 1.0}
    assert learned(driven, "c") == {"": 1.0}


def test_a_call_that_is_used_is_the_first_step_of_its_agent(driven: Any) -> None:
    for i in range(5):
        w = f"w{i}"
        begin(driven, w, "a")
        driven.run(w, "a")
        early = driven.run(w, "b", branch=EARLY)
        driven.runtime.observe(Prefilled(early.id, early.call, np.zeros(2, np.float32)))
        begin(driven, w, "b")
        assert list(driven.policy._paths[w].agents) == ["a", "b"]
        driven.run(w, "b")  # its second call
        driven.end(w)
    assert learned(driven, "a") == {"b": 1.0}
    assert learned(driven, "b") == {"b": 0.5, "": 0.5}


def test_an_agent_that_is_reached_and_asks_something_else_makes_one_step(driven: Any) -> None:
    for i in range(5):
        w = f"w{i}"
        driven.run(w, "a")
        driven.run(w, "b", branch=EARLY)
        begin(driven, w, "b")
        give_up(driven, w, "b")
        driven.run(w, "b")
        driven.end(w)
    assert learned(driven, "a") == {"b": 1.0}
    assert learned(driven, "b") == {"": 1.0}
