"""What the learned predictor sees of a path, worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

pytest.importorskip("torch")

from agentflow.cache.pbkv.graph_data import LIMIT, CallGraph
from agentflow.cache.pbkv.inputs import LENGTH, build


def size(count: int) -> float:
    return math.log1p(count) / math.log(64)


def test_a_path_by_hand_beside_an_empty_one() -> None:
    found = build(CallGraph(), [[], ["a", "b", "b", "a", "c", "c"], ["b"]], 2)
    a, b, c = 0, 1, 2
    assert found.path[1, :6].tolist() == [c, c, a, b, b, a]
    assert found.runs[1, :6].tolist() == [0, 0, 1, 2, 2, 3]
    assert (found.path[1, 6:] == -1).all()
    assert (found.path[0] == -1).all()
    assert not found.context[0].any()
    # Its length, the current stretch, stretches before, further turns of the current agent, other agents, 1 / length.
    assert found.context[1].tolist() == pytest.approx([size(6), size(2), size(3), size(0), size(2), 1 / 6])
    # Called, current, the one before, 1 / (1 + calls since), share of calls, first.
    assert found.agents[1].tolist() == [
        pytest.approx([1, 0, 1, 1 / 3, 2 / 6, 1]),
        pytest.approx([1, 0, 0, 1 / 4, 2 / 6, 0]),
        pytest.approx([1, 1, 0, 1, 2 / 6, 0]),
    ]
    assert found.agents[2, b].tolist() == [1, 1, 0, 1, 1, 1]
    assert found.allowed.tolist() == [[False] * 3, [True] * 3, [False, True, False]]


def test_long_paths_and_agents_without_room() -> None:
    names = [f"agent {i}" for i in range(LIMIT + 2)]
    found = build(CallGraph(), [names, ["agent 0", "agent 1"] * LENGTH], 2)
    assert (found.path[0, :2] == -1).all()  # the last two have no number
    assert found.path[1].tolist() == [1, 0] * (LENGTH // 2)
    assert found.runs[1].max() == 7
    assert found.context[1, 3] == np.float32(size(LENGTH - 1))
