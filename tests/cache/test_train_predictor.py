"""``agentflow train-predictor``: from traces to a file that policies use."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from agentflow.bench.predictor_data import load, read_hidden, runs_of, write_hidden
from agentflow.bench.traces.generators import Plan, generate
from agentflow.bench.traces.jsonl import write_trace
from agentflow.cache.ledger import EARLY
from agentflow.cli import main
from agentflow.errors import UsageError


@pytest.mark.slow  # torch-geometric takes long to import
def test_a_file_is_made_and_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from agentflow.cache.pbkv.predictors import make_predictor

    write_trace(generate("hover", Plan(workflows=15)), tmp_path / "mine.jsonl")
    out = str(tmp_path / "agents.safetensors")
    with (tmp_path / "mine.jsonl").open("a") as file:
        file.write("{half a line\n{another")
    arguments = ["train-predictor", str(tmp_path / "mine.jsonl"), "generate=hover:15", "--out", out, "--epochs", "2"]
    assert main([*arguments, "--json"]) == 0
    shown = capsys.readouterr()
    told = json.loads(shown.out)
    (left_out,) = told["left_out"]
    assert (left_out["trace"], left_out["count"]) == (str(tmp_path / "mine.jsonl"), 2)
    assert left_out["first"].startswith("line 17: not JSON")
    assert (
        f"2 lines or records could not be read and are left out, the first for this: {left_out['first']}" in shown.err
    )
    assert set(told["agents"]) == {"plan", "query", "read", "verify"}
    assert told["report"]["runs"] == 30
    steps = make_predictor("sage", {"path": out, "inline": True}).forecast(["plan"], 2)
    assert steps[0]["query"] > 0.8


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("absent.jsonl", "no such file"),
        ("generate=weather:3", "generate=NAME:COUNT"),
        ("generate=hover:x", "COUNT"),
        (".", "Is a directory"),
        ("who-and-when=absent", "No such file"),
        ("who-and-when=", "no such file"),
    ],
)
def test_a_wrong_source_is_answered_in_one_line(
    source: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train-predictor", source, "--out", str(tmp_path / "x")]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("out", "message"), [("", "a folder"), ("file/agents", "Not a directory")])
def test_where_nothing_can_be_written_is_told_before_the_training(
    out: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentflow.cache.pbkv.training.train", lambda *a, **b: pytest.fail("it was trained"))
    (tmp_path / "file").touch()
    assert main(["train-predictor", "generate=hover:12", "--out", str(tmp_path / out)]) == 2
    assert f"cannot be written ({message})" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_trace_that_cannot_be_read_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_trace(generate("hover", Plan(workflows=3)), tmp_path / "mine.jsonl")
    lines = (tmp_path / "mine.jsonl").read_text().splitlines()
    (tmp_path / "mine.jsonl").write_text("\n".join([lines[0], *(line[:50] for line in lines[1:])]))
    assert main(["train-predictor", str(tmp_path / "mine.jsonl"), "--out", str(tmp_path / "agents")]) == 2
    shown = capsys.readouterr().err
    assert "3 lines or records could not be read" in shown
    assert "line 2: not JSON" in shown
    assert "0 runs are too few" in shown


def test_calls_that_were_made_early_and_given_up_are_not_learned() -> None:
    made = load("generate=hover:2")
    calls = made.workflows[0].calls
    given_up = replace(calls[1], branch=EARLY, superseded=True)
    taken = replace(calls[2], branch=EARLY)
    run = runs_of(replace(made, workflows=(replace(made.workflows[0], calls=(calls[0], given_up, taken)),)))[0]
    assert run.agents == (calls[0].agent, taken.agent)


def test_hidden_states_travel_with_their_calls(tmp_path: Path) -> None:
    trace = load("generate=hover:10")
    first = trace.workflows[0].calls[0].id
    write_hidden({first: np.arange(4, dtype=np.float32)}, tmp_path / "hidden")
    run = runs_of(trace, read_hidden(tmp_path / "hidden"))[0]
    assert run.hidden[0] is not None
    assert run.hidden[0].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert run.hidden[1] is None
    assert run.sizes[0] == (trace.workflows[0].calls[0].prompt_tokens, trace.workflows[0].calls[0].output_tokens)
    (tmp_path / "hidden").write_bytes(b"nothing")
    with pytest.raises(UsageError, match="no file of hidden states"):
        read_hidden(tmp_path / "hidden")
