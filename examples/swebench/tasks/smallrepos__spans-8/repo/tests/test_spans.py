import pytest

from spans import gaps, merge, total


def test_touching_spans_become_one():
    assert merge([(1, 2), (2, 4)]) == [(1, 4)]


def test_spans_apart_stay():
    assert merge([(1, 2), (5, 6)]) == [(1, 2), (5, 6)]


def test_nothing():
    assert merge([]) == []


def test_gaps():
    assert gaps([(1, 2), (5, 6)]) == [(2, 5)]


def test_backward_span():
    with pytest.raises(ValueError, match="before it starts"):
        total([(4, 1)])
