"""A bounded dict."""

from recent.cache import Recent

__all__ = ["Recent"]
