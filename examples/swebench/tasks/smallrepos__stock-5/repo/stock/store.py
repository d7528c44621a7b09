"""The store."""


class OutOfStock(Exception):
    """There are not enough pieces left."""


class Store:
    """Pieces left by item."""

    def __init__(self, pieces):
        self.pieces = dict(pieces)

    def fill(self, order):
        """Take an order's pieces out of the store, all or none."""
        short = [item for item, n in order.items.items() if self.pieces.get(item, 0) < n]
        if short:
            raise OutOfStock(", ".join(sorted(short)))
        for item, n in order.items.items():
            self.pieces[item] -= n
