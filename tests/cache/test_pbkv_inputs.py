"""What the learned predictor sees of a path, worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from agentflow.cache.pbkv.graph_data import LIMIT, CallGraph
from agentflow.cache.pbkv.inputs import LENGTH, Chain, build
from agentflow.cache.pbkv.sage import Network, Shape, network_arrays, tensors_of


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


def test_attention_over_a_path_is_that_of_keys_and_values() -> None:
    """The network never makes the keys and values of each call; a plain attention that does gives the same."""
    torch.manual_seed(0)
    graph = CallGraph()
    inputs = build(graph, [["a", "b", "b", "c"], [], ["c"] * (LENGTH + 3)], 2)
    network, given = Network(Shape(width=8, steps=2)).eval(), tensors_of(inputs)
    seen = []
    network.fuse.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0][:, 8:24]))
    with torch.inference_mode():
        embedded = network.embed(*network_arrays(graph))
        network(embedded, given)
        held = torch.cat([embedded, torch.zeros(1, 8)])[given["path"]]
        tokens = held + network.places.weight + network.runs(given["runs"])
        query = network.query(torch.cat([held[:, 0], given["context"]], dim=1)).view(3, 2, 1, 8)
        key, value = (f(tokens).view(3, LENGTH, 2, 8).transpose(1, 2) for f in (network.key, network.value))
        there = given["path"] >= 0
        there[:, 0] = True
        wanted = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=there[:, None, None])
    torch.testing.assert_close(seen[0], wanted.reshape(3, 16), rtol=1e-4, atol=1e-5)


def test_a_chain_by_hand() -> None:
    """What follows in one and two steps, of states asked for one after the other and of an unknown one."""
    graph = CallGraph()
    for path, following in ((["a"], "b"), (["a", "b"], "a"), (["a", "b", "a"], "b")):
        graph.learn(path, following)
    transitions = graph.transitions()
    chain = Chain(graph, 2)
    first, again = chain.rows(np.array([1, -1])), chain.rows(np.array([0, 1]))
    assert (again[1] == first[0]).all()
    for found, row in ((again[0], transitions[0]), (first[0], transitions[1]), (first[1], transitions[:2].mean(0))):
        alive = 1.0
        for k in range(2):
            left = row[:2].sum()
            assert np.exp(found[k, :2]) == pytest.approx(row[:2] / left, rel=1e-4)
            assert 1 / (1 + np.exp(-found[k, 2])) == pytest.approx(1 - left / alive, rel=1e-4)
            alive, row = left, row @ transitions
