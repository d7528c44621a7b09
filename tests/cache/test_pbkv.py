"""PBKV's policy with predictors that say what a test wants: scores worked out by hand, order, noise, prefetch."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from agentflow.cache.pbkv.forecast import END, Steps, agent_values, check_steps
from agentflow.cache.pbkv.markov import Markov
from agentflow.cache.pbkv.predictors import make_predictor
from agentflow.cache.pbkv.trust import Trust
from agentflow.cache.policy import Evicted, Loaded, PolicySpec, Prefetch
from agentflow.errors import UsageError
from agentflow.events import AgentEnded


class Told:
    """Forecasts what it was told of a workflow, END for others."""

    name = "told"

    def __init__(self, steps: Mapping[str, Steps]) -> None:
        self.steps = steps
        self.priors: list[tuple[str, tuple[str, ...]]] = []

    def learn(self, path: Sequence[str], following: str) -> None: ...

    def prior(self, agent: str, following: Sequence[str]) -> None:
        self.priors.append((agent, tuple(following)))

    def sized(self, agent: str, prompt: int, output: int) -> None: ...

    def forecast(self, path: Sequence[str], horizon: int, *, workflow: str = "", hidden: Any = None) -> Steps:
        return self.steps.get(workflow, ({END: 1.0},) * horizon)


class Broken(Told):
    name = "broken"

    def forecast(self, path: Sequence[str], horizon: int, *, workflow: str = "", hidden: Any = None) -> Steps:
        raise RuntimeError("no forecast today")


def pbkv(name: str = "pbkv-he", **options: Any) -> PolicySpec:
    return {"name": name, "trust": False, **options}


W1: Steps = ({"a": 0.3, "b": 0.5, END: 0.2}, {"a": 0.4, "b": 0.1, END: 0.5})
W2: Steps = ({"b": 0.6, "c": 0.4}, {"b": 0.2, "c": 0.5, END: 0.3})


@pytest.mark.parametrize(
    ("horizon", "alone", "shared"),
    [
        # K = 1: w1 calls a with 0.3; the shared node is touched by a and b, which w1 calls with 0.8 and w2 with 0.6.
        (1, 0.3, 0.8 + 0.6),
        # K = 2, gamma 0.5: the second step adds half of 0.4; of 0.5 and 0.2.
        (2, 0.3 + 0.5 * 0.4, (0.8 + 0.5 * 0.5) + (0.6 + 0.5 * 0.2)),
    ],
)
def test_scores_are_those_of_the_equation(drive: Callable[..., Any], horizon: int, alone: float, shared: float) -> None:
    driven = drive(pbkv(horizon=horizon, gamma=0.5))
    driven.policy.predictor = Told({"w1": W1[:horizon], "w2": W2[:horizon]})
    driven.run("w1", "a", "xs")
    driven.run("w2", "b", "s")
    assert driven.why("x").terms["score"] == pytest.approx(alone)
    assert driven.why("s").terms["score"] == pytest.approx(shared)
    assert driven.why("s").terms["p1"] == pytest.approx(0.8 + 0.6)
    assert driven.order("xs") == "xs"


def test_retired_goes_first_then_the_lowest_score_then_the_oldest(drive: Callable[..., Any]) -> None:
    driven = drive(pbkv(horizon=2, gamma=0.5))
    driven.policy.predictor = Told({"w1": W1, "w2": W2, "w3": W2})
    driven.run("w2", "b", "h")
    driven.run("w1", "a", "lm")
    driven.run("w3", "b", "r")
    driven.end("w3")
    assert driven.order() == "rlmh"
    assert driven.why("r").terms == {"active": 0.0, "score": 0.0}
    driven.run("w1", "a", "l")  # used again: of two that score the same the older goes first
    assert driven.order() == "rmlh"


def test_useless_predictions_fall_back_to_the_order_of_lifecycle(drive: Callable[..., Any]) -> None:
    both = [drive({"name": "pbkv-he", "noise": 1.0, "seed": 3}), drive("lifecycle")]
    rng = random.Random(1)
    calls = [(f"w{rng.randrange(12)}", rng.choice("abcde")) for _ in range(400)]
    for driven in both:
        for i, (workflow, agent) in enumerate(calls):
            driven.run(workflow, agent, chr(0x4E00 + i))  # a node of its own
        driven.end("w3")
    assert both[0].policy.trust.weight < 0.01
    assert both[0].order() == both[1].order()


def test_a_failing_predictor_gives_way_to_markov_and_that_to_lifecycle(drive: Callable[..., Any]) -> None:
    driven = drive(pbkv())
    driven.policy.predictor = Broken({})
    driven.run("w", "a", "x")
    driven.run("w", "b", "y")
    assert (driven.order(), driven.score("x")[:-1], driven.score("y")[:-1]) == ("xy", (1.0, 0.0), (1.0, 0.0))
    driven.run("w", "a", "z")
    assert isinstance(driven.policy.predictor, Markov)
    assert driven.policy.stats()["predictor_failures"] == 3.0
    assert driven.runtime.live_names == ("pbkv-he",)
    for _ in range(8):
        driven.run("w", "a")
        driven.run("w", "b")
    assert driven.score("x")[1] > 0.5


def test_edges_that_a_graph_tells_of_are_known_before_any_run(drive: Callable[..., Any]) -> None:
    driven = drive(pbkv())
    driven.event(AgentEnded(workflow="w", agent="plan", next=("search",), seq=1))
    driven.run("w", "plan")
    assert driven.policy.predict(1)[0].steps[0] == {"search": 1.0}


def kept_on_host(driven: Any, names: str) -> None:
    for name in names:
        driven.runtime.observe(Evicted(driven.nodes[name], "device", kept=True))


def test_prefetches_are_ranked_by_the_next_step_under_a_budget(drive: Callable[..., Any]) -> None:
    driven = drive(pbkv("pbkv", horizon=2, threshold=0.25, budget=40))
    driven.policy.predictor = Told({"w1": W1, "w2": W2, "w3": ({"a": 0.1, END: 0.9},) * 2, "w4": W2})
    driven.touch(driven.arrive("w1", "a"), "x", tokens=20)  # 0.3
    driven.touch(driven.arrive("w2", "b"), "yz", tokens=15)  # 0.6 each
    driven.touch(driven.arrive("w3", "a"), "l")  # 0.1: below the threshold
    driven.touch(driven.arrive("w4", "b"), "r")
    driven.end("w4")
    kept_on_host(driven, "xyzlr")
    wanted = driven.runtime.act()
    ids = {driven.nodes[n].id: n for n in "xyzlr"}
    assert [ids[p.node] for p in wanted] == ["y", "z"]  # x has no room left
    assert all(isinstance(p, Prefetch) and p.displace == "retired" for p in wanted)
    assert driven.runtime.act() == []  # nothing happened since
    for name in "yz":
        driven.runtime.observe(Loaded(driven.nodes[name]))
    driven.run("w1", "a")
    assert [ids[p.node] for p in driven.runtime.act()] == ["x"]


def test_only_the_aggressive_policy_displaces_active_kv(drive: Callable[..., Any]) -> None:
    driven = drive(pbkv("pbkv-aggressive", horizon=2))
    driven.policy.predictor = Told({"w1": W1})
    driven.run("w1", "a", "x")
    kept_on_host(driven, "x")
    assert [p.displace for p in driven.runtime.act()] == ["active"]


def test_markov_multiplies_its_matrix() -> None:
    chain = Markov()
    for path, following in ((["a"], "b"), (["a"], "b"), (["a"], "c"), (["b"], "a"), (["b"], END), (["c"], END)):
        chain.learn(path, following)
    first, second = chain.forecast(["c", "a"], 2)
    assert first == pytest.approx({"b": 2 / 3, "c": 1 / 3})
    assert second == pytest.approx({"a": 1 / 3, END: 2 / 3})
    assert chain.forecast(["x"], 1)[0] == pytest.approx({"a": 1 / 6, "b": 2 / 6, "c": 1 / 6, END: 2 / 6})
    assert Markov().forecast(["a"], 2) == ({END: 1.0}, {END: 1.0})


def test_markov_starts_from_the_graph_and_forgets_what_left_its_window() -> None:
    chain = Markov(edges={"a": ["b", "c"], "b": []}, window=8)
    assert chain.forecast(["a"], 1)[0] == pytest.approx({"b": 0.5, "c": 0.5})
    assert chain.forecast(["b"], 1)[0] == {END: 1.0}
    for _ in range(7):
        chain.learn(["a"], "b")
    assert chain.forecast(["a"], 1)[0]["b"] == pytest.approx(7.5 / 8)
    for _ in range(8):
        chain.learn(["a"], "c")
    assert chain.forecast(["a"], 1)[0] == pytest.approx({"b": 0.5 / 9, "c": 8.5 / 9})


def test_markov_holds_no_more_agents_than_its_limit() -> None:
    chain = Markov(limit=4)
    for i in range(50):
        chain.learn([f"a{i}"], f"a{i + 1}")
    step = chain.forecast(["a49"], 1)[0]
    assert len(step) <= 4
    assert sum(step.values()) == pytest.approx(1.0)


def test_trust_falls_with_bad_forecasts_and_comes_back() -> None:
    trust = Trust()
    assert trust.weight == 0.5
    for _ in range(30):
        trust.learn(0.05, 4)
    assert trust.weight < 0.01
    for _ in range(200):
        trust.learn(0.9, 4)
    assert trust.weight > 0.99
    even = Trust().blend(({"a": 1.0},), ["a"])[0]  # half of 1 and half of 1/2
    assert even == pytest.approx({"a": 0.75, END: 0.25})


@pytest.mark.parametrize("choices", [5, 101, 257])
def test_trust_falls_however_many_agents_there_are_but_not_by_one_surprise(choices: int) -> None:
    trust = Trust()
    trust.learn(0.0, choices)
    assert trust.weight == pytest.approx(1 / 21)  # a surprise is charged at most as a twentieth of chance
    for _ in range(20):
        trust.learn(0.0, choices)
    assert trust.weight < 0.01
    good = Trust()
    for _ in range(6):
        good.learn(0.7, choices)
    assert good.weight > 0.99
    good.learn(0.0, choices)
    assert good.weight > 0.95


def test_a_wrong_predictor_of_many_agents_is_not_believed(drive: Callable[..., Any]) -> None:
    driven = drive("pbkv-he")
    driven.policy.predictor = Told(dict.fromkeys(map("w{}".format, range(9)), ({"nobody": 1.0},) * 4))
    rng = random.Random(0)
    for i in range(400):
        driven.run(f"w{i % 9}", f"a{rng.randrange(150)}")
    assert driven.policy.stats()["trust"] < 0.01


@pytest.mark.parametrize("options", [{"noise": 0.5, "trust": False}, {"trust": True}])
def test_agents_that_were_not_called_yet_keep_their_part(drive: Callable[..., Any], options: Any) -> None:
    driven = drive({"name": "pbkv-he", "horizon": 1, **options})
    driven.policy.predictor = Told({"w": ({"a": 0.2, "later": 0.7, END: 0.1},)})
    driven.run("w", "a", "x")
    (step,) = check_steps(driven.policy.predict(1)[0].steps, 1)
    assert step["later"] >= 0.35
    assert check_steps(Trust().blend((step,), ["a"]), 1)[0]["later"] == pytest.approx(step["later"] / 2)


@pytest.mark.parametrize("name", ["pbkv-he", "pbkv-queue"])
def test_the_explanation_is_of_the_numbers_in_the_score(drive: Callable[..., Any], name: str) -> None:
    driven = drive({"name": name, "gamma": 0.5, "horizon": 3})
    for _ in range(3):
        for workflow, agent in (("v", "a"), ("w", "b"), ("w", "a")):
            driven.run(workflow, agent, "x")
    driven.arrive("w", "b")
    terms = driven.why("x").terms
    worth = sum(0.5**k * terms[f"p{k + 1}"] for k in range(3))
    wanted = worth if name == "pbkv-he" else 0.5 * worth + terms["waiting_calls"]
    assert terms["score"] == pytest.approx(wanted, abs=1e-3)
    assert driven.score("x")[1] == pytest.approx(terms["score"], abs=0.011)
    for workflow in "vw":
        driven.end(workflow)
    assert driven.why("x").terms["active"] == driven.score("x")[0]


def test_what_is_retired_is_not_prefetched(drive: Callable[..., Any]) -> None:
    driven = drive(pbkv("pbkv", threshold=0.0))
    driven.run("w", "a", "x")
    driven.run("v", "a", "y")
    kept_on_host(driven, "xy")
    driven.end("w")
    assert [p.node for p in driven.runtime.act()] == [driven.nodes["y"].id]


@pytest.mark.parametrize(
    "options",
    [
        {"horizon": 2.5},
        {"horizon": True},
        {"name": "pbkv", "threshold": float("nan")},
        {"name": "pbkv", "budget": 2.5},
        {"predictor": {"window": 0}},
        {"predictor": {"limit": 0}},
        {"predictor": {"prior": -1}},
        {"predictor": {"prior": float("nan")}},
        {"backbone": "uniform", "predictor": {"limit": 0}},
        {"backbone": "sage", "predictor": {"capacity": 1.5}},
        {"backbone": "sage", "predictor": {"refresh": -1}},
    ],
)
def test_options_without_sense_are_refused(drive: Callable[..., Any], options: Any) -> None:
    with pytest.raises(UsageError, match="must be"):
        drive(pbkv(**options))


def test_values_are_discounted_and_leave_out_the_end() -> None:
    assert agent_values(W1, 0.5) == pytest.approx({"a": 0.5, "b": 0.55})
    with pytest.raises(ValueError, match="sum to"):
        check_steps(({"a": 0.5},), 1)


def test_predictors_come_by_name() -> None:
    assert make_predictor("markov", {"window": 10}).name == "markov"
    with pytest.raises(UsageError, match="known: markov, oracle, rgcn, sage, uniform"):
        make_predictor("crystal ball", {})


def test_the_policy_loads_no_torch_until_a_file_is_there() -> None:
    probe = (
        "import sys\n"
        "from agentflow.cache.pbkv.predictors import make_predictor\n"
        "made = make_predictor('sage', {'path': 'absent'})\n"
        "assert made.forecast(['a'], 2) and made.counters['degraded'] == 1\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", probe], check=True, timeout=120)
