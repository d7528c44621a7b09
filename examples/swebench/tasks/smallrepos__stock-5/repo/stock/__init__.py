"""Orders and the store."""

from stock.order import Order
from stock.store import OutOfStock, Store

__all__ = ["Order", "OutOfStock", "Store"]
