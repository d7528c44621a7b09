"""Agents and prompts are checked where they are made."""

from __future__ import annotations

import copy
import pickle
from typing import Any, TypedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from pydantic import BaseModel

from agentflow.engine.base import Sampling
from agentflow.errors import BadSampling, UsageError
from agentflow.graph import Agent, AgentGraph, shared
from agentflow.graph.prompt import to_messages
from agentflow.tools import tool


class Out(BaseModel):
    x: int


@tool
def search(query: str) -> str:
    """Search."""
    return query


def bare(query: str) -> str:  # what a model would read of it is missing
    return query


@pytest.mark.parametrize("name", ["", "  ", "a|b", "a:b", "a\nb", "__start__", "__end__", "x" * 200, 7, None])
def test_bad_names(name: Any) -> None:
    with pytest.raises(UsageError, match="name"):
        Agent(name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"instructions": 3}, "instructions"),
        ({"tools": "search"}, "list of tools"),
        ({"tools": [search, search]}, "two tools"),
        ({"tools": [object()]}, "no tool"),
        ({"tools": [bare]}, "docstring"),
        ({"sampling": {"max_tokens": True}}, "max_tokens"),
        ({"output": int}, "output"),
        ({"output": {"type": "array"}}, "object"),
        ({"sampling": {"temprature": 1}}, "unknown sampling fields"),
        ({"sampling": 3}, "Sampling or a dict"),
        ({"sampling": Sampling(json_schema={"type": "object"})}, "output="),
        ({"max_tool_rounds": 0}, "max_tool_rounds"),
        ({"max_tool_rounds": True}, "max_tool_rounds"),
    ],
)
def test_bad_agents(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Agent("a", **options)


def test_bad_sampling_values_are_bad_sampling() -> None:
    with pytest.raises(BadSampling, match="temperature"):
        Agent("a", sampling={"temperature": -1})


def test_sampling_keeps_only_what_was_set() -> None:
    assert Agent("a", sampling={"max_tokens": 7}).sampling == {"max_tokens": 7}
    assert Agent("a", sampling=Sampling(temperature=0.5)).sampling == {"temperature": 0.5}
    assert Agent("a", output=Out).sampling == {}


class State(TypedDict, total=False):
    question: str


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": lambda s: "x"}, "writes"),
        ({"prompt": lambda s: "x", "writes": "anser"}, "'anser'; the state has: question"),
        ({"writes": "question"}, "prompt"),
        ({"prompt": "x", "writes": "question"}, "function"),
        ({"prompt": lambda s: "x", "writes": lambda: None}, "writes must be"),
        ({"prompt": lambda s: "x", "writes": "question", "history": "past"}, "history"),
    ],
)
def test_add_agent_knows_the_state(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        AgentGraph(State).add_agent(Agent("a"), **options)


def test_add_agent_refuses_a_second_of_the_name() -> None:
    graph = AgentGraph(State)
    graph.add_agent(Agent("a"), prompt=lambda s: "x", writes="question")
    with pytest.raises(UsageError, match="already"):
        graph.add_agent(Agent("a"), prompt=lambda s: "x", writes="question")
    with pytest.raises(UsageError, match="takes an Agent"):
        graph.add_agent("b")  # type: ignore[arg-type]


def test_parts_become_one_user_message() -> None:
    prompt = ["Q: ", shared("q", "why?"), "\n", SystemMessage("s"), "after", {"role": "assistant", "content": "a"}]
    first, second, third, fourth = to_messages(prompt, producers={"q": "asker"})
    assert isinstance(first, HumanMessage)
    assert first.content == [
        {"type": "text", "text": "Q: "},
        {"type": "text", "text": "why?", "slot": "q", "producer": "asker"},
        {"type": "text", "text": "\n"},
    ]
    assert (second.content, third.content, fourth.content) == ("s", "after", "a")
    assert isinstance(fourth, AIMessage)


def test_a_named_producer_wins() -> None:
    (message,) = to_messages([shared("q", "x", producer="me")], producers={"q": "other"})
    assert message.content == [{"type": "text", "text": "x", "slot": "q", "producer": "me"}]


@pytest.mark.parametrize("prompt", ["", [], ["", ""], [shared("q", "")]])
def test_an_empty_prompt_is_refused(prompt: Any) -> None:
    with pytest.raises(UsageError, match="empty"):
        to_messages(prompt)


@pytest.mark.parametrize("prompt", [3, [None], [b"x"], [{"text": "no type"}]])
def test_what_is_no_prompt_is_refused(prompt: Any) -> None:
    with pytest.raises(UsageError, match="a prompt is made of"):
        to_messages(prompt)


def test_bad_slots() -> None:
    with pytest.raises(UsageError, match="name"):
        shared("", "x")
    with pytest.raises(UsageError, match="must be a string, not int"):
        shared("q", 3)  # type: ignore[arg-type]


@given(st.lists(st.one_of(st.text(), st.builds(shared, st.just("slot"), st.text())), min_size=1))
def test_no_text_is_lost(parts: list[Any]) -> None:
    wanted = "".join(p if isinstance(p, str) else p["text"] for p in parts)
    if not wanted:
        with pytest.raises(UsageError):
            to_messages(parts)
        return
    (message,) = to_messages(parts)
    content = message.content
    assert (content if isinstance(content, str) else "".join(p["text"] for p in content)) == wanted  # type: ignore[index]


def test_an_agent_cannot_be_changed_but_copied() -> None:
    agent = Agent("planner", "Plan.", sampling={"temperature": 1})
    for name in ("name", "tools", "instructions", "max_tool_rounds"):
        with pytest.raises(AttributeError, match="cannot be changed"):
            setattr(agent, name, getattr(agent, name))
    for twin in (copy.copy(agent), copy.deepcopy(agent), pickle.loads(pickle.dumps(agent))):
        assert (twin.name, twin.instructions, twin.sampling) == ("planner", "Plan.", {"temperature": 1})


@pytest.mark.parametrize(
    ("sampling", "said"),
    [
        ({"temperature": "hot"}, "temperature must be a number, got 'hot'"),
        ({"top_k": 1.5}, "top_k must be an integer"),
        ({"seed": "x"}, "seed must be an integer"),
        ({"stop": "end"}, "stop must be a list of strings"),
        ({"stop": [3]}, "stop must be a list of strings"),
    ],
)
def test_sampling_values_of_a_wrong_type_are_named(sampling: dict[str, Any], said: str) -> None:
    with pytest.raises(BadSampling, match=said):
        Agent("planner", sampling=sampling)


@pytest.mark.parametrize(
    "item", [{"role": "bogus", "content": "x"}, {"role": "user"}, {"type": "text", "text": 3}, {"type": "image_url"}]
)
def test_a_dict_that_is_no_message_is_the_callers_mistake(item: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        to_messages(item)
