"""Regret is counted for exactly the tokens that were evicted and then computed again."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from agentflow.cache.ghosts import Ghosts, Regret, path_hash


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int64)


@given(st.lists(st.integers(0, 200_000), min_size=1, max_size=50), st.data())
def test_the_hash_of_a_path_does_not_depend_on_where_it_is_cut(tokens: list[int], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(tokens)))
    whole = path_hash(7, ids(*tokens))
    assert path_hash(path_hash(7, ids(*tokens[:cut])), ids(*tokens[cut:])) == whole


def test_long_paths_hash_in_parts() -> None:
    tokens = np.arange(20_000, dtype=np.int64)
    assert path_hash(path_hash(0, tokens[:4_097]), tokens[4_097:]) == path_hash(0, tokens)


def test_paths_that_differ_hash_differently() -> None:
    seen = {path_hash(0, ids(*p)) for p in [(1,), (2,), (1, 2), (2, 1), (0,), (0, 0), (0, 0, 0)]}
    assert len(seen) == 7


def test_computing_evicted_tokens_again_is_regret() -> None:
    ghosts = Ghosts()
    ghosts.evicted(5, ids(1, 2, 3, 4), seq=10)
    assert ghosts.computed(6, ids(1, 2, 3, 4)) == []
    assert ghosts.computed(5, ids(9, 2)) == []
    assert ghosts.computed(5, ids(1, 2, 7, 7)) == [Regret(10, 2)]
    assert ghosts.computed(5, ids(1, 2, 3, 4)) == []


def test_regret_follows_a_path_of_several_evicted_nodes() -> None:
    ghosts = Ghosts()
    ghosts.evicted(path_hash(0, ids(1, 2)), ids(3, 4), seq=1)  # leaf first, as the tree evicts
    ghosts.evicted(0, ids(1, 2), seq=2)
    assert ghosts.computed(0, ids(1, 2, 3, 4, 5)) == [Regret(2, 2), Regret(1, 2)]
    assert len(ghosts) == 0
    assert ghosts.tokens_held == 0


def test_a_node_shorter_than_the_ghost_regrets_only_its_own_tokens() -> None:
    ghosts = Ghosts()
    ghosts.evicted(0, ids(1, 2, 3), seq=1)
    assert ghosts.computed(0, ids(1, 2)) == [Regret(1, 2)]


def test_ghosts_are_bounded_by_number_and_by_tokens() -> None:
    ghosts = Ghosts(limit=10, token_limit=100)
    for i in range(1_000):
        ghosts.evicted(i, ids(*range(i % 30 + 1)), seq=i)
        assert len(ghosts) <= 10
        assert ghosts.tokens_held <= 100
    ghosts.clear()
    assert (len(ghosts), ghosts.tokens_held) == (0, 0)
