"""How well the next agents are forecast: ``python -m agentflow.bench.predictor_eval [--data FOLDER]``.

Every predictor is trained on the same runs and forecasts the same held-out ones, without learning from them. Of steps
1 to 3 it prints top-1, log-loss and calibration error, for a first-order Markov chain, the learned predictor,
the learned predictor without one of its signals each, and R-GCN; and the time to forecast 64 live workflows on one
core. ``swebench-runs`` are 400 recorded runs on SWE-bench, whose agent is what each command was for; ``swebench`` and
``hover`` are generated.

A forecast's probabilities are mixed with 1 % of an even spread over all agents of the set and the end, for all
predictors alike, so that the log-loss of what was held impossible is finite. ``unnameable`` is the share of next calls
by agents that neither the training runs nor the run so far hold: nobody can forecast them by name.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch

from agentflow.bench.predictor_data import Vector, load, read_hidden, runs_of, write_hidden
from agentflow.bench.traces.model import Trace
from agentflow.cache.pbkv.calibration import expected_calibration_error
from agentflow.cache.pbkv.forecast import END, Steps
from agentflow.cache.pbkv.forecaster import Forecaster
from agentflow.cache.pbkv.graph_data import Run
from agentflow.cache.pbkv.markov import Markov
from agentflow.cache.pbkv.sage import Shape
from agentflow.cache.pbkv.training import Settings, train
from agentflow.engine.models import resolve_model

__all__ = ["compare", "main", "measure_speed", "score", "tables"]

STEPS = 3
EVEN = 0.01
#: Share of the runs that is held out.
HELD_OUT = 0.3
LIVE = 64
#: Runs of a long load.
LONG = 8000

Forecasts = Callable[[Run], Sequence[Steps]]


def score(forecasts: Forecasts, runs: Sequence[Run], agents: int) -> dict[str, list[float]]:
    """Top-1, log-loss and calibration error of steps 1 to 3 over every position of some runs."""
    right: list[list[bool]] = [[] for _ in range(STEPS)]
    confidence: list[list[float]] = [[] for _ in range(STEPS)]
    loss: list[list[float]] = [[] for _ in range(STEPS)]
    for run in runs:
        for at, steps in enumerate(forecasts(run), start=1):
            for k in range(STEPS):
                came = run.agents[at + k] if at + k < len(run.agents) else END
                best = max(steps[k], key=lambda name: steps[k][name])
                right[k].append(best == came)
                confidence[k].append(steps[k][best])
                loss[k].append(-float(np.log((1.0 - EVEN) * steps[k].get(came, 0.0) + EVEN / (agents + 1))))
    return {
        "top1": [_mean(r) for r in right],
        "log_loss": [_mean(x) for x in loss],
        "ece": [round(expected_calibration_error(c, r), 4) for c, r in zip(confidence, right, strict=True)],
    }


def compare(
    trace: Trace, *, split: int = 0, hidden: Mapping[str, Vector] | None = None, settings: Settings | None = None
) -> dict[str, Any]:
    """All predictors on one division of a trace's runs."""
    runs = runs_of(trace, hidden)
    random.Random(split).shuffle(runs)
    aside = round(HELD_OUT * len(runs))
    test, past = runs[:aside], runs[aside:]
    agents = len({a for r in runs for a in r.agents})
    known = {a for r in past for a in r.agents}
    following = [(r.agents[:i], r.agents[i]) for r in test for i in range(1, len(r.agents))]
    base = settings or Settings(seed=split)
    size = max((len(v) for r in runs for v in r.hidden if v is not None), default=0)
    whole = replace(base.shape, hidden=size)
    variants: dict[str, Shape] = {
        "sage": whole,
        "sage without h_cur": replace(whole, use_current=False),
        "sage without h_path": replace(whole, use_path=False),
    }
    if size:
        variants["sage without h_txt"] = replace(whole, hidden=0)
    variants["rgcn"] = replace(whole, backbone="rgcn", use_path=False, hidden=0)
    found = {"markov": score(_markov(past, trace.edges), test, agents)}
    for name, shape in variants.items():
        trained = train(past, replace(base, shape=shape), edges=trace.edges)
        found[name] = score(_learned(Forecaster(trained)), test, agents)
        found[name]["epochs"] = [trained.report["epochs"]]
    return {
        "runs": len(past),
        "held_out": len(test),
        "agents": agents,
        "unnameable": _mean([a not in known and a not in path for path, a in following]),
        "predictors": found,
    }


def tables(trace: Trace) -> dict[str, list[float]]:
    """Top-1 of steps 1 to 3 of mere tables, which on a long trace show what there is to know: by the current agent
    alone (a Markov chain for each step), and by the agent before it, the length of its turn and the tester's turns so
    far, too, which is all of the agents' past that the SWE-bench-like load draws from."""
    runs = [r.agents for r in runs_of(trace)]
    aside = round(HELD_OUT * len(runs))
    found: dict[str, list[float]] = {}
    for name, context in (("by agent", lambda path: path[-1:]), ("by path", _turns)):
        learned: list[dict[Any, Counter[str]]] = [defaultdict(Counter) for _ in range(STEPS)]
        right: list[list[bool]] = [[] for _ in range(STEPS)]
        for number, run in enumerate(reversed(runs), start=1):
            for at in range(1, len(run) + 1):
                seen = context(run[:at])
                for k in range(STEPS):
                    came, counts = (*run, END)[min(at + k, len(run))], learned[k][seen]
                    if number <= len(runs) - aside:
                        counts[came] += 1
                    else:
                        right[k].append(bool(counts) and max(counts, key=lambda a: counts[a]) == came)
        found[name] = [_mean(r) for r in right]
    return found


def _turns(path: Sequence[str]) -> tuple[Any, ...]:
    """The current agent, the one before it, calls of its turn (at most 12) and turns of the tester (at most 3)."""
    turns = [(agent, len(list(calls))) for agent, calls in groupby(path)]
    agent, length = turns[-1]
    before = turns[-2][0] if len(turns) > 1 else None
    return agent, before, min(length, 12), min(sum(1 for a, _ in turns if a == "tester"), 3)


def measure_speed(trace: Trace, *, rounds: int = 30) -> dict[str, float]:
    """Milliseconds of processor time of one pass over 64 live workflows on one core; each learned a step before."""
    runs = runs_of(trace)
    forecaster = Forecaster(train(runs, Settings(epochs=1), edges=trace.edges))
    rng = random.Random(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        took = []
        for _ in range(rounds):
            live = [rng.choice(runs).agents for _ in range(LIVE)]
            paths = [a[: rng.randint(1, min(64, len(a)))] for a in live]
            forecaster.learn(paths[0], paths[1][0])
            begun = time.thread_time()
            forecaster.forecast_many(paths, 4)
            took.append(1_000 * (time.thread_time() - begun))
    finally:
        torch.set_num_threads(threads)
    return {"best": round(min(took), 3), "median": round(statistics.median(took), 3), "worst": round(max(took), 3)}


def hidden_of_who_and_when(folder: Path, model: str, *, tokens: int = 384) -> dict[str, Vector]:
    """Hidden states by call, as the engine gives them: of the last token of each prompt, after the model's last norm.

    A prompt is the speaker's instructions and the conversation so far; its last ``tokens`` tokens are read.
    """
    from transformers import AutoModel, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    network: Any = AutoModel.from_pretrained(model, dtype=torch.float32).eval()
    out: dict[str, Vector] = {}
    for file in sorted(folder.rglob("*.json")):
        data = json.loads(file.read_bytes())
        said: list[str] = []
        for i, message in enumerate(data["history"]):
            speaker = message.get("name", "")
            if said and speaker != "Computer_terminal":
                text = "\n".join([*said, f"{speaker}: {str(data['system_prompt'].get(speaker, ''))[:200]}"])
                ids = tokenizer(text)["input_ids"][-tokens:]
                with torch.inference_mode():
                    state = network(torch.tensor([ids])).last_hidden_state[0, -1]
                out[f"{file.parent.name}/{file.stem}-{i}"] = state.numpy()
            said.append(f"{speaker}: {message.get('content', '')}")
    return out


def _public(folder: Path) -> list[tuple[str, str, Path]]:
    """Public traces that are there, by name: their format and where they lie."""
    known = (
        ("who-and-when", "who-and-when", folder / "who-and-when"),
        ("swebench-runs", "mini-swe-agent-phases", folder / "mini-swe-agent" / "steps_first400.jsonl.gz"),
    )
    return [each for each in known if each[2].exists()]


def _markov(runs: Sequence[Run], edges: Mapping[str, Sequence[str]]) -> Forecasts:
    chain = Markov(edges=edges, window=10_000_000)
    for run in runs:
        for i in range(1, len(run.agents) + 1):
            chain.learn(run.agents[:i], run.agents[i] if i < len(run.agents) else END)
    return lambda run: [chain.forecast(run.agents[:i], STEPS) for i in range(1, len(run.agents) + 1)]


def _learned(forecaster: Forecaster) -> Forecasts:
    def forecasts(run: Run) -> Sequence[Steps]:
        paths = [run.agents[max(0, i - 64) : i] for i in range(1, len(run.agents) + 1)]
        return forecaster.forecast_many(paths, STEPS, hidden=run.hidden, named=1e-9)

    return forecasts


def _mean(values: Sequence[float]) -> float:
    return round(float(np.mean(values)), 4) if len(values) else 0.0


def _over_splits(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The mean over several divisions, and how much it spreads from one to the next."""
    first = found[0]
    predictors = {}
    for name, measures in first["predictors"].items():
        predictors[name] = {
            measure: [_mean([f["predictors"][name][measure][k] for f in found]) for k in range(len(values))]
            for measure, values in measures.items()
        }
        losses = [f["predictors"][name]["log_loss"][0] for f in found]
        predictors[name]["log_loss_1_spread"] = round(max(losses) - min(losses), 4)
    wins = [
        all(
            f["predictors"]["sage"][m][k] * sign <= f["predictors"]["markov"][m][k] * sign
            for m, sign in (("log_loss", 1), ("top1", -1))
            for k in range(STEPS)
        )
        for f in found
    ]
    return {
        **{k: first[k] for k in ("runs", "held_out", "agents")},
        "unnameable": _mean([f["unnameable"] for f in found]),
        "splits": len(found),
        "splits_where_sage_is_never_worse_than_markov": sum(wins),
        "predictors": predictors,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Print everything as one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m agentflow.bench.predictor_eval", description=__doc__)
    parser.add_argument(
        "--data", default="../shared/data", help="folder of who-and-when and mini-swe-agent (default %(default)s)"
    )
    parser.add_argument("--trace", action="append", default=[], metavar="SOURCE", help="another trace; may be repeated")
    parser.add_argument("--splits", type=int, default=3, help="divisions of the runs (default %(default)s)")
    parser.add_argument("--workflows", type=int, default=200, help="workflows of generated loads (default %(default)s)")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="only this set; may be repeated")
    parser.add_argument("--hidden", metavar="FILE", help="hidden states of who-and-when's calls, written if absent")
    parser.add_argument("--model", help="model that gives the hidden states (default: the built-in one)")
    parser.add_argument(
        "--tokens", type=int, default=384, help="tokens of a prompt that it reads (default %(default)s)"
    )
    parser.add_argument(
        "--tables", action="store_true", help="only what tables of the past give on long generated loads"
    )
    options = parser.parse_args(arguments)
    if options.tables:
        loads = [name for name in ("hover", "swebench") if not options.only or name in options.only]
        found = {name: tables(load(f"generate={name}:{LONG}")) for name in loads}
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
        return 0
    sources = {"hover": f"generate=hover:{options.workflows}", "swebench": f"generate=swebench:{options.workflows}"}
    sources |= {name: f"{kind}={path}" for name, kind, path in _public(Path(options.data))}
    sources |= {Path(s).name: s for s in options.trace}
    traces = {name: load(source) for name, source in sources.items() if not options.only or name in options.only}
    hidden: dict[str, Vector] = {}
    if options.hidden is not None:
        if not Path(options.hidden).exists():
            model = str(resolve_model(options.model).path)
            write_hidden(
                hidden_of_who_and_when(Path(options.data) / "who-and-when", model, tokens=options.tokens),
                options.hidden,
            )
        hidden = read_hidden(options.hidden)
    out: dict[str, Any] = {"sets": {}, "milliseconds_for_64_workflows_on_one_core": {}}
    for name, trace in traces.items():
        mine = hidden if name == "who-and-when" else {}
        out["sets"][name] = _over_splits([compare(trace, split=s, hidden=mine) for s in range(options.splits)])
        out["milliseconds_for_64_workflows_on_one_core"][name] = measure_speed(trace)
    sys.stdout.write(json.dumps(out, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
