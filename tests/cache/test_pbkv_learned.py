"""The learned predictor: what it learns, its file, and its use beside a scheduler."""

from __future__ import annotations

import itertools
import json
import logging
import os
import pickle
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from agentflow.cache.pbkv.calibration import expected_calibration_error
from agentflow.cache.pbkv.forecast import END, Steps, check_steps
from agentflow.cache.pbkv.forecaster import Forecaster
from agentflow.cache.pbkv.graph_data import CallGraph, Run, hashed_text
from agentflow.cache.pbkv.learned import Sage
from agentflow.cache.pbkv.markov import Markov
from agentflow.cache.pbkv.predictors import make_predictor
from agentflow.cache.pbkv.sage import Network, Shape, network_arrays
from agentflow.cache.pbkv.saved import load_trained, read_header, save_trained
from agentflow.cache.pbkv.training import Settings, Trained, refresh, train
from agentflow.errors import UsageError

SIZE = 16


def by_path(rng: random.Random) -> Run:
    """What follows ``search`` depends on who came before the loop began: a first-order chain cannot know."""
    kind = rng.choice(("ask", "task"))
    agents = [kind]
    for _ in range(rng.randint(1, 3)):
        agents += ["search", "read" if kind == "ask" else "write"]
    return Run((*agents, "verify"))


def by_intent(rng: random.Random) -> Run:
    """What follows ``plan`` shows only in the hidden state of its prompt."""
    sign = rng.choice((-1.0, 1.0))
    noise = np.random.default_rng(rng.randrange(1 << 30)).normal(0, 0.3, SIZE).astype(np.float32)
    vector = noise + np.float32(sign) * np.linspace(-1, 1, SIZE, dtype=np.float32)
    return Run(("plan", "read" if sign > 0 else "write"), hidden=(vector, None))


def runs(make: Callable[[random.Random], Run], n: int, seed: int) -> list[Run]:
    rng = random.Random(seed)
    return [make(rng) for _ in range(n)]


def fast(**options: Any) -> Settings:
    shape = Shape(width=16, steps=3, **options)
    return Settings(shape=shape, epochs=40, patience=40, rate=1e-2, decay=1e-3, folds=3, batch=64, geometric=False)


@pytest.fixture(scope="module")
def trained() -> Trained:
    return train(runs(by_path, 80, 1), fast())


@pytest.fixture
def file(trained: Trained, tmp_path: Path) -> Path:
    path = tmp_path / "agents.safetensors"
    save_trained(trained, path, meta={"traces": ["made up"]})
    return path


def loss(forecast: Callable[[Sequence[str], Run, int], Steps], some: Sequence[Run]) -> list[float]:
    """Mean log-loss of steps 1 to 3."""
    total = np.zeros(3)
    n = 0
    for run in some:
        for at in range(1, len(run.agents) + 1):
            steps = forecast(run.agents[:at], run, at)
            n += 1
            for k in range(3):
                came = run.agents[at + k] if at + k < len(run.agents) else END
                total[k] -= np.log(max(1e-3, steps[k].get(came, 0.0)))
    return [float(x) for x in total / n]


def chain_of(some: Sequence[Run]) -> Markov:
    chain = Markov()
    for run in some:
        for at in range(1, len(run.agents) + 1):
            chain.learn(run.agents[:at], run.agents[at] if at < len(run.agents) else END)
    return chain


def test_paths_tell_apart_what_a_chain_cannot(trained: Trained) -> None:
    forecaster, chain, test = Forecaster(trained), chain_of(runs(by_path, 80, 1)), runs(by_path, 40, 2)
    learned = loss(lambda path, run, at: forecaster.forecast_many([path], 3)[0], test)
    first_order = loss(lambda path, run, at: chain.forecast(path, 3), test)
    assert all(a < b - 0.05 for a, b in zip(learned, first_order, strict=True))
    after = [forecaster.forecast_many([[kind, "search"]], 1)[0][0] for kind in ("ask", "task")]
    assert after[0]["read"] > 0.8
    assert after[1]["write"] > 0.8
    assert all(0.0 <= trained.report[f"ece_{k}"] < 0.2 for k in (1, 2, 3))


def test_the_same_seed_gives_the_same_network() -> None:
    some = runs(by_path, 20, 3)
    first, second = (train(some, Settings(shape=Shape(width=16), epochs=3, seed=5, geometric=False)) for _ in range(2))
    for a, b in zip(first.network.parameters(), second.network.parameters(), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(UsageError, match="at least 10"):
        train(some[:9])


@pytest.mark.slow
def test_hidden_states_tell_apart_equal_paths() -> None:
    learned = train(runs(by_intent, 120, 1), fast(hidden=SIZE))
    forecaster = Forecaster(learned)
    assert forecaster.hidden_size == SIZE
    right = 0
    for run in runs(by_intent, 40, 2):
        step = forecaster.forecast_many([["plan"]], 1, hidden=[run.hidden[0]])[0][0]
        right += step.get(run.agents[1], 0.0) > 0.6
    assert right >= 36
    for absent in (None, np.zeros(3, np.float32), np.full(SIZE, np.nan, np.float32)):
        step = forecaster.forecast_many([["plan"]], 1, hidden=[absent])[0][0]
        assert 0.2 < step["read"] < 0.8


@pytest.mark.slow  # torch-geometric takes long to import
@pytest.mark.parametrize("backbone", ["sage", "rgcn"])
def test_plain_layers_are_those_of_torch_geometric(backbone: Any) -> None:
    graph = CallGraph()
    for run in runs(by_path, 10, 4):
        graph.learn_run(run.agents)
    torch.manual_seed(0)
    theirs = Network(Shape(backbone=backbone), geometric=True).eval()
    ours = Network(Shape(backbone=backbone)).eval()
    ours.load_state_dict(theirs.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(ours.embed(*network_arrays(graph)), theirs.embed(*network_arrays(graph)))
    learned = train(runs(by_path, 12, 4), Settings(shape=Shape(backbone=backbone, width=16), epochs=2))
    assert Forecaster(learned).forecast_many([["ask"]], 4)


names = st.one_of(st.sampled_from(["ask", "task", "search", "read", "verify"]), st.text(max_size=8))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(paths=st.lists(st.lists(names, min_size=1, max_size=70), min_size=1, max_size=5), horizon=st.integers(1, 6))
def test_forecasts_are_distributions_and_the_end_never_becomes_less_likely(
    trained: Trained, paths: list[list[str]], horizon: int
) -> None:
    paths = [[a or "nameless" for a in path] for path in paths]
    for steps in Forecaster(trained).forecast_many(paths, horizon):
        check_steps(steps, horizon)
        ends = [step[END] for step in steps]
        assert all(b >= a - 1e-5 for a, b in itertools.pairwise(ends))


def test_a_new_agent_gets_a_sane_forecast_and_is_forecast_once_it_was_seen(trained: Trained) -> None:
    forecaster = Forecaster(trained)
    step = forecaster.forecast_many([["ask", "searcher"]], 1)[0][0]
    assert check_steps((step,), 1)
    for _ in range(30):
        forecaster.learn(["ask", "searcher"], "summary")
    assert forecaster.forecast_many([["ask", "searcher"]], 1)[0][0].get("summary", 0.0) > 0.3


def test_names_that_are_alike_have_features_that_are() -> None:
    code, coder, chart = (hashed_text(t, 48) for t in ("python_coder", "PythonCoder 2", "weather"))
    assert code @ coder > code @ chart + 0.2
    assert not hashed_text("", 8).any()


def test_static_edges_are_a_prior_before_any_run() -> None:
    graph = CallGraph()
    graph.prior("plan", ["search"])
    graph.prior("search", [])
    matrix = graph.transitions()
    assert matrix[0, 1] > 0.6
    assert matrix[1, 2] > 0.6
    assert matrix.sum(1) == pytest.approx(1.0)


def test_calibration_error_by_hand() -> None:
    # Two forecasts at 0.9 of which one is right, two at 0.3 of which none is: (2 * 0.4 + 2 * 0.3) / 4.
    assert expected_calibration_error([0.9, 0.9, 0.3, 0.3], [1, 0, 0, 0]) == pytest.approx(0.35)
    assert expected_calibration_error([], []) == 0.0


# ---------------------------------------------------------------------------------------------- the file


def test_a_file_gives_the_same_forecasts(trained: Trained, file: Path) -> None:
    again = load_trained(file)
    paths = [["ask"], ["task", "search"], ["ask", "search", "read", "stranger"]]
    assert Forecaster(again).forecast_many(paths, 3) == Forecaster(trained).forecast_many(paths, 3)
    header = read_header(file)
    assert (header["version"], header["meta"]) == (1, {"traces": ["made up"]})
    assert set(header["agents"]) == {"ask", "task", "search", "read", "write", "verify"}
    assert sorted(p.name for p in file.parent.iterdir()) == [file.name]


def damaged(file: Path, how: str) -> None:
    if how == "cut":
        file.write_bytes(file.read_bytes()[:-100])
    elif how == "empty":
        file.write_bytes(b"")
    elif how == "pickle":
        file.write_bytes(pickle.dumps({"network": 1}))
    else:
        header = read_header(file)
        tensors = load_file(file)
        if how == "old":
            header["version"] = 0
        elif how == "sizes":
            header["shape"]["width"] = 8
        elif how == "huge":
            header["shape"]["width"] = 10**9
        elif how == "agents":
            header["agents"].append("ask")
        elif how == "nan":
            tensors["network.ends.bias"][0] = float("nan")
        elif how == "report":
            header["report"]["epochs"] = 10**400
        elif how == "dropout":
            header["shape"]["dropout"] = 10**400
        elif how == "flat":
            tensors["graph.far"] = torch.tensor(0.0)
        elif how == "far":
            tensors["graph.far"] = tensors["graph.far"].repeat(100, 1, 1)
        elif how == "complex":
            tensors["graph.counts"] = tensors["graph.counts"].to(torch.complex64)
        elif how in ("counts", "far less", "sizes less"):
            tensors[f"graph.{how.removesuffix(' less')}"].flatten()[0] = -1
        elif how == "temperature":
            tensors["network.temperature"][0, 0] = 0.0
        text = "[" * 100_000 if how == "deep" else json.dumps(header)
        save_file(tensors, file, metadata={"agentflow": text} if how != "foreign" else {})


DAMAGES = ["cut", "empty", "pickle", "old", "sizes", "huge", "agents", "nan", "foreign"]
DAMAGES += ["report", "dropout", "flat", "far", "complex", "counts", "far less", "sizes less", "temperature", "deep"]


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_or_foreign_file_leaves_the_chain_alone(
    file: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    damaged(file, how)
    with pytest.raises(UsageError, match=r"agents\.safetensors"):
        load_trained(file)
    with caplog.at_level(logging.WARNING):
        made = Sage(path=str(file), inline=True)
    assert "a Markov chain stands in" in caplog.text
    assert made.counters["degraded"] == 1
    assert not made.ready
    made.learn(["a"], "b")
    assert made.forecast(["a"], 1)[0] == {"b": 1.0}


@pytest.mark.parametrize("how", ["cut", "report", "flat", "deep"])
def test_the_worker_outlives_a_damaged_file(file: Path, how: str, caplog: pytest.LogCaptureFixture) -> None:
    damaged(file, how)
    made = Sage(path=str(file))
    made.forecast(["a"], 1, workflow="w")
    assert made.settle(30.0)
    assert (made.counters["degraded"], made.ready) == (1, False)
    assert caplog.text.count("a Markov chain stands in") == 1


def test_no_exception_while_loading_reaches_the_caller(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Any) -> None:
        raise RecursionError("deeper than anybody thought")

    monkeypatch.setattr("agentflow.cache.pbkv.saved.load_trained", fail)
    assert Sage(path=str(file), inline=True).counters == {"degraded": 1}
    made = Sage(path=str(file))
    made.forecast(["a"], 1, workflow="w")
    assert made.settle(30.0)
    assert made.counters["degraded"] == 1


def unsound(file: Path) -> None:
    """Weights that are finite, and too large to compute with."""
    tensors = load_file(file)
    tensors["network.chooses.weight"].fill_(1e38)
    save_file(tensors, file, metadata={"agentflow": json.dumps(read_header(file))})


@pytest.mark.parametrize("inline", [True, False])
def test_an_answer_that_is_no_distribution_is_counted_and_the_chain_answers(file: Path, inline: bool) -> None:
    unsound(file)
    made = Sage(path=str(file), inline=inline)
    try:
        for i in range(1, 4):
            made.learn(["a"], "b")
            step = made.forecast(["a"], 1, workflow="w")[0]
            assert check_steps((step,), 1)
            assert made.settle(30.0)
            assert made.answers() == []
            assert made.counters["failures"] == i
        assert made.counters["degraded"] == 1
        assert made.forecast(["a"], 1)[0]["b"] == 1.0
    finally:
        made.close()


def test_a_file_is_as_open_as_any_other(trained: Trained, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        save_trained(trained, tmp_path / "agents")
    finally:
        os.umask(before)
    assert (tmp_path / "agents").stat().st_mode & 0o777 == 0o640
    with pytest.raises(UsageError, match="cannot be written"):
        save_trained(trained, tmp_path / "agents" / "agents")
    assert [p.name for p in tmp_path.iterdir()] == ["agents"]


def test_a_file_of_another_backbone_is_not_used(file: Path) -> None:
    assert make_predictor("rgcn", {"path": str(file), "inline": True}).counters == {"degraded": 1}  # type: ignore[attr-defined]


# ---------------------------------------------------------------------------------------------- in use


def test_inline_answers_at_once_and_always_the_same(trained: Trained, file: Path) -> None:
    made = [Sage(path=str(file), inline=True) for _ in range(2)]
    wanted = Forecaster(trained).forecast_many([["ask", "search"]], 3)[0]
    assert made[0].forecast(["ask", "search"], 3) == made[1].forecast(["ask", "search"], 3) == wanted
    assert made[0].answers() == []


def test_the_worker_answers_the_newest_question_of_a_workflow(trained: Trained, file: Path) -> None:
    made = Sage(path=str(file))
    try:
        first = made.forecast(["ask"], 3, workflow="w")
        assert check_steps(first, 3)
        made.forecast(["ask", "search"], 3, workflow="w")
        made.forecast(["task"], 3, workflow="v")
        assert made.settle()
        answers = {a.workflow: a.steps for a in made.answers()}
        wanted = Forecaster(trained).forecast_many([["ask", "search"], ["task"]], 3)
        assert set(answers) == {"w", "v"}
        for found, expected in zip((answers["w"], answers["v"]), wanted, strict=True):
            for a, b in zip(found, expected, strict=True):
                assert a == pytest.approx(b, abs=1e-5)
        assert made.answers() == []
        # The chain knows the file's runs by now.
        assert made.forecast(["read"], 1, workflow="u")[0].get("search", 0.0) > 0.2
    finally:
        made.close()


def test_questions_are_bounded_and_the_oldest_gives_way(file: Path) -> None:
    made = Sage(path=str(file), capacity=2)
    try:
        for i in range(500):
            made.forecast(["ask"], 1, workflow=f"w{i}")
        assert made.settle()
        answered = {a.workflow for a in made.answers()}
        assert {"w498", "w499"} <= answered
        assert len(answered) + made.counters["dropped"] >= 500 - 8 * 2
    finally:
        made.close()


def test_a_refresh_takes_in_recent_runs(file: Path) -> None:
    made = Sage(path=str(file), inline=True, refresh=10)
    for run in runs(by_path, 10, 6):
        for at in range(1, len(run.agents) + 1):
            made.learn(run.agents[:at], run.agents[at] if at < len(run.agents) else END)
    made.forecast(["ask"], 1)
    assert made.settle_refresh()
    made.forecast(["ask"], 1)
    assert made.counters["refreshes"] == 1


def taught(made: Sage, seed: int) -> list[Steps]:
    """Forecasts while runs are learned, each asked for twice."""
    out = []
    for run in runs(by_path, 12, seed):
        for at in range(1, len(run.agents) + 1):
            made.learn(run.agents[:at], run.agents[at] if at < len(run.agents) else END)
            out.append(made.forecast(run.agents[:at], 2))
    return out


def test_an_inline_refresh_gives_the_same_each_time(file: Path) -> None:
    made = [Sage(path=str(file), inline=True, refresh=5) for _ in range(2)]
    torch.manual_seed(0)
    first = taught(made[0], 7)
    torch.manual_seed(1)
    assert taught(made[1], 7) == first
    assert made[0].counters["refreshes"] == 2
    assert first != taught(Sage(path=str(file), inline=True), 7)


def test_the_generator_of_the_process_is_left_alone(trained: Trained, file: Path) -> None:
    before = torch.random.get_rng_state()
    made = load_trained(file)
    for run in runs(by_path, 5, 8):
        made.graph.learn_run(run.agents)
    refreshed = [refresh(made.network, made.graph, runs(by_path, 5, 8)) for _ in range(2)]
    train(runs(by_path, 12, 9), Settings(shape=Shape(width=8, hidden=4), epochs=1, geometric=False))
    assert torch.equal(torch.random.get_rng_state(), before)
    first, second, old = (torch.nn.utils.parameters_to_vector(n.parameters()) for n in (*refreshed, made.network))
    assert torch.equal(first, second)
    assert not torch.equal(first, old)


def test_the_policy_takes_answers_in_when_it_is_asked_between_steps(drive: Callable[..., Any], file: Path) -> None:
    spec = {"name": "pbkv-he", "backbone": "sage", "trust": False, "predictor": {"path": str(file)}}
    driven = drive(spec)
    predictor = driven.policy.predictor
    try:
        driven.run("w", "ask", "x")
        driven.run("w", "search", "y")
        assert predictor.settle()
        assert driven.runtime.rescored() == {"w"}
        assert driven.runtime.rescored() == set()
        assert driven.policy.predict(3)[0].steps[0]["read"] > 0.8
        assert driven.policy.stats()["predictor_ready"] == 1.0
        driven.run("v", "task", "z")
        assert predictor.settle()
        driven.end("v")
        assert driven.runtime.rescored() == set()  # an answer for a workflow that is over is dropped
    finally:
        predictor.close()
