"""Against real agents: 400 SWE-bench runs of mini-swe-agent, and 50 whole trajectories of it."""

import gzip
import json
import random
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from agentflow.cache.ttl import Memorability, ToolDurations, ToolKey, command_word, recognise_tool, tau_star

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "mini-swe-agent"


def lines(name: str) -> Iterator[dict[str, Any]]:
    path = DATA / name
    if not path.exists():
        pytest.skip(f"needs shared/data/mini-swe-agent/{name}, which is not part of the repository")
    with gzip.open(path, "rt", encoding="utf-8") as file:
        yield from map(json.loads, file)


@pytest.fixture(scope="module")
def runs() -> list[list[dict[str, Any]]]:
    by_run: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in lines("steps_first400.jsonl.gz"):
        by_run[row["instance_id"]].append(row)
    out = [sorted(rows, key=lambda r: r["step"]) for _, rows in sorted(by_run.items())]
    random.Random(0).shuffle(out)
    return out


def gaps(runs: list[list[dict[str, Any]]]) -> Iterator[tuple[ToolKey, float]]:
    """Seconds from one request to the next, by the command in between."""
    for rows in runs:
        for row, following in pairwise(rows):
            yield ToolKey("bash", command_word(row["action"] or "")), float(following["created"] - row["created"])


@pytest.mark.parametrize("benefit", [10.0, 20.0, 40.0])
def test_on_runs_not_seen_before_tau_star_beats_the_fixed_pin_and_no_pin(
    benefit: float, runs: list[list[dict[str, Any]]]
) -> None:
    known = ToolDurations(window=4_096)
    for key, seconds in gaps(runs[:200]):
        known.add(key, seconds)

    def saved(seconds: float, tau: float) -> float:
        """What a pin of ``tau`` seconds is worth when the next request comes after ``seconds``."""
        return (benefit if seconds <= tau else 0.0) - min(seconds, tau)

    unseen = list(gaps(runs[200:]))
    assert len(unseen) > 5_000
    ours, held, fixed, oracle = 0.0, 0.0, 0.0, 0.0
    for key, seconds in unseen:
        distribution, source = known.distribution(key, 0.0)
        assert source in ("tool", "variant")
        ours += saved(seconds, tau_star(distribution, benefit, 1.0).tau)
        held += saved(seconds, tau_star(distribution, benefit, 1.0, held=True).tau)
        fixed += saved(seconds, 2.0)
        oracle += max(0.0, benefit - seconds)
    assert oracle >= max(ours, held)
    assert ours > max(0.0, fixed)
    assert held > 1.05 * ours  # a pin really ends with the return, and counting on that pays here


def test_real_programs_are_somewhat_memorable(runs: list[list[dict[str, Any]]]) -> None:
    eta = Memorability(window=400)
    for rows in runs:
        eta.finished(len(rows))
    assert 0.1 < eta.eta() < 0.6


def test_the_commands_of_real_answers_are_recognised() -> None:
    found, none, unclear = 0, 0, 0
    for trajectory in lines("trajs_sample50.jsonl.gz"):
        for message in trajectory["messages"]:
            if message["role"] != "assistant":
                continue
            key = recognise_tool(message["content"])
            if key is not None:
                assert key.tool == "bash"
                found += 1
            elif message["content"].count("```bash") > 1:
                unclear += 1  # the agent refuses these too: it runs exactly one block
            else:
                none += 1
    assert found > 1_800
    assert none <= 0.02 * found
    assert unclear < 0.06 * found
