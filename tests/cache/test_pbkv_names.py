"""More agents than predictors tell apart: the newest are known, and nothing of the forgotten ones is left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from agentflow.cache.pbkv.forecast import END, check_steps
from agentflow.cache.pbkv.forecaster import Forecaster
from agentflow.cache.pbkv.graph_data import LIMIT, CallGraph, Run
from agentflow.cache.pbkv.markov import Markov
from agentflow.cache.pbkv.names import Names
from agentflow.cache.pbkv.sage import Network, Shape
from agentflow.cache.pbkv.simple import Uniform
from agentflow.cache.pbkv.training import Settings, Trained, train
from agentflow.events import AgentEnded


def test_the_name_unseen_for_longest_gives_its_number_to_a_new_one() -> None:
    names = Names(2)
    assert [names.see(n) for n in ("a", "b", "a")] == [(0, True), (1, True), (0, False)]
    assert names.find("b") == 1  # which is not to see it
    assert names.see("c") == (1, True)
    assert (list(names), names.find("b"), names.given) == (["a", "c"], None, 3)


@pytest.mark.parametrize("name", ["pbkv-he", "pbkv-queue"])
def test_a_server_goes_on_learning_however_many_names_it_saw(drive: Callable[..., Any], name: str) -> None:
    driven = drive(name)
    for i in range(300):
        driven.run(f"once{i}", f"once{i}")
        driven.event(AgentEnded(workflow=f"once{i}", agent=f"once{i}", next=("x",)))
        driven.end(f"once{i}")
    driven.event(AgentEnded(workflow="first", agent="plan", next=("look",)))
    assert driven.policy.predictor.forecast(["plan"], 1)[0] == {"look": 1.0}
    for i in range(60):
        for agent in ("plan", "code", "plan", "code"):
            driven.run(f"w{i}", agent)
        driven.end(f"w{i}")
    driven.run("w", "plan")
    driven.run("w", "code", "x")
    driven.run("w", "plan")
    assert driven.policy.predict(1)[0].steps[0]["code"] > 0.9
    assert driven.why("x").terms["p1"] > 0.8
    assert len(driven.policy._agents) == 256


def test_markov_forgets_an_agent_with_its_transitions() -> None:
    chain = Markov(limit=2, window=4)
    for following in ("b", "b", END):
        chain.learn(["a"], following)
    chain.learn(["a"], "c")  # in place of b
    assert chain.forecast(["a"], 1)[0] == pytest.approx({"c": 0.5, END: 0.5})
    assert "b" not in chain.forecast(["b"], 1)[0]
    for _ in range(2):  # b's transitions leave the window, and take nothing of c's with them
        chain.learn(["c"], "a")
    assert chain.forecast(["a"], 1)[0] == pytest.approx({"c": 0.5, END: 0.5})


def test_markov_takes_in_no_more_of_a_file_than_there_is_room_for() -> None:
    chain = Markov(limit=3)
    chain.learn(["a"], "b")
    chain.start_from(["c", "d"], [(0, 1, 5.0), (0, 2, 1.0), (1, 0, 5.0)])
    assert chain.forecast(["a"], 1)[0] == {"b": 1.0}
    assert chain.forecast(["c"], 1)[0] == {END: 1.0}


def test_uniform_knows_the_newest() -> None:
    even = Uniform(limit=2)
    for agent in "abc":
        even.learn(["x"], agent)
    assert set(even.forecast(["c"], 1)[0]) == {"b", "c", END}


def full_graph() -> CallGraph:
    graph = CallGraph()
    graph.sized("old 2", 10, 10)
    graph.describe("old 2", "Writes.")
    graph.prior("old 2", ["old 1"])
    for i in range(LIMIT):
        graph.learn_run([f"old {i}", f"old {(i + 1) % LIMIT}", f"old {(i + 2) % LIMIT}"])
    return graph


def test_a_number_that_is_given_again_has_nothing_of_the_agent_before() -> None:
    graph = full_graph()
    names = list(graph.names)
    number = graph.number("new")
    assert len(graph) == LIMIT
    assert names[number] == "old 2"  # unseen for longest
    fresh = CallGraph()
    fresh.number("new")
    assert (graph.features()[number] == fresh.features()[0]).all()
    assert not graph.known[number]
    assert not (graph.edge_lists()[0] == number).any()
    graph.learn_run([names[number], "old 9"], -1.0)  # what is taken back brings nobody back
    assert names[number] not in graph.names


def test_a_network_forecasts_agents_that_took_the_place_of_others() -> None:
    graph = full_graph()
    forecaster = Forecaster(Trained(Network(Shape(width=8, steps=2)).eval(), graph, {}))
    before = forecaster.forecast_many([["old 3"]], 2)
    assert check_steps(before[0], 2)
    new = [f"new {i}" for i in range(4)]
    embedded = forecaster._embeddings().clone()
    found = forecaster.forecast_many([[n] for n in new], 2)
    assert all(check_steps(steps, 2) for steps in found)
    changed = (forecaster._embeddings() != embedded).any(1)
    assert changed[[forecaster.graph.number(n) for n in new]].all()
    for _ in range(40):
        forecaster.learn(["new 0"], "new 1")
    assert forecaster.forecast_many([["new 0"]], 1)[0][0]["new 1"] > 0.9


def test_a_pass_over_more_agents_than_there_are_numbers_names_none_wrongly() -> None:
    torch.manual_seed(0)
    forecaster = Forecaster(Trained(Network(Shape(width=8, steps=1)).eval(), CallGraph(), {}))
    for _ in range(40):
        forecaster.learn(["a"], "b")
    paths = [["a"], *([f"{i}.{k}" for k in range(30)] for i in range(20)), ["a"]]
    first, *_, last = forecaster.forecast_many(paths, 1)
    assert first == last
    assert first[0]["b"] > 0.9


def test_training_numbers_the_agents_of_the_runs_before_those_of_static_edges() -> None:
    edges = {f"e{i}": [f"e{i + 1}"] for i in range(2 * LIMIT)}
    made = train([Run(("a", "b", "c"))] * 12, Settings(shape=Shape(width=8), epochs=1, geometric=False), edges=edges)
    assert set(made.graph.names[:3]) == {"a", "b", "c"}
    assert len(made.graph) == LIMIT
    assert made.report["top1_1"] > 0.9
