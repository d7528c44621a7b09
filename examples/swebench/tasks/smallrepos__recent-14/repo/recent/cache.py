"""``Recent``: a dict of bounded size."""


class Recent:
    """Holds at most ``size`` entries; the one used longest ago is dropped first."""

    def __init__(self, size):
        if size < 1:
            raise ValueError("size must be at least 1")
        self.size = size
        self.dropped = 0
        self._entries = {}

    def __len__(self):
        return len(self._entries)

    def __contains__(self, key):
        return key in self._entries

    def __getitem__(self, key):
        return self._entries[key]

    def __setitem__(self, key, value):
        self._entries.pop(key, None)
        self._entries[key] = value
        if len(self._entries) > self.size:
            oldest = next(iter(self._entries))
            del self._entries[oldest]
            self.dropped += 1

    def get(self, key, default=None):
        """The value of a key, or the default."""
        return self._entries.get(key, default)
