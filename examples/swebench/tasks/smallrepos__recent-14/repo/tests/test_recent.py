import pytest

from recent import Recent


def filled():
    cache = Recent(2)
    cache["a"] = 1
    cache["b"] = 2
    return cache


def test_size_is_bounded():
    cache = filled()
    cache["c"] = 3
    assert len(cache) == 2
    assert cache.dropped == 1


def test_writing_again_counts_as_use():
    cache = filled()
    cache["a"] = 5
    cache["c"] = 3
    assert "a" in cache
    assert "b" not in cache


def test_looking_is_no_use():
    cache = filled()
    assert "a" in cache
    cache["c"] = 3
    assert "a" not in cache


def test_missing():
    with pytest.raises(KeyError):
        filled()["z"]
    assert filled().get("z", 7) == 7
