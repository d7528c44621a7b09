import pytest

from stock import Order


def test_add_counts_pieces():
    order = Order("ann", {})
    order.add("apple", 2)
    order.add("apple")
    assert order.total_pieces() == 3


def test_add_needs_a_piece():
    with pytest.raises(ValueError, match="at least 1"):
        Order("ann", {}).add("apple", 0)
