"""``agentflow train-predictor``: from traces to a file that policies use."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from agentflow.bench.predictor_data import load, read_hidden, runs_of, write_hidden
from agentflow.bench.traces.generators import Plan, generate
from agentflow.bench.traces.jsonl import write_trace
from agentflow.cli import main
from agentflow.errors import UsageError


@pytest.mark.slow  # torch-geometric takes long to import
def test_a_file_is_made_and_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from agentflow.cache.pbkv.predictors import make_predictor

    write_trace(generate("hover", Plan(workflows=15)), tmp_path / "mine.jsonl")
    out = str(tmp_path / "agents.safetensors")
    arguments = ["train-predictor", str(tmp_path / "mine.jsonl"), "generate=hover:15", "--out", out, "--epochs", "2"]
    assert main([*arguments, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert set(told["agents"]) == {"plan", "query", "read", "verify"}
    assert told["report"]["runs"] == 30
    steps = make_predictor("sage", {"path": out, "inline": True}).forecast(["plan"], 2)
    assert steps[0]["query"] > 0.8


@pytest.mark.parametrize(
    ("source", "message"),
    [("absent.jsonl", "no such file"), ("generate=weather:3", "generate=NAME:COUNT"), ("generate=hover:x", "COUNT")],
)
def test_a_wrong_source_is_answered_in_one_line(
    source: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train-predictor", source, "--out", str(tmp_path / "x")]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


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
