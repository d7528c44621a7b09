"""Safety's options, and its accounts."""

from __future__ import annotations

import math
from typing import Any

import pytest

from agentflow.errors import UsageError
from agentflow.events import WorkflowEnded, WorkflowStarted
from agentflow.runtime.guards import Ask, Done, Guards, Stop, Work


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"deny": "shell"}, "deny is a list of tools' names, not 'shell'"),
        ({"approve": "shell"}, "approve is a list of tools' names"),
        ({"approve": {"worker": ["shell"]}}, "approve is a list of tools' names"),
        ({"allow": "my_shell_tool"}, "allow is a list of tools' names"),
        ({"allow": {"worker": "shell"}}, "allow is a list of tools' names"),
        ({"deny": [1]}, "deny is a list of tools' names"),
        ({"workflow": {"tokens": "50000"}}, "tokens of workflow must be a finite number of at least 0, got '50000'"),
        ({"workflow": {"tokens": None}}, "tokens of workflow must be a finite number"),
        ({"workflow": {"tool_calls": math.nan}}, "tool_calls of workflow must be a finite number"),
        ({"tenant": {"money": -1}, "prices": {"prompt": 1}}, "money of tenant must be a finite number"),
        ({"workflow": 50_000}, "workflow maps names to numbers; got 50000"),
        ({"prices": {"prompt": "1"}, "workflow": {"money": 1}}, "prompt of prices must be a finite number"),
        ({"period": "60", "tenant": {"tokens": 5}}, "period of safety must be a finite number"),
        ({"repeats": 2.5}, "repeats must be an integer of at least 2, or None; got 2.5"),
        ({"workflow": {"token": 1}}, r"unknown limits \['token'\]"),
    ],
)
def test_options_that_would_not_be_kept_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Guards([{"name": "safety", **options}])


def test_policies_are_a_list() -> None:
    with pytest.raises(UsageError, match=r"write \['safety'\]"):
        Guards("safety")


def test_work_that_is_not_made_is_not_counted_and_what_ends_late_opens_no_account() -> None:
    guards = Guards([{"name": "safety", "approve": ["pay"], "workflow": {"tool_calls": 1}, "repeats": 2}])
    guards.observe(WorkflowStarted(workflow="w", seq=1, time=0.0, graph="g"))
    look = Work(kind="tool", name="look", key="look", workflow="w", tenant="t")
    pay = Work(kind="tool", name="pay", key="pay", workflow="w", tenant="t")
    for _ in range(5):  # neither the limit nor a loop
        assert guards.allow(look) is None
        guards.withdrawn(look)
    assert isinstance(guards.allow(pay), Ask)
    guards.approved(pay)
    assert isinstance(guards.allow(look), Stop)
    guards.finished(pay, Done(value=None))
    guards.observe(WorkflowEnded(workflow="w", seq=2, time=1.0, outcome="done"))
    guards.finished(look, Done(value=None, prompt_tokens=5))
    found = guards.stats()["policies"]["safety"]
    assert (found["workflows"], found["tenants"]) == (0, 1)
