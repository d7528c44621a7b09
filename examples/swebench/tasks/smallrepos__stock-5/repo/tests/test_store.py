import sys

import pytest

from stock import Order, OutOfStock, Store


def test_fill_takes_pieces():
    store = Store({"nail": 10})
    store.fill(Order("ann", {"nail": 4}))
    assert store.pieces == {"nail": 6}


def test_all_or_none():
    store = Store({"nail": 10, "nut": 1})
    with pytest.raises(OutOfStock, match="nut"):
        store.fill(Order("ann", {"nail": 4, "nut": 2}))
    assert store.pieces == {"nail": 10, "nut": 1}


@pytest.mark.skipif(sys.platform != "win32", reason="only on Windows")
def test_windows_line_ends():
    assert Store({"nail": 1}).pieces == {"nail": 1}
